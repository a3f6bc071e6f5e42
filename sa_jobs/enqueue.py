"""What applications call: enqueue, enqueue_many, enqueue_from_select, cancel, retry.

Each takes a session or connection and runs in the caller's transaction: the job commits or rolls
back with the data it belongs to. None commits, opens a transaction of its own, or leaves the
transaction unusable: input is checked before any SQL is sent, and a taken key is found by
ON CONFLICT DO NOTHING and a second statement, never by catching a constraint error.

With an AsyncSession or AsyncConnection the same functions return an awaitable.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable
from typing import Literal

from sqlalchemy import Connection, SelectBase
from sqlalchemy.exc import IntegrityError

from sa_jobs import duplicates, inserts, limits, select_columns, statements
from sa_jobs.autocommit import savepoint
from sa_jobs.connections import Caller, connection_of, for_enqueue, operation, writable
from sa_jobs.errors import InvalidJobError
from sa_jobs.inserts import Enqueued
from sa_jobs.job_options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    Delay,
    HandlerName,
    OnConflict,
    Payload,
    Row,
    check_due,
    check_on_conflict,
    check_options,
    check_rows,
    payload_text,
)
from sa_jobs.meta import Meta
from sa_jobs.models import DEFAULT_TABLES, Tables

Cancelled = Literal["cancelled", "requested", "final", "missing"]
Retried = Literal["ready", "refused", "duplicate", "missing"]


@operation
def enqueue(
    session: Caller,
    handler: HandlerName,
    payload: Payload | None = None,
    *,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: dt.datetime | None = None,
    delay: Delay | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    tenant: str | None = None,
    idempotency_key: str | None = None,
    unique_key: str | None = None,
    meta: Meta | None = None,
    on_conflict: OnConflict = "existing",
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    tables: Tables = DEFAULT_TABLES,
) -> Enqueued:
    """Add a job in the caller's transaction and return its id.

    `handler` is a name or a registered function, `payload` a dict of JSON values: the handler's
    arguments. `meta` is a small one that the job carries beside it, for hooks and `ctx.job.meta`.
    Higher `priority` runs first. The job is due at `run_at` (aware), or `delay` (seconds or a
    timedelta) after the transaction's start; by default at once.

    `idempotency_key` names the side effect, e.g. "invoice:1842:send-receipt"; it is unique over
    jobs in any state, for as long as the row is kept. `unique_key` is unique over jobs that are
    ready or running. Where a key is taken, `on_conflict` decides: "existing" returns the existing
    job's id with `created=False` and changes nothing; "replace" also gives that job this payload
    and time if it is still ready, and raises DuplicateJobError if it is a job of another handler or
    queue; "raise" raises DuplicateJobError. The transaction stays usable.

    While another transaction holds the key uncommitted, the call waits for its end. At REPEATABLE
    READ or SERIALIZABLE, a key that was taken after this transaction's snapshot gives PostgreSQL's
    serialization error (40001): run the transaction again.

    On a connection in AUTOCOMMIT mode the job is committed at once: AutocommitWarning tells so.

    Raises InvalidJobError or InvalidJobTypeError before any SQL, with the transaction unharmed.
    """
    values = check_options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
        idempotency_key=idempotency_key,
        unique_key=unique_key,
        meta=meta,
    )
    values["payload"] = payload_text(payload, "payload", max_payload_bytes)
    choice = check_on_conflict(on_conflict)
    return inserts.insert_one(for_enqueue(session, tables), tables, values, choice)


@operation
def enqueue_many(
    session: Caller,
    handler: HandlerName,
    payloads: Iterable[Payload | Row | None],
    *,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: dt.datetime | None = None,
    delay: Delay | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    tenant: str | None = None,
    meta: Meta | None = None,
    on_conflict: OnConflict = "existing",
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    tables: Tables = DEFAULT_TABLES,
) -> list[Enqueued]:
    """Add many jobs in the caller's transaction, and return their ids in the order given.

    An element is a payload, or a `Row` with options of its own; the call's options hold for what a
    row leaves out. A few thousand rows go in one statement.

    Where a key is taken, `on_conflict` decides as in `enqueue`: "existing" gives the existing id
    with `created=False`, also for a row whose key an earlier row of the call has; "replace" also
    gives that job this row's payload and time if it is still ready, of several rows the last one's;
    "raise" raises DuplicateJobError, and InvalidJobError where two rows have one key. An error
    means that nothing was added or replaced, and the transaction stays usable; only in autocommit
    mode, where nothing can be undone, what came before the error stays.

    Everything is checked before the first statement: one bad row, named by its position, means
    that none was sent.

    Rows are inserted in the order of their keys, so that two calls with the same keys do not
    deadlock, whatever order they give them in. See "Keys" in docs/design.md for what that leaves.
    """
    common = check_options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
        meta=meta,
    )
    rows = check_rows(payloads, max_payload_bytes)
    choice = check_on_conflict(on_conflict)
    return inserts.insert_many(for_enqueue(session, tables), tables, common, rows, choice)


@operation
def enqueue_from_select(
    session: Caller,
    handler: HandlerName,
    query: SelectBase,
    *,
    queue: str = DEFAULT_QUEUE,
    priority: int = 0,
    run_at: dt.datetime | None = None,
    delay: Delay | None = None,
    max_attempts: int = DEFAULT_MAX_ATTEMPTS,
    tenant: str | None = None,
    meta: Meta | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> int:
    """Add one job for each row of a SELECT, without the rows leaving the database; return how many.

    The select's columns are the payload's keys. Columns labelled `sa_jobs_queue`,
    `sa_jobs_priority`, `sa_jobs_run_at`, `sa_jobs_tenant`, `sa_jobs_idempotency_key` and
    `sa_jobs_unique_key` set the job's options instead. Rows whose key is taken are skipped.

    Values become JSON as PostgreSQL makes it: timestamps and numerics included, which `enqueue`
    refuses; a handler sees a timestamp as ISO 8601 text.

    Raises InvalidJobError, with nothing added and the transaction usable, if a column sets an
    option to what `enqueue` would refuse. For that the database keeps all rows of the select before
    it inserts the first, if there is such a column. An error of the select itself, as a division by
    zero, is the database's, and ends the transaction. Keys are taken in the order of the select.
    """
    options = check_options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
        meta=meta,
    )
    names = select_columns.column_names(query)
    connection = for_enqueue(session, tables)
    if connection.dialect.name != "postgresql" or statements.OPTION_LABELS.keys().isdisjoint(names):
        # Some dialects leave the count out of an INSERT's result unless asked.
        result = connection.execute(
            statements.insert_select(tables, query, options),
            execution_options={"preserve_rowcount": True},
        )
        return result.rowcount
    statement = statements.insert_select_checked(tables, query, options)
    found = connection.execute(statement).mappings().one()
    for option, rule in select_columns.RULES.items():
        if found.get(option) is not None:
            raise InvalidJobError(
                f"the select gives {found[option]!r} as sa_jobs_{option}, which must be {rule}; "
                "nothing was added"
            )
    added: int = found["added"]
    return added


@operation
def cancel(session: Caller, job_id: int, *, tables: Tables = DEFAULT_TABLES) -> Cancelled:
    """Cancel a job in the caller's transaction, and return what that came to.

    "cancelled": it was ready and will never run. "requested": it is running; its worker tells the
    handler with the next heartbeat. A normal return still makes it done; any other end makes it
    cancelled, never ready. "final": it was done, dead or cancelled already. "missing": there is no
    such job.
    """
    limits.check_id("job_id", job_id)
    connection = connection_of(session, tables)
    status = connection.execute(statements.cancel(tables), {"job_id": job_id}).scalar()
    if status is None:
        return "missing" if _status_of(connection, tables, job_id) is None else "final"
    return "cancelled" if status == "cancelled" else "requested"


@operation
def retry(
    session: Caller,
    job_id: int,
    *,
    run_at: dt.datetime | None = None,
    delay: Delay | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> Retried:
    """Make a dead or cancelled job ready again, with all its attempts, and return what came of it.

    "ready": it will run at `run_at`, after `delay`, or at once. "refused": it is ready, running or
    done. "duplicate": another job that is ready or running holds its unique key. "missing": there
    is no such job. The history of failed attempts is kept. Runs in the caller's transaction.
    """
    limits.check_id("job_id", job_id)
    parameters = {"job_id": job_id, **check_due(run_at, delay)}
    connection = writable(session, tables)
    try:
        # A twin that commits between the statement's look and its write ends in the unique index;
        # the savepoint keeps the caller's transaction usable then.
        with savepoint(connection):
            row = connection.execute(statements.retry(tables), parameters).first()
    except IntegrityError:
        return "duplicate"
    if row is not None:
        duplicates.wake(connection, tables, [row.queue])
        return "ready"
    status = _status_of(connection, tables, job_id)
    if status is None:
        return "missing"
    return "duplicate" if status in ("dead", "cancelled") else "refused"


def _status_of(connection: Connection, tables: Tables, job_id: int) -> str | None:
    status: str | None = connection.execute(
        statements.status_of(tables), {"job_id": job_id}
    ).scalar()
    return status
