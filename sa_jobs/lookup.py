"""Jobs as operators look at them: lists, and one job with the history of its failed attempts.

Lists never read a payload or a result, and of an error only its end, so that a thousand jobs of a
megabyte each are as cheap to list as small ones. Times that no datetime can hold, which only plain
SQL writes, are shown as the first or the last that `run_at` may be.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    DateTime,
    Select,
    Text,
    bindparam,
    cast,
    func,
    select,
)

from sa_jobs.connections import Caller, connection_of, operation
from sa_jobs.errors import InvalidJobError
from sa_jobs.expressions import readable
from sa_jobs.limits import check_condition, check_id, check_limit
from sa_jobs.models import DEFAULT_TABLES, STATES, Tables
from sa_jobs.statements import CANCELLED, DEAD, DONE, READY, RUNNING, built

# The last line of a traceback says what happened.
ERROR_END = 500
MAX_FAILURES = 100

_STATE_NAMES = dict(zip(STATES, (READY, RUNNING, DONE, DEAD, CANCELLED), strict=True))


@dataclass(frozen=True)
class JobRow:
    """A job without its payload and result; `error` is the last line of its last error."""

    id: int
    status: str
    queue: str
    handler: str
    priority: int
    tenant: str | None
    attempts: int
    max_attempts: int
    run_at: dt.datetime
    created_at: dt.datetime
    claimed_at: dt.datetime | None
    locked_by: str | None
    leased_until: dt.datetime | None
    cancel_requested_at: dt.datetime | None
    finished_at: dt.datetime | None
    idempotency_key: str | None
    unique_key: str | None
    error: str | None


@dataclass(frozen=True)
class FailureRow:
    """A failed attempt of a job, with the whole text of its error."""

    attempt: int
    worker: str | None
    claimed_at: dt.datetime | None
    failed_at: dt.datetime
    error: str


@dataclass(frozen=True)
class Contents:
    """What a job carries, each as JSON text: it may hold personal data and secrets."""

    payload: str
    result: str | None
    meta: str


@operation
def list_jobs(
    session: Caller,
    *,
    status: str | None = None,
    queue: str | None = None,
    handler: str | None = None,
    limit: int = 20,
    tables: Tables = DEFAULT_TABLES,
) -> list[JobRow]:
    """Return up to `limit` jobs, the newest first; all conditions that are given must hold.

    Ready jobs come in the order in which each queue runs them, running ones by their worker, dead
    ones by when they died, the latest first. What few of many finished jobs match is searched for
    through all of them.
    """
    if status is not None and status not in STATES:
        raise InvalidJobError(f"status must be one of {', '.join(STATES)}, not {status!r}")
    conditions = {
        name: check_condition(name, value)
        for name, value in (("queue", queue), ("handler", handler))
        if value is not None
    }
    check_limit("limit", limit)
    rows = connection_of(session, tables).execute(
        _list(tables, status, frozenset(conditions)), {**conditions, "limit": limit}
    )
    return [_job_row(row) for row in rows]


@operation
def find_job(session: Caller, job_id: int, *, tables: Tables = DEFAULT_TABLES) -> JobRow | None:
    """Return a job, or None if there is none of this id."""
    check_id("job_id", job_id)
    row = connection_of(session, tables).execute(_one(tables), {"job_id": job_id}).first()
    return None if row is None else _job_row(row)


@operation
def contents_of(
    session: Caller, job_id: int, *, tables: Tables = DEFAULT_TABLES
) -> Contents | None:
    """Return what a job carries, or None if there is none of this id."""
    check_id("job_id", job_id)
    row = connection_of(session, tables).execute(_contents(tables), {"job_id": job_id}).first()
    return None if row is None else Contents(row.payload, row.result, row.meta)


@operation
def failures_of(
    session: Caller,
    job_id: int,
    *,
    limit: int = MAX_FAILURES,
    tables: Tables = DEFAULT_TABLES,
) -> list[FailureRow]:
    """Return the last `limit` failed attempts of a job, the oldest first."""
    check_id("job_id", job_id)
    check_limit("limit", limit)
    rows = connection_of(session, tables).execute(
        _failures(tables), {"job_id": job_id, "limit": limit}
    )
    return [FailureRow(*row) for row in rows][::-1]


def _job_row(row: Any) -> JobRow:
    values = dict(row._mapping)
    lines = (values["error"] or "").strip().splitlines()
    values["error"] = lines[-1] if lines else None
    return JobRow(**values)


# --- statements ---------------------------------------------------------------------------------


def read(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return a column as a look selects it, under its name: a time as drivers can read it."""
    if not isinstance(column.type, DateTime):
        return column
    return readable(column).label(column.key)


def _columns(tables: Tables) -> list[ColumnElement[Any]]:
    jobs = tables.jobs
    names = [name for name in JobRow.__dataclass_fields__ if name != "error"]
    return [
        *(read(jobs.c[name]) for name in names),
        func.right(jobs.c.last_error, ERROR_END).label("error"),
    ]


@built
def _list(tables: Tables, status: str | None, conditions: frozenset[str]) -> Select[Any]:
    """Select jobs. Parameters: `limit`, and those of `conditions`."""
    jobs = tables.jobs
    statement = select(*_columns(tables)).limit(bindparam("limit", type_=BigInteger()))
    for name in sorted(conditions):
        statement = statement.where(jobs.c[name] == bindparam(name, type_=Text()))
    if status is not None:
        statement = statement.where(jobs.c.status == _STATE_NAMES[status])
    # Each the order of an index, so that a list reads no more than it shows.
    if status == "ready":
        order = [jobs.c.queue, jobs.c.priority.desc(), jobs.c.run_at, jobs.c.id]
    elif status == "dead":
        order = [jobs.c.finished_at.desc(), jobs.c.id.desc()]
    elif status == "running":
        order = [jobs.c.locked_by, jobs.c.id]
    else:
        order = [jobs.c.id.desc()]
    return statement.order_by(*order)


@built
def _one(tables: Tables) -> Select[Any]:
    return select(*_columns(tables)).where(tables.jobs.c.id == _job_id())


@built
def _contents(tables: Tables) -> Select[Any]:
    jobs = tables.jobs
    texts: list[ColumnElement[Any]] = [
        cast(jobs.c[name], Text).label(name) for name in ("payload", "result", "meta")
    ]
    return select(*texts).where(jobs.c.id == _job_id())


@built
def _failures(tables: Tables) -> Select[Any]:
    failures = tables.failures
    return (
        select(
            failures.c.attempt,
            failures.c.worker,
            read(failures.c.claimed_at),
            read(failures.c.failed_at),
            failures.c.error,
        )
        .where(failures.c.job_id == _job_id())
        .order_by(failures.c.id.desc())
        .limit(bindparam("limit", type_=BigInteger()))
    )


def _job_id() -> ColumnElement[int]:
    return bindparam("job_id", type_=BigInteger())
