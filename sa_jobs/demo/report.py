"""The demo's numbers, read from its tables, and the checks on them.

The tables are the demo's own and small, so everything is counted.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import BigInteger, Connection, and_, cast, func, literal_column, not_, select
from sqlalchemy.sql.elements import ColumnElement

from sa_jobs.demo.shop import Order, Receipt, jobs, partner_is_gone
from sa_jobs.statements import LEASE_EXPIRED, LEASE_EXPIRED_FINALLY

_jobs = jobs.tables.jobs
_failures = jobs.tables.failures
_workers = jobs.tables.workers

_order_id: ColumnElement[int] = cast(_jobs.c.payload["order_id"].astext, BigInteger)
_lapsed = _failures.c.error.in_((LEASE_EXPIRED, LEASE_EXPIRED_FINALLY))


@dataclass(frozen=True)
class Numbers:
    """How far things are."""

    orders: int
    receipts: int
    waiting: int
    running: int
    dead: int
    failed_attempts: int
    reclaimed: int

    @property
    def retries(self) -> int:
        """How many failed attempts were tried again: all but the last of the dead jobs."""
        return self.failed_attempts - self.dead


@dataclass(frozen=True)
class Check:
    """What must hold, whether it does, and what was found where it does not."""

    text: str
    passed: bool
    found: str


@dataclass(frozen=True)
class Latency:
    """Milliseconds from the time a job was due to its claim."""

    median: float
    p95: float


def look(connection: Connection) -> Numbers:
    """Return how far things are."""
    with connection.begin():
        status = {
            row.status: row.number
            for row in connection.execute(
                select(_jobs.c.status, func.count().label("number")).group_by(_jobs.c.status)
            )
        }
        orders, receipts, failed, lapsed = connection.execute(
            select(
                select(func.count()).select_from(Order).scalar_subquery(),
                select(func.count()).select_from(Receipt).scalar_subquery(),
                select(func.count()).select_from(_failures).where(not_(_lapsed)).scalar_subquery(),
                select(func.count()).select_from(_failures).where(_lapsed).scalar_subquery(),
            )
        ).one()
    return Numbers(
        orders=orders,
        receipts=receipts,
        waiting=status.get("ready", 0),
        running=status.get("running", 0),
        dead=status.get("dead", 0),
        failed_attempts=failed,
        reclaimed=lapsed,
    )


def live_pids(connection: Connection) -> set[int]:
    """Return the process ids of the workers that are alive."""
    with connection.begin():
        return set(
            connection.scalars(select(_workers.c.pid).where(_workers.c.alive_until > func.now()))
        )


def held_by(connection: Connection, pid: int) -> int:
    """Return how many jobs the worker of this process id holds."""
    with connection.begin():
        return connection.execute(
            select(func.count())
            .select_from(_jobs.join(_workers, _workers.c.id == _jobs.c.locked_by))
            .where(_workers.c.pid == pid, _jobs.c.status == "running")
        ).scalar_one()


def latency(connection: Connection) -> Latency:
    """Return how long jobs waited for their first claim, once they were due."""
    waited = func.extract("epoch", _jobs.c.claimed_at - _jobs.c.run_at) * 1000
    with connection.begin():
        median, p95 = connection.execute(
            select(
                *(
                    func.percentile_cont(literal_column(fraction)).within_group(waited)
                    for fraction in ("0.5", "0.95")
                )
            ).where(_jobs.c.attempts == 1, _jobs.c.status == "done")
        ).one()
    return Latency(float(median or 0), float(p95 or 0))


def check_all(
    connection: Connection,
    *,
    accepted: Collection[int],
    declined: Collection[int],
    errors: Collection[str],
    killed_held: int,
    exit_codes: Collection[int],
) -> list[Check]:
    """Return the checks: what the shop promised its customers, and what the queue promises."""
    numbers = look(connection)
    with connection.begin():
        orders = set(connection.scalars(select(Order.id)))
        not_one = connection.execute(
            select(Order.id, func.count(Receipt.id))
            .outerjoin(Receipt, Receipt.order_id == Order.id)
            .group_by(Order.id)
            .having(func.count(Receipt.id) != 1)
        ).all()
        receipted = set(connection.scalars(select(Receipt.order_id)))
        with_job = set(connection.scalars(select(_order_id)))
        dead = set(connection.scalars(select(_order_id).where(_jobs.c.status == "dead")))
        unfinished = connection.execute(
            select(func.count()).where(
                and_(_jobs.c.status != "done", _jobs.c.handler == "send_receipt")
            )
        ).scalar_one()
    gone = {order_id for order_id in orders if partner_is_gone(order_id)}
    stray = (receipted | with_job) & set(declined) | (receipted | with_job) - orders
    return [
        Check(
            "every order that the shop accepted is there, and no other",
            orders == set(accepted) and not errors,
            f"{len(orders)} orders of {len(accepted)} accepted; {_some(errors)}",
        ),
        Check(
            "every committed order has exactly one receipt",
            not not_one,
            f"order and receipts: {_some(tuple(row) for row in not_one)}",
        ),
        Check(
            "no order that was rolled back has a receipt, or a job",
            not stray,
            f"orders {_some(stray)}",
        ),
        Check("every receipt's job is done", unfinished == 0, f"{unfinished} are not"),
        Check(
            "the jobs of the killed worker were taken back",
            numbers.reclaimed >= 1,
            f"it held {killed_held}, and {numbers.reclaimed} were taken back",
        ),
        Check(
            "dead are the jobs for closed partners, and no others",
            dead == gone,
            f"orders {_some(dead ^ gone)}",
        ),
        Check(
            "every worker that was asked to stop drained and ended with code 0",
            all(code == 0 for code in exit_codes),
            f"codes {_some(exit_codes)}",
        ),
    ]


def _some(values: object) -> str:
    found = [str(value) for value in values]  # type: ignore[attr-defined]
    return ", ".join(found[:5]) + (f", and {len(found) - 5} more" if len(found) > 5 else "")
