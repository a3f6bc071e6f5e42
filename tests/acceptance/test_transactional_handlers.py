"""A handler that asks for a session: its writes commit with the job's finish, or not at all."""

from __future__ import annotations

import signal

import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

from sa_jobs.models import Job
from tests.acceptance.app import jobs
from tests.support.looking import effects_of, job, starts_of, status
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, "effect", payload).id


def test_the_effect_and_the_finish_commit_together(app_database: str, engine: Engine) -> None:
    job_id = add(engine)
    with WorkerProcess(app_database):
        wait_until(lambda: status(engine, job_id) == "done", "the job is done")

    with engine.connect() as connection:
        same_transaction = connection.execute(
            text("SELECT effects.xmin = sa_jobs.xmin FROM effects JOIN sa_jobs ON id = job_id")
        ).scalar_one()
    assert same_transaction
    assert job(engine, job_id).result == "effect"


def test_with_the_lease_lost_neither_lands(app_database: str, engine: Engine) -> None:
    job_id = add(engine, seconds=2.0)
    with WorkerProcess(app_database) as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        with engine.begin() as connection:
            # As another worker's claim would leave the row.
            connection.execute(update(Job).values(claim_no=2, attempts=2, locked_by="another"))
        wait_until(lambda: "lost its lease" in worker.log, "the worker sees that it lost")
        worker.stop()

    assert effects_of(engine, job_id) == 0
    assert status(engine, job_id) == "running"


def test_a_worker_that_is_killed_in_the_handler_leaves_no_effect(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, seconds=60.0)
    with WorkerProcess(app_database) as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        worker.send(signal.SIGKILL)
        worker.wait()

    assert effects_of(engine, job_id) == 0
