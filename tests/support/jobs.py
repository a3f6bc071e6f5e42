"""Jobs as the tests put them into the table and look at them, by plain SQL."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from sa_jobs import ClaimedJob, claims
from sa_jobs.models import DEFAULT_TABLES, Tables


def add(connection: Connection, handler: str = "send", **values: Any) -> int:
    """Insert a job, commit, and return its id."""
    statement = insert(DEFAULT_TABLES.jobs).values(
        {"queue": "default", "handler": handler, **values}
    )
    job_id: int = connection.execute(statement.returning(DEFAULT_TABLES.jobs.c.id)).scalar_one()
    connection.commit()
    return job_id


def change(connection: Connection, job_id: int, **values: Any) -> None:
    """Update columns of a job and commit."""
    jobs = DEFAULT_TABLES.jobs
    connection.execute(update(jobs).where(jobs.c.id == job_id).values(**values))
    connection.commit()


def job(connection: Connection, job_id: int, tables: Tables = DEFAULT_TABLES) -> Row[Any]:
    """Return a job's row as it is committed, and leave no transaction open."""
    jobs = tables.jobs
    row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
    connection.commit()
    return row


def all_jobs(connection: Connection, tables: Tables = DEFAULT_TABLES) -> list[Row[Any]]:
    """Return every job in the order of the ids."""
    rows = connection.execute(select(tables.jobs).order_by(tables.jobs.c.id)).all()
    connection.commit()
    return list(rows)


def failures(connection: Connection, job_id: int) -> list[Row[Any]]:
    """Return a job's failed attempts in their order."""
    table = DEFAULT_TABLES.failures
    rows = connection.execute(
        select(table).where(table.c.job_id == job_id).order_by(table.c.id)
    ).all()
    connection.commit()
    return list(rows)


def claim(
    connection: Connection,
    limit: int = 1,
    *,
    worker: str = "worker-1",
    queues: tuple[str, ...] = ("default",),
    handlers: tuple[str, ...] = ("send",),
    lease: float = 30.0,
) -> list[ClaimedJob]:
    """Claim up to `limit` jobs and commit."""
    claimed = claims.claim(
        connection, worker=worker, queues=queues, handlers=handlers, limit=limit, lease=lease
    )
    connection.commit()
    return claimed
