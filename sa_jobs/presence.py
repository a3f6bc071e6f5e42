"""Pure builders for how workers are seen: who sleeps and is to be woken, and who is alive.

A worker that sleeps opens the gate of each of its queues; an enqueue notifies only where it is
open, since a committing NOTIFY takes a lock that is global to the server. A gate is an advisory
lock, and it is open while a listening session holds it exclusively. So opening it writes nothing,
everybody sees it at once, and it shuts by itself when the worker dies. Of several workers that
sleep on a queue one holds it, which is enough: a notification wakes all. The row of a worker is a
view for operators; no job's ownership rests on it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Delete,
    Double,
    Executable,
    Select,
    Subquery,
    Text,
    and_,
    bindparam,
    case,
    cast,
    column,
    delete,
    func,
    literal_column,
    not_,
    or_,
    select,
    table,
    true,
)
from sqlalchemy.dialects.postgresql import JSONB, REGCLASS
from sqlalchemy.dialects.postgresql import insert as pg_insert

from sa_jobs.errors import WorkerError
from sa_jobs.expressions import seconds, table_name, unnest
from sa_jobs.models import Tables
from sa_jobs.poolers import is_pooled
from sa_jobs.statements import NOW, Moment, built

# Of the hexadecimal SHA-256 by which notifications name a queue; the trigger function agrees.
HASH_LENGTH = 16

# Who holds a gate open.
SELF, OTHER, NOBODY = "self", "other", "nobody"


def prepare_session(connection: Connection, application_name: str) -> None:
    """Name a worker's connection in pg_stat_activity, and make sure that it is READ COMMITTED.

    Its statements are prepared, and a plan that was made when the table was nearly empty must serve
    when it is not: so plans read no whole table where there is an index. Nor are they compiled.

    Under another default, which a role can have, claims would fail where they should wait. Through
    a pooler nothing is set, since it would stay with a connection that others use; then another
    default raises WorkerError.
    """
    setting = "default_transaction_isolation"
    level = connection.execute(select(func.current_setting(setting))).scalar_one()
    if not is_pooled(connection):
        connection.execute(
            select(
                func.set_config("application_name", application_name, False),
                func.set_config(setting, "read committed", False),
                func.set_config("enable_seqscan", "off", False),
                func.set_config("jit", "off", False),
            )
        )
    elif level != "read committed":
        raise WorkerError(
            f"transactions of the worker's role are {level} by default, they must be READ "
            "COMMITTED, and through a connection pooler the worker cannot set that: run ALTER ROLE "
            f"... SET {setting} = 'read committed', or pass Worker(control_engine=) with a direct "
            "URL"
        )


def channel_name(connection: Connection, tables: Tables) -> str:
    """Return the notification channel of these tables, as the database of a connection has it."""
    return str(connection.execute(channel(tables)).scalar_one())


def listen(connection: Connection, name: str) -> None:
    """Subscribe a connection in autocommit mode to a channel's notifications."""
    connection.exec_driver_sql(f'LISTEN "{name}"')


def notify(connection: Connection, name: str, payload: str) -> None:
    """Notify all who listen on a channel, at the commit."""
    connection.execute(select(func.pg_notify(name, payload)))


def probe(connection: Connection) -> None:
    """Ask the server for an answer, so that a connection which is dead but silent shows it."""
    connection.execute(select(literal_column("1")))


@built
def channel(tables: Tables) -> Select[tuple[str]]:
    """Select the notification channel of these tables, which the trigger function notifies on."""
    return select(_channel(tables))


@built
def wake(tables: Tables) -> Select[Any]:
    """Notify workers that sleep on one of `queues` (array), as the trigger does on insert."""
    gated = _gated(tables)
    was_shut = func.pg_try_advisory_lock_shared(gated.c.gate)
    return select(func.pg_notify(_channel(tables), queue_hash(gated.c.queue))).where(
        func.coalesce(func.current_setting("sa_jobs.notify", True), "") != "off",
        case((was_shut, not_(func.pg_advisory_unlock_shared(gated.c.gate))), else_=true()),
    )


@built
def open_gates(tables: Tables) -> Select[Any]:
    """Open the gates of `queues` (array) by the session's own lock; select (queue, holder) of each.

    The holder is SELF; or OTHER, where another session has opened it; or NOBODY, where an enqueue
    was just looking at it, so that it may be tried again at once.
    """
    gated = _gated(tables)
    was_shut = func.pg_try_advisory_lock_shared(gated.c.gate)
    holder = case(
        (func.pg_try_advisory_lock(gated.c.gate), SELF),
        (and_(was_shut, func.pg_advisory_unlock_shared(gated.c.gate)), NOBODY),
        else_=OTHER,
    )
    return select(gated.c.queue, holder.label("holder"))


def shut_gates() -> Select[Any]:
    """Shut all gates that the session has opened."""
    return select(func.pg_advisory_unlock_all())


def queue_hash(queue: Any) -> ColumnElement[str]:
    """Return the short hash that notifications carry in place of a queue's name."""
    return func.left(func.encode(func.sha256(func.convert_to(queue, "UTF8")), "hex"), HASH_LENGTH)


@built
def beat_worker(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Write the worker's row for the operators' view, and that it will be seen for `seconds`.

    Parameters: `id`, `host`, `pid`, `version`, `queues`, `handlers` (JSON text), `concurrency`,
    `running`, `seconds`.
    """
    workers = tables.workers
    kinds: dict[str, Any] = {
        "id": Text(),
        "host": Text(),
        "pid": BigInteger(),
        "version": Text(),
        "queues": Text(),
        "handlers": Text(),
        "concurrency": BigInteger(),
        "running": BigInteger(),
    }
    values: dict[str, Any] = {name: bindparam(name, type_=kind) for name, kind in kinds.items()}
    for name in ("queues", "handlers"):
        values[name] = cast(values[name], JSONB)
    alive_until = now + seconds(bindparam("seconds", type_=Double()))
    statement = pg_insert(workers).values(**values, heartbeat_at=now, alive_until=alive_until)
    return statement.on_conflict_do_update(
        index_elements=[workers.c.id],
        set_={
            "running": statement.excluded.running,
            "heartbeat_at": now,
            "alive_until": statement.excluded.alive_until,
        },
    )


@built
def forget_workers(tables: Tables, *, now: Moment = NOW) -> Delete:
    """Delete the row of the worker `id`, and of workers not seen for `seconds` past their time."""
    workers = tables.workers
    return delete(workers).where(
        or_(
            workers.c.id == bindparam("id", type_=Text()),
            workers.c.alive_until < now - seconds(bindparam("seconds", type_=Double())),
        )
    )


def _channel(tables: Tables) -> ColumnElement[str]:
    return func.concat("sa_jobs_", queue_hash(_place(tables)))


def _gated(tables: Tables) -> Subquery:
    """Return `queues` (array) with the keys of their advisory locks; the trigger agrees."""
    given = unnest("given", {"queues": Text()})
    zero: ColumnElement[int] = literal_column("0", BigInteger())
    gate = func.hashtextextended(given.c.queues, func.hashtextextended(_place(tables), zero))
    return select(given.c.queues.label("queue"), gate.label("gate")).subquery("gated")


def _place(tables: Tables) -> ColumnElement[str]:
    """Return the full name of the jobs table, as the database of the connection has it."""
    relation = table(
        "pg_class", column("oid"), column("relname"), column("relnamespace"), schema="pg_catalog"
    )
    place = table("pg_namespace", column("oid"), column("nspname"), schema="pg_catalog")
    return (
        select(place.c.nspname.op("||")(".").op("||")(relation.c.relname))
        .select_from(relation.join(place, place.c.oid == relation.c.relnamespace))
        .where(relation.c.oid == cast(table_name(tables.jobs), REGCLASS))
        .scalar_subquery()
    )
