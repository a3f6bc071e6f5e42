"""Looking at jobs, failures and recorded starts from outside."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Engine, Row, func, select

from sa_jobs.models import DEFAULT_TABLES, Failure, Job
from tests.acceptance.app import effects, starts
from tests.support.waiting import wait_until

FINAL = ("done", "dead", "cancelled")


def job(engine: Engine, job_id: int) -> Row[Any]:
    """Return all columns of a job."""
    with engine.connect() as connection:
        return connection.execute(
            select(DEFAULT_TABLES.jobs).where(DEFAULT_TABLES.jobs.c.id == job_id)
        ).one()


def status(engine: Engine, job_id: int) -> str:
    """Return a job's status."""
    return str(job(engine, job_id).status)


def wait_until_done(engine: Engine, job_id: int, *, seconds: float = 30.0) -> None:
    """Wait until a job is done."""
    wait_until(lambda: status(engine, job_id) == "done", f"job {job_id} is done", seconds=seconds)


def unfinished(engine: Engine) -> int:
    """Return how many jobs are ready or running."""
    with engine.connect() as connection:
        return connection.execute(
            select(func.count()).select_from(Job).where(Job.status.not_in(FINAL))
        ).scalar_one()


def failures(engine: Engine, job_id: int) -> list[Row[Any]]:
    """Return the rows of a job's failed attempts, oldest first."""
    with engine.connect() as connection:
        return list(
            connection.execute(
                select(DEFAULT_TABLES.failures).where(Failure.job_id == job_id).order_by(Failure.id)
            )
        )


def starts_of(engine: Engine, job_id: int) -> list[Row[Any]]:
    """Return the recorded starts of a job's handler, oldest first."""
    with engine.connect() as connection:
        return list(
            connection.execute(
                select(starts).where(starts.c.job_id == job_id).order_by(starts.c.at)
            )
        )


def effects_of(engine: Engine, job_id: int) -> int:
    """Return how many effects of a job were committed."""
    with engine.connect() as connection:
        return connection.execute(
            select(func.count()).select_from(effects).where(effects.c.job_id == job_id)
        ).scalar_one()
