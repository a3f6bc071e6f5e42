"""What applications call: enqueue, enqueue_many, enqueue_from_select, cancel, retry.

Each takes a session or connection and runs in the caller's transaction: the job commits or rolls
back with the data it belongs to. None commits, opens a transaction of its own, or leaves the
transaction unusable: input is checked before any SQL is sent, and a taken key is found by
ON CONFLICT DO NOTHING and a second statement, never by catching a constraint error.

With an AsyncSession or AsyncConnection the same functions return an awaitable.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from sqlalchemy import Connection, Select, SelectBase, func, select
from sqlalchemy.engine import TwoPhaseTransaction
from sqlalchemy.exc import IntegrityError, InvalidRequestError

from sa_jobs import jsontext, limits, presence, statements
from sa_jobs.connections import Caller, connection_of, operation
from sa_jobs.errors import (
    DuplicateJobError,
    EnqueueRaceError,
    InvalidJobError,
    InvalidJobTypeError,
)
from sa_jobs.models import DEFAULT_TABLES, Tables

DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 20
# Few enough for one statement's arrays to stay small, many enough for the round trip to vanish.
ROWS_PER_STATEMENT = 5_000
_LOOKUPS = 20
_KEYS = ("idempotency_key", "unique_key")

Cancelled = Literal["cancelled", "requested", "final", "missing"]
Retried = Literal["ready", "refused", "duplicate", "missing"]
OnConflict = Literal["existing", "replace", "raise"]
HandlerName = str | Callable[..., Any]
Delay = float | dt.timedelta
Payload = Mapping[str, Any]
T = TypeVar("T")

# By how many seconds a test has let time pass for those who enqueue: the database's now() stands
# still in its transaction.
seconds_ahead: ContextVar[float] = ContextVar("sa_jobs_seconds_ahead", default=0.0)


@dataclass(frozen=True)
class Enqueued:
    """The job that an enqueue added (`created`), or found under its key (not `created`)."""

    id: int
    created: bool


@dataclass(frozen=True)
class Row:
    """One job for `enqueue_many`: its payload, and the options that differ from the call's."""

    payload: Payload | None = None
    queue: str | None = None
    priority: int | None = None
    run_at: dt.datetime | None = None
    delay: Delay | None = None
    max_attempts: int | None = None
    tenant: str | None = None
    idempotency_key: str | None = None
    unique_key: str | None = None


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
    on_conflict: OnConflict = "existing",
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    tables: Tables = DEFAULT_TABLES,
) -> Enqueued:
    """Add a job in the caller's transaction and return its id.

    `handler` is a name or a registered function, `payload` a dict of JSON values: the handler's
    arguments. Higher `priority` runs first. The job is due at `run_at` (aware), or `delay` (seconds
    or a timedelta) after the transaction's start; by default at once.

    `idempotency_key` names the side effect, e.g. "invoice:1842:send-receipt"; it is unique over
    jobs in any state, for as long as the row is kept. `unique_key` is unique over jobs that are
    ready or running. Where a key is taken, `on_conflict` decides: "existing" returns the existing
    job's id with `created=False` and changes nothing; "replace" also gives that job this payload
    and time if it is still ready, and raises DuplicateJobError if it is a job of another handler or
    queue; "raise" raises DuplicateJobError. The transaction stays usable.

    While another transaction holds the key uncommitted, the call waits for its end. At REPEATABLE
    READ or SERIALIZABLE, a key that was taken after this transaction's snapshot gives PostgreSQL's
    serialization error (40001): run the transaction again.

    Raises InvalidJobError or InvalidJobTypeError before any SQL, with the transaction unharmed.
    """
    values = _options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
        idempotency_key=idempotency_key,
        unique_key=unique_key,
    )
    values["payload"] = payload_text(payload, "payload", max_payload_bytes)
    if on_conflict not in get_args(OnConflict):
        raise InvalidJobError(
            f"on_conflict must be one of {', '.join(get_args(OnConflict))}, not {on_conflict!r}"
        )
    connection = _writable(session, tables)
    return _enqueue_one(connection, tables, values, on_conflict)


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
    max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    tables: Tables = DEFAULT_TABLES,
) -> list[Enqueued]:
    """Add many jobs in the caller's transaction, and return their ids in the order given.

    An element is a payload, or a `Row` with options of its own; the call's options hold for what a
    row leaves out. A few thousand rows go in one statement. Where a key is taken, also by an
    earlier row of the same call, the result holds the existing id with `created=False`.

    Everything is checked before the first statement: one bad row, named by its position, means
    that none was sent.

    Rows are inserted in the order of their keys, so that two calls with the same keys do not
    deadlock, whatever order they give them in. See "Keys" in docs/design.md for what that leaves.
    """
    common = _options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
    )
    rows = [
        _row_values(element, position, max_payload_bytes)
        for position, element in enumerate(payloads)
    ]
    connection = _writable(session, tables)
    if connection.dialect.name != "postgresql":
        return [_enqueue_one(connection, tables, common | row, "existing") for row in rows]
    ids = _ids_for(connection, tables, rows)
    if ids is not None:
        return _enqueue_by_key(connection, tables, common, rows, ids)
    results: list[Enqueued] = []
    for chunk in _chunks(rows):
        results.extend(_enqueue_chunk(connection, tables, common, chunk))
    return results


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
    options = _options(
        handler,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        max_attempts=max_attempts,
        tenant=tenant,
    )
    names = _column_names(query)
    connection = _writable(session, tables)
    if connection.dialect.name != "postgresql" or statements.OPTION_LABELS.keys().isdisjoint(names):
        # Some dialects leave the count out of an INSERT's result unless asked.
        result = connection.execute(
            statements.insert_select(tables, query, options),
            execution_options={"preserve_rowcount": True},
        )
        return result.rowcount
    statement = statements.insert_select_checked(tables, query, options)
    found = connection.execute(statement).mappings().one()
    for option, rule in _RULES.items():
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
    parameters = {"job_id": job_id, **_due(run_at, delay)}
    connection = _writable(session, tables)
    try:
        # A twin that commits between the statement's look and its write ends in the unique index;
        # the savepoint keeps the caller's transaction usable then.
        with _savepoint(connection):
            row = connection.execute(statements.retry(tables), parameters).first()
    except IntegrityError:
        return "duplicate"
    if row is not None:
        _wake(connection, tables, row.queue)
        return "ready"
    status = _status_of(connection, tables, job_id)
    if status is None:
        return "missing"
    return "duplicate" if status in ("dead", "cancelled") else "refused"


def handler_name(handler: HandlerName) -> str:
    """Return the registered name of a handler that is given as a name or as the function."""
    if isinstance(handler, str):
        return limits.check_name("handler", handler)
    name = getattr(handler, "sa_jobs_handler", None)
    if not isinstance(name, str):
        raise InvalidJobTypeError(
            f"handler must be a name or a registered function, not {handler!r}: "
            "register it with @jobs.handler(...)"
        )
    return name


def payload_text(payload: Any, what: str, max_bytes: int) -> str:
    """Return a payload as JSON text, or raise the error that names what is wrong with it."""
    if payload is None:
        return "{}"
    if not isinstance(payload, Mapping):
        raise InvalidJobTypeError(
            f"{what} must be a dict of the handler's arguments, not {type(payload).__name__}"
        )
    return jsontext.dumps(
        payload if type(payload) is dict else dict(payload), what=what, max_bytes=max_bytes
    )


def payload_columns(query: Any) -> list[str]:
    """Return the payload's keys that a select gives, or raise an error that says what is wrong."""
    return [name for name in _column_names(query) if name not in statements.OPTION_LABELS]


def _column_names(query: Any) -> list[str]:
    """Return the names of a select's columns, payload keys and options."""
    if not isinstance(query, SelectBase):
        raise InvalidJobTypeError(f"query must be a select(), not {type(query).__name__}")
    described = query.column_descriptions if isinstance(query, Select) else []
    if any(entry["name"] in (None, "*") for entry in described):
        raise InvalidJobError(
            "the select has columns as text, whose names are not known: "
            "use columns, or literal_column(...).label(...)"
        )
    try:
        keys = query.subquery().c.keys()
    except InvalidRequestError as error:
        raise InvalidJobError(f"the select has two columns of one name: {error}") from None
    names: list[str] = []
    given: set[str] = set()
    for index, (name, column) in enumerate(zip(keys, query.selected_columns, strict=True)):
        if name == "_no_label":
            raise InvalidJobError(f"column {index} of the select has no name: give it a label()")
        # SQLAlchemy would name the second of two anew, e.g. "id_1".
        own_name = getattr(column, "name", None) or name
        if own_name in given:
            raise InvalidJobError(
                f"the select has two columns named {own_name!r}: label() one of them"
            )
        given.add(own_name)
        if name.startswith("sa_jobs_") and name not in statements.OPTION_LABELS:
            raise InvalidJobError(
                f"the select's column {name!r} is none of the options "
                f"{', '.join(sorted(statements.OPTION_LABELS))}"
            )
        names.append(name)
    return names


def _options(
    handler: HandlerName,
    *,
    queue: str,
    priority: int,
    run_at: dt.datetime | None,
    delay: Delay | None,
    max_attempts: int,
    tenant: str | None,
    idempotency_key: str | None = None,
    unique_key: str | None = None,
) -> dict[str, Any]:
    """Return the checked parameters of an insert, but for the payload."""
    return {
        "queue": limits.check_name("queue", queue),
        "handler": handler_name(handler),
        "priority": limits.check_priority(priority),
        "max_attempts": limits.check_max_attempts(max_attempts),
        "tenant": None if tenant is None else limits.check_name("tenant", tenant),
        "idempotency_key": _key("idempotency_key", idempotency_key),
        "unique_key": _key("unique_key", unique_key),
        **_due(run_at, delay),
    }


def _key(what: str, value: str | None) -> str | None:
    return None if value is None else limits.check_key(what, value)


def _due(run_at: dt.datetime | None, delay: Delay | None) -> dict[str, Any]:
    if run_at is not None and delay is not None:
        raise InvalidJobError("give run_at= or delay=, not both")
    return {
        "run_at": None if run_at is None else limits.check_run_at(run_at),
        "delay": seconds_ahead.get()
        + (0.0 if delay is None else limits.check_seconds("delay", delay)),
    }


_NAME_RULE = f"1 to {limits.MAX_NAME_BYTES} bytes in UTF-8, without control characters"
_KEY_RULE = f"1 to {limits.MAX_KEY_BYTES} bytes in UTF-8"
_RULES = {
    "queue": _NAME_RULE,
    "tenant": _NAME_RULE,
    "priority": f"from {limits.MIN_PRIORITY} to {limits.MAX_PRIORITY}",
    "run_at": "a finite time in the years 1 to 9999",
    "idempotency_key": _KEY_RULE,
    "unique_key": _KEY_RULE,
}

_ROW_CHECKS: dict[str, Callable[[Any], Any]] = {
    "queue": lambda value: limits.check_name("queue", value),
    "priority": limits.check_priority,
    "run_at": limits.check_run_at,
    "max_attempts": limits.check_max_attempts,
    "tenant": lambda value: limits.check_name("tenant", value),
    "idempotency_key": lambda value: limits.check_key("idempotency_key", value),
    "unique_key": lambda value: limits.check_key("unique_key", value),
}


def _row_values(element: Any, position: int, max_payload_bytes: int) -> dict[str, Any]:
    """Return the checked parameters in which a row of enqueue_many differs from the common ones."""
    row = f"row {position}"
    if not isinstance(element, Row):
        return {"payload": payload_text(element, f"{row}: payload", max_payload_bytes)}
    values: dict[str, Any] = {
        "payload": payload_text(element.payload, f"{row}: payload", max_payload_bytes)
    }
    try:
        for name, check in _ROW_CHECKS.items():
            given = getattr(element, name)
            if given is not None:
                values[name] = check(given)
        if element.delay is not None:
            values |= _due(element.run_at, element.delay)
        elif element.run_at is not None:
            values["delay"] = 0.0
    except (InvalidJobError, InvalidJobTypeError) as error:
        raise type(error)(f"{row}: {error}") from None
    return values


def _writable(session: Caller, tables: Tables) -> Connection:
    connection = connection_of(session, tables)
    two_phase = getattr(session, "twophase", False) or isinstance(
        connection.get_transaction(), TwoPhaseTransaction
    )
    if two_phase and connection.dialect.name == "postgresql":
        # PREPARE TRANSACTION fails in a transaction that has notified.
        connection.execute(select(func.set_config("sa_jobs.notify", "off", True)))
    return connection


def _savepoint(connection: Connection) -> AbstractContextManager[Any]:
    # In autocommit mode there is none, and no transaction to keep usable.
    autocommit = connection.dialect.name == "postgresql" and getattr(
        connection.connection.dbapi_connection, "autocommit", False
    )
    return nullcontext() if autocommit else connection.begin_nested()


def _enqueue_one(
    connection: Connection, tables: Tables, values: dict[str, Any], on_conflict: OnConflict
) -> Enqueued:
    keyed = values["idempotency_key"] is not None or values["unique_key"] is not None
    insert = statements.insert_one(tables, keyed=keyed)
    # The key's holder can vanish between the two statements: it ended, or it was pruned.
    for _ in range(_LOOKUPS):
        created = connection.execute(insert, values).scalar()
        if created is not None:
            return Enqueued(created, True)
        holder = _holders(connection, tables, [values])[0]
        if holder is None:
            continue
        if on_conflict == "raise":
            raise DuplicateJobError(
                f"job {holder.id} has {_keys_in(values)} already",
                id=holder.id,
            )
        if on_conflict == "replace":
            _replace(connection, tables, holder, values)
        return Enqueued(holder.id, False)
    raise EnqueueRaceError(
        f"the holder of {_keys_in(values)} appeared and vanished {_LOOKUPS} times; "
        "roll back and try again"
    )


def _keys_in(values: dict[str, Any]) -> str:
    return " or ".join(f"{name}={values[name]!r}" for name in _KEYS if values[name] is not None)


def _replace(connection: Connection, tables: Tables, holder: Any, values: dict[str, Any]) -> None:
    if (holder.handler, holder.queue) != (values["handler"], values["queue"]):
        raise DuplicateJobError(
            f"job {holder.id} has {_keys_in(values)} already, for handler {holder.handler!r} on "
            f"queue {holder.queue!r}: a job for handler {values['handler']!r} on queue "
            f"{values['queue']!r} cannot replace it; use another key",
            id=holder.id,
        )
    parameters = {
        "job_id": holder.id,
        "of_handler": holder.handler,
        "on_queue": holder.queue,
        **{name: values[name] for name in ("payload", "run_at", "delay")},
    }
    if connection.execute(statements.replace(tables), parameters).first() is not None:
        _wake(connection, tables, holder.queue)


def _ids_for(
    connection: Connection, tables: Tables, rows: list[dict[str, Any]]
) -> list[int] | None:
    """Return an id for each row, or None if no two rows have a key, or the role may not take ids.

    Rows that are inserted in the order of their keys would get ids in that order, too.
    """
    if sum(any(name in row for name in _KEYS) for row in rows) < 2:
        return None
    ids = connection.execute(statements.next_ids(tables), {"count": len(rows)}).scalars().all()
    return None if None in ids else sorted(ids)


def _enqueue_by_key(
    connection: Connection,
    tables: Tables,
    common: dict[str, Any],
    rows: list[dict[str, Any]],
    ids: list[int],
) -> list[Enqueued]:
    """Insert rows under the ids given, in the order of their keys, all those of a call."""
    taken: set[tuple[str, str]] = set()
    first: list[int] = []
    for position, row in enumerate(rows):
        keys = {(name, row[name]) for name in _KEYS if name in row}
        # The first of equal keys wins, also where the order by another key puts it last.
        if taken.isdisjoint(keys):
            taken |= keys
            first.append(position)
    first.sort(key=lambda position: [rows[position].get(name, "") for name in _KEYS])
    inserted: set[int] = set()
    for chunk in _chunks(first):
        statement, parameters = _insert_many(
            tables, common, [rows[position] | {"id": ids[position]} for position in chunk]
        )
        inserted.update(connection.execute(statement, parameters).scalars())
    results = [Enqueued(id, True) if id in inserted else None for id in ids]
    return _with_holders(connection, tables, [common | row for row in rows], results)


def _enqueue_chunk(
    connection: Connection, tables: Tables, common: dict[str, Any], rows: list[dict[str, Any]]
) -> list[Enqueued]:
    """Insert rows in the order given; the inserted are a subsequence of them, with equal keys."""
    statement, parameters = _insert_many(tables, common, rows)
    # Ids are given out in the order of the rows; RETURNING has none.
    inserted = sorted(tuple(row) for row in connection.execute(statement, parameters))
    if len(inserted) == len(rows):
        return [Enqueued(row[0], True) for row in inserted]
    rows = [common | row for row in rows]
    results: list[Enqueued | None] = [None] * len(rows)
    following = 0
    for position, row in enumerate(rows):
        if following < len(inserted):
            id, *keys = inserted[following]
            if keys == [row[name] for name in _KEYS]:
                results[position] = Enqueued(id, True)
                following += 1
    return _with_holders(connection, tables, rows, results)


def _insert_many(
    tables: Tables, common: dict[str, Any], rows: list[dict[str, Any]]
) -> tuple[Any, dict[str, Any]]:
    varying = frozenset(name for row in rows for name in row)
    parameters = common | {
        name: [row.get(name, common.get(name)) for row in rows] for name in varying
    }
    return statements.insert_many(tables, varying=varying), parameters


def _with_holders(
    connection: Connection,
    tables: Tables,
    rows: list[dict[str, Any]],
    results: list[Enqueued | None],
) -> list[Enqueued]:
    """Return the results with, for each row that was not inserted, the job that holds its key."""
    skipped = [position for position, result in enumerate(results) if result is None]
    for chunk in _chunks(skipped):
        holders = _holders(connection, tables, [rows[position] for position in chunk])
        for position, holder in zip(chunk, holders, strict=True):
            results[position] = (
                Enqueued(holder.id, False)
                if holder is not None
                # The holder vanished meanwhile.
                else _enqueue_one(connection, tables, rows[position], "existing")
            )
    return [result for result in results if result is not None]


def _chunks(elements: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(elements), ROWS_PER_STATEMENT):
        yield elements[start : start + ROWS_PER_STATEMENT]


def _holders(connection: Connection, tables: Tables, rows: Sequence[dict[str, Any]]) -> list[Any]:
    """Return for each row the job that holds its idempotency key, or its unique key, or None."""
    keys = {f"{name}s": [row[name] for row in rows if row[name] is not None] for name in _KEYS}
    found = connection.execute(statements.existing(tables), keys).all()
    by_idempotency_key = {job.idempotency_key: job for job in found}
    by_unique_key = {job.unique_key: job for job in found if job.status in ("ready", "running")}
    return [
        by_idempotency_key.get(row["idempotency_key"])
        if row["idempotency_key"] in by_idempotency_key and row["idempotency_key"] is not None
        else by_unique_key.get(row["unique_key"])
        if row["unique_key"] is not None
        else None
        for row in rows
    ]


def _status_of(connection: Connection, tables: Tables, job_id: int) -> str | None:
    status: str | None = connection.execute(
        statements.status_of(tables), {"job_id": job_id}
    ).scalar()
    return status


def _wake(connection: Connection, tables: Tables, queue: str) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(presence.wake(tables), {"queues": [queue]})
