"""SIGTERM and SIGINT: a bounded, ordered end, and no job left behind."""

from __future__ import annotations

import signal
import time

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs.worker import EXIT_HANDED_BACK
from tests.acceptance.app import jobs
from tests.support.gates import wait_until_asleep
from tests.support.looking import failures, job, starts_of, status
from tests.support.waiting import assert_within, wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_worker_ends_within_a_second(
    app_database: str, engine: Engine, number: signal.Signals
) -> None:
    with WorkerProcess(app_database, "--poll", "60") as worker:
        wait_until_asleep(engine)
        began = time.monotonic()
        worker.send(number)
        assert worker.wait() == 0
        assert_within(1, time.monotonic() - began)
        assert "Traceback" not in worker.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_job_that_ends_in_the_grace_period_is_done(
    app_database: str, engine: Engine, number: signal.Signals
) -> None:
    job_id = add(engine, "sleep", seconds=3.0)
    with WorkerProcess(app_database, "--grace", "10") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        worker.send(number)
        assert worker.wait() == 0
        assert "Traceback" not in worker.log

    assert (status(engine, job_id), job(engine, job_id).attempts) == ("done", 1)


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
    job_id = add(engine, handler, seconds=60.0)
    with WorkerProcess(app_database, "--grace", "2") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        began = time.monotonic()
        assert worker.stop() == EXIT_HANDED_BACK
        assert time.monotonic() - began >= 2
        assert_within(4, time.monotonic() - began)
        assert "Traceback" not in worker.log

    given_back = job(engine, job_id)
    assert (given_back.status, given_back.attempts, given_back.claim_no) == ("ready", 0, 1)
    assert failures(engine, job_id) == []
    with WorkerProcess(app_database):
        wait_until(lambda: len(starts_of(engine, job_id)) == 2, "it can be claimed at once")


@pytest.mark.parametrize("signals", [2, 5])
def test_more_signals_end_within_a_second_and_hand_back(
    app_database: str, engine: Engine, signals: int
) -> None:
    """The second one half a second after the first, or five in a tenth of a second."""
    job_id = add(engine, "sleep", seconds=60.0)
    with WorkerProcess(app_database, "--grace", "30") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        if signals == 2:
            worker.send(signal.SIGTERM)
            wait_until(lambda: "stopping" in worker.log, "the worker drains")
            time.sleep(0.5)
        began = time.monotonic()
        for _ in range(1 if signals == 2 else signals):
            worker.send(signal.SIGTERM)
            time.sleep(0.02)
        assert worker.wait() == EXIT_HANDED_BACK
        assert_within(1, time.monotonic() - began)
        assert "Traceback" not in worker.log

    given_back = job(engine, job_id)
    assert (given_back.status, given_back.attempts) == ("ready", 0)


def test_what_is_buffered_is_handed_back_and_what_runs_is_finished(
    app_database: str, engine: Engine
) -> None:
    ids = [add(engine, "sleep", seconds=2.0) for _ in range(22)]
    with WorkerProcess(
        app_database, "--concurrency", "1", "--buffer", "20", "--grace", "20"
    ) as worker:
        wait_until(
            lambda: [status(engine, job_id) for job_id in ids] == ["running"] * 21 + ["ready"],
            "one runs and twenty are buffered",
        )
        wait_until(lambda: starts_of(engine, ids[0]), "the first one starts")
        assert worker.stop() == 0

    ends = [(job(engine, job_id).status, job(engine, job_id).attempts) for job_id in ids]
    done = ends.count(("done", 1))
    # The machine may be slow enough for more than one to end before the signal.
    assert 1 <= done <= 5
    assert ends == [("done", 1)] * done + [("ready", 0)] * (22 - done)
    assert [failures(engine, job_id) for job_id in ids] == [[]] * 22


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
