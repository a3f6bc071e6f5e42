"""What is known at the end of a run, read from the database, the ledger and the logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, NullPool, create_engine, func, select, text

from benchmarks.chaos.application import effects, orders
from benchmarks.chaos.fleet import Death
from benchmarks.chaos.ledger import requests, starts, transactions
from sa_jobs.models import DEFAULT_TABLES

Period = tuple[float, float]
"""From when to when, in seconds of the epoch."""

_jobs, _failures = DEFAULT_TABLES.jobs, DEFAULT_TABLES.failures


@dataclass(frozen=True)
class Job:
    """A job's row; `order` is the name that its payload has, `result` the claim that it names."""

    id: int
    handler: str
    status: str
    attempts: int
    max_attempts: int
    claim_no: int
    result: int | None
    order: str


@dataclass(frozen=True)
class Failure:
    """A failed attempt, and when it was claimed; in seconds of the epoch, as in other records."""

    job_id: int
    claim_no: int
    worker: str | None
    error: str
    claimed_at: float


@dataclass(frozen=True)
class Start:
    """The start of a handler."""

    job_id: int
    attempt: int
    claim_no: int
    pid: int
    at: float


@dataclass(frozen=True)
class Effect:
    """An effect that is committed."""

    job_id: int
    claim_no: int


@dataclass(frozen=True)
class PlacedOrder:
    """A row of business data, with the number of jobs that belong to it."""

    token: str
    name: str
    jobs: int


@dataclass(frozen=True)
class Transaction:
    """A transaction that placed an order, and what its process was told of its end and jobs."""

    token: str
    outcome: str
    job_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """A cancel or retry that somebody was about to ask for."""

    job_id: int
    what: str


@dataclass(frozen=True)
class Evidence:
    """Everything that the verdict rests on."""

    jobs: Sequence[Job] = ()
    failures: Sequence[Failure] = ()
    starts: Sequence[Start] = ()
    effects: Sequence[Effect] = ()
    orders: Sequence[PlacedOrder] = ()
    transactions: Sequence[Transaction] = ()
    requests: Sequence[Request] = ()
    deaths: Sequence[Death] = ()
    # When there was no database, and when no worker worked.
    outages: Sequence[Period] = ()
    unattended: Sequence[Period] = ()
    server_log: str = ""
    # As the server counts them; a crash makes it forget.
    deadlocks: int = 0
    worker_errors: Sequence[str] = ()
    enqueuer_codes: Sequence[int] = ()
    harness_errors: Sequence[str] = field(default=())


def read_database(connection: Connection) -> Evidence:
    """Return what the database of the application says."""
    return Evidence(
        jobs=[
            Job(**row._mapping)
            for row in connection.execute(
                select(
                    *(_jobs.c[name] for name in Job.__dataclass_fields__ if name != "order"),
                    _jobs.c.payload["order"].astext.label("order"),
                ).order_by(_jobs.c.id)
            )
        ],
        failures=[
            Failure(row.job_id, row.claim_no, row.worker, row.error, float(row.claimed_at))
            for row in connection.execute(
                select(
                    *(_failures.c[name] for name in ("job_id", "claim_no", "worker")),
                    func.left(_failures.c.error, 100).label("error"),
                    func.extract("epoch", _failures.c.claimed_at).label("claimed_at"),
                ).order_by(_failures.c.id)
            )
        ],
        effects=[Effect(*row) for row in connection.execute(select(effects))],
        orders=[PlacedOrder(*row) for row in connection.execute(select(orders))],
        deadlocks=connection.execute(
            text("SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
        ).scalar_one(),
    )


def read_ledger(connection: Connection) -> Evidence:
    """Return what the ledger says."""
    columns = starts.c
    return Evidence(
        starts=[
            Start(row.job_id, row.attempt, row.claim_no, row.pid, float(row.at))
            for row in connection.execute(
                select(
                    *(columns[name] for name in ("job_id", "attempt", "claim_no", "pid")),
                    func.extract("epoch", columns.at).label("at"),
                ).order_by(columns.at)
            )
        ],
        transactions=[
            Transaction(row.token, row.outcome, tuple(row.job_ids))
            for row in connection.execute(select(transactions))
        ],
        requests=[Request(row.job_id, row.what) for row in connection.execute(select(requests))],
    )


def worker_errors(logs: Path) -> list[str]:
    """Return the lines in which workers themselves say that something is an error."""
    return [
        f"{path.stem}: {line}"
        for path in sorted(logs.glob("worker-*.log"))
        for line in path.read_text(errors="replace").splitlines()
        if " ERROR sa_jobs" in line
    ]


def connected(url: str) -> Connection:
    """Return a connection on which nothing is written."""
    engine = create_engine(url, poolclass=NullPool).execution_options(postgresql_readonly=True)
    return engine.connect()
