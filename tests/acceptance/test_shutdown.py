"""SIGTERM and SIGINT: a bounded, ordered end, and no job left behind."""

from __future__ import annotations

import signal
import time

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs.worker import EXIT_HANDED_BACK
from tests.acceptance.app import jobs
from tests.support.looking import failures, job, starts_of, status
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_at_once(
    app_database: str, engine: Engine, number: signal.Signals
) -> None:
    with WorkerProcess(app_database, "--poll", "60") as worker:
        worker.wait_until_ready()
        began = time.monotonic()
        worker.send(number)
        assert worker.wait() == 0
        assert time.monotonic() - began < 5
        assert "Traceback" not in worker.log


def test_a_running_job_is_finished_and_keeps_its_lease_meanwhile(
    app_database: str, engine: Engine
) -> None:
    """The heartbeat is the last to stop: an idle worker beside it must not take the job."""
    job_id = add(engine, "sleep", seconds=6.0)
    with WorkerProcess(app_database, "--grace", "20") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        with WorkerProcess(app_database):
            worker.send(signal.SIGTERM)
            wait_until(lambda: "stopping" in worker.log, "the worker drains")
            before = job(engine, job_id).leased_until
            wait_until(lambda: job(engine, job_id).leased_until != before, "the lease is renewed")
            assert job(engine, job_id).leased_until is not None
            assert worker.wait() == 0

    assert status(engine, job_id) == "done"
    assert len(starts_of(engine, job_id)) == 1


@pytest.mark.parametrize("handler", ["sleep", "sleep_async"])
def test_at_the_end_of_the_grace_period_a_job_is_handed_back_at_no_cost(
    app_database: str, engine: Engine, handler: str
) -> None:
    job_id = add(engine, handler, seconds=30.0)
    with WorkerProcess(app_database, "--grace", "1") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        assert worker.stop() == EXIT_HANDED_BACK
        assert "Traceback" not in worker.log

    given_back = job(engine, job_id)
    assert (given_back.status, given_back.attempts, given_back.claim_no) == ("ready", 0, 1)
    assert failures(engine, job_id) == []
    with WorkerProcess(app_database):
        wait_until(lambda: len(starts_of(engine, job_id)) == 2, "it can be claimed at once")


def test_a_second_signal_ends_at_once_and_hands_back(app_database: str, engine: Engine) -> None:
    job_id = add(engine, "sleep", seconds=30.0)
    with WorkerProcess(app_database, "--grace", "30") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        worker.send(signal.SIGTERM)
        wait_until(lambda: "stopping" in worker.log, "the worker drains")
        began = time.monotonic()
        worker.send(signal.SIGTERM)
        assert worker.wait() == EXIT_HANDED_BACK
        assert time.monotonic() - began < 5

    assert status(engine, job_id) == "ready"


def test_no_job_is_claimed_after_the_first_signal(app_database: str, engine: Engine) -> None:
    running = add(engine, "sleep", seconds=2.0)
    with WorkerProcess(app_database, "--concurrency", "2") as worker:
        wait_until(lambda: starts_of(engine, running), "the job starts")
        worker.send(signal.SIGTERM)
        wait_until(lambda: "stopping" in worker.log, "the worker drains")
        later = add(engine, "quick")
        assert worker.wait() == 0

    assert status(engine, running) == "done"
    assert status(engine, later) == "ready"


def test_a_worker_that_waits_for_the_database_can_be_stopped(app_database: str) -> None:
    nobody = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
    with WorkerProcess(nobody) as worker:
        wait_until(lambda: "trying again" in worker.log, "the worker waits for the database")
        assert worker.stop() == 0
        assert "Traceback" not in worker.log
