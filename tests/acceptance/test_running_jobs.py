"""What a worker does with jobs of each kind, seen from outside the process."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import cancel, enqueue
from tests.acceptance.app import jobs
from tests.support.gates import wait_until_asleep
from tests.support.looking import job, starts_of, status
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


def test_an_unknown_handler_is_never_claimed(app_database: str, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        unknown = [enqueue(session, name).id for name in ("os.system", "Quick", "quick ")]
        known = enqueue(session, "quick").id
    with WorkerProcess(app_database):
        wait_until(lambda: status(engine, known) == "done", "the known one is done")

    for job_id in unknown:
        waiting = job(engine, job_id)
        assert (waiting.status, waiting.attempts, waiting.claim_no) == ("ready", 0, 0)


def test_a_running_job_that_is_cancelled_tells_its_handler(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "wait_for_cancel")
    coroutine = add(engine, "sleep_async", seconds=30.0)
    with WorkerProcess(app_database):
        wait_until(lambda: starts_of(engine, job_id), "it starts")
        wait_until(lambda: starts_of(engine, coroutine), "the coroutine starts")
        with Session(engine) as session, session.begin():
            assert cancel(session, job_id) == "requested"
            assert cancel(session, coroutine) == "requested"
        wait_until(lambda: status(engine, job_id) == "cancelled", "the handler stops")
        wait_until(lambda: status(engine, coroutine) == "cancelled", "the coroutine stops")


def test_a_snoozed_job_runs_again_at_no_cost(app_database: str, engine: Engine) -> None:
    job_id = add(engine, "snoozes_once")
    with WorkerProcess(app_database):
        wait_until(lambda: status(engine, job_id) == "done", "the job is done")

    assert (job(engine, job_id).attempts, job(engine, job_id).claim_no) == (1, 2)


def test_nothing_is_seen_of_a_savepoint_until_the_root_commits(
    app_database: str, engine: Engine
) -> None:
    """A long poll interval: only the notification, which the commit sends, wakes the worker."""
    with WorkerProcess(app_database, "--poll", "60") as worker:
        worker.wait_until_ready()
        wait_until_asleep(engine)
        with Session(engine) as session:
            kept = session.begin_nested()
            first = enqueue(session, "quick").id
            kept.commit()
            dropped = session.begin_nested()
            enqueue(session, "quick")
            dropped.rollback()
            with pytest.raises(AssertionError):
                wait_until(lambda: starts_of(engine, first), "a start", seconds=1.5)
            session.commit()
        wait_until(lambda: status(engine, first) == "done", "the commit wakes it", seconds=10)

    with engine.connect() as connection:
        assert connection.execute(text("SELECT array_agg(id) FROM sa_jobs")).scalar() == [first]
        assert connection.execute(text("SELECT array_agg(job_id) FROM starts")).scalar() == [first]


def test_the_payload_is_never_logged(app_database: str, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        job_id = enqueue(session, "quick", {"password": "hunter2-XYZ"}, max_attempts=1).id
    with WorkerProcess(app_database, "--log-level", "debug") as worker:
        wait_until(lambda: status(engine, job_id) == "dead", "the wrong payload fails")
        worker.stop()

        assert "hunter2-XYZ" not in worker.log
        assert f"job {job_id} quick (queue default, attempt 1)" in worker.log
    assert "hunter2-XYZ" not in job(engine, job_id).last_error
