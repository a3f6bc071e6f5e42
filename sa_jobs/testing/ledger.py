"""The writes of a run, on PostgreSQL those of the worker, on SQLite their like.

Every time is given: the database's now() stands still in the test's transaction.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from sqlalchemy import Connection, Text, cast, func, select, update

from sa_jobs import claims
from sa_jobs.claims import Settled
from sa_jobs.context import ClaimedJob
from sa_jobs.models import Tables
from sa_jobs.outcome import Outcome
from sa_jobs.statements import READY, RUNNING
from sa_jobs.testing import sqlite
from sa_jobs.testing.rows import aware

WORKER = "sa_jobs.testing"
LEASE_SECONDS = 30.0

_AS_TEXT = {"payload_text": "payload", "meta_text": "meta"}


def on_sqlite(connection: Connection) -> bool:
    """Return whether the database is SQLite, which has none of the worker's statements."""
    return connection.dialect.name == "sqlite"


def clock(connection: Connection) -> dt.datetime:
    """Return the database's time, which goes on in a transaction."""
    moment = sqlite.CLOCK if on_sqlite(connection) else func.clock_timestamp()
    found: dt.datetime = aware(connection.execute(select(moment)).scalar_one())
    return found


def transaction_time(connection: Connection) -> dt.datetime:
    """Return the time by which the database adds a job now."""
    if on_sqlite(connection):
        return clock(connection)
    return connection.execute(select(func.now())).scalar_one()


def next_due(
    connection: Connection,
    tables: Tables,
    *,
    queues: Sequence[str] | None,
    handlers: Sequence[str],
    now: dt.datetime,
    but: Sequence[int],
) -> Any:
    """Return (id, queue, handler) of the job that a worker would run first, or None."""
    jobs = tables.jobs
    query = (
        select(jobs.c.id, jobs.c.queue, jobs.c.handler)
        .where(*_waiting(tables, queues, handlers), jobs.c.run_at <= now, jobs.c.id.not_in(but))
        .order_by(jobs.c.priority.desc(), jobs.c.run_at, jobs.c.id)
        .limit(1)
    )
    return connection.execute(query).first()


def next_time(
    connection: Connection,
    tables: Tables,
    *,
    queues: Sequence[str] | None,
    handlers: Sequence[str],
    after: dt.datetime,
    until: dt.datetime,
) -> dt.datetime | None:
    """Return when the next job falls due between two times."""
    jobs = tables.jobs
    query = select(func.min(jobs.c.run_at)).where(
        *_waiting(tables, queues, handlers), jobs.c.run_at > after, jobs.c.run_at <= until
    )
    found: dt.datetime | None = aware(connection.execute(query).scalar())
    return found


def claim_due(
    connection: Connection,
    tables: Tables,
    job_id: int,
    *,
    queue: str,
    handler: str,
    now: dt.datetime,
) -> ClaimedJob | None:
    """Claim the first job of a queue and handler that is due, which is the one of this id."""
    if on_sqlite(connection):
        return claim(connection, tables, job_id, now=now)
    claimed = claims.claim(
        connection,
        worker=WORKER,
        queues=[queue],
        handlers=[handler],
        limit=1,
        lease=LEASE_SECONDS,
        now=now,
        tables=tables,
    )
    return claimed[0] if claimed else None


def claim(
    connection: Connection, tables: Tables, job_id: int, *, now: dt.datetime
) -> ClaimedJob | None:
    """Claim a job as a worker does, due or not, or return None if it is not ready."""
    jobs = tables.jobs
    written = connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id, jobs.c.status == READY)
        .values(
            status=RUNNING,
            attempts=jobs.c.attempts + 1,
            claim_no=jobs.c.claim_no + 1,
            locked_by=WORKER,
            claimed_at=now,
            leased_until=now + dt.timedelta(seconds=LEASE_SECONDS),
            updated_at=now,
        )
    )
    if not written.rowcount:
        return None
    columns = [
        cast(jobs.c[_AS_TEXT[field.name]], Text) if field.name in _AS_TEXT else jobs.c[field.name]
        for field in fields(ClaimedJob)
    ]
    row = connection.execute(select(*columns).where(jobs.c.id == job_id)).one()
    return ClaimedJob(*map(aware, row))


def store_progress(
    connection: Connection, tables: Tables, job: ClaimedJob, progress: str, *, now: dt.datetime
) -> None:
    """Store what a handler has reported, as a heartbeat does."""
    if on_sqlite(connection):
        connection.execute(sqlite.heartbeat(tables, job, WORKER, progress, now))
    else:
        claims.heartbeat(
            connection,
            [(job, progress)],
            worker=WORKER,
            lease=LEASE_SECONDS,
            now=now,
            tables=tables,
        )


def settle(
    connection: Connection,
    tables: Tables,
    job: ClaimedJob,
    outcome: Outcome,
    *,
    transactional: bool,
    now: dt.datetime,
) -> bool:
    """Write how a job ended, and return whether it was still ours to end."""
    settled = Settled(job, outcome)
    if on_sqlite(connection):
        return sqlite.settle(connection, tables, settled, worker=WORKER, now=now)
    if transactional:
        return claims.finish_in_transaction(
            connection, settled, worker=WORKER, now=now, tables=tables
        )
    return bool(claims.settle(connection, [settled], worker=WORKER, now=now, tables=tables))


def last_id(connection: Connection, tables: Tables) -> int:
    """Return the highest id that a job has, 0 if there is none."""
    found: int = connection.execute(
        select(func.coalesce(func.max(tables.jobs.c.id), 0))
    ).scalar_one()
    return found


def set_created(connection: Connection, tables: Tables, *, after: int, now: dt.datetime) -> None:
    """Let the jobs with ids after one be of a time to which a test has moved on."""
    jobs = tables.jobs
    connection.execute(update(jobs).where(jobs.c.id > after).values(created_at=now))


def _waiting(tables: Tables, queues: Sequence[str] | None, handlers: Sequence[str]) -> list[Any]:
    jobs = tables.jobs
    conditions = [jobs.c.status == READY, jobs.c.handler.in_(handlers)]
    if queues is not None:
        conditions.append(jobs.c.queue.in_(queues))
    return conditions
