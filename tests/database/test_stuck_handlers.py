"""Handlers that go on after their time-out: their slots are replaced, up to a stated bound."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker, WorkerError, fixed
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.running import SHORT, RunningWorker, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


def handler_threads() -> int:
    return sum(thread.name.startswith("sa-jobs-handler") for thread in threading.enumerate())


def test_with_two_of_two_slots_stuck_other_jobs_run_and_late_returns_change_nothing(
    engine: Engine, jobs: Jobs
) -> None:
    go = threading.Event()
    returned: list[int] = []

    @jobs.handler("stuck", timeout=2, max_attempts=1)
    def stuck(number: int) -> int:
        go.wait(60)
        returned.append(number)
        return number

    @jobs.handler("normal")
    def normal(number: int) -> int:
        return number

    before = handler_threads()
    bad = add(engine, jobs, "stuck", {"number": 1}, {"number": 2})
    good = add(engine, jobs, "normal", *[{"number": number} for number in range(10)])
    with running(engine, jobs, concurrency=2):
        for job_id in good:
            wait_until_done(engine, job_id)
        # As many threads again as there are slots, and no more.
        assert handler_threads() - before <= 4
        ends = [job(engine, job_id) for job_id in bad]
        go.set()
        wait_until(lambda: len(returned) == 2, "both return at last")
        # Whatever a late return could do is done before what comes after it.
        (after,) = add(engine, jobs, "normal", {"number": 10})
        wait_until_done(engine, after)
        wait_until(lambda: handler_threads() - before <= 2, "the stuck threads end")

    assert [(end.status, end.last_error) for end in ends] == [("dead", "timed out after 2 s")] * 2
    assert [job(engine, job_id) for job_id in bad] == ends
    assert [len(failures(engine, job_id)) for job_id in bad] == [1, 1]
    assert [job(engine, job_id).result for job_id in [*good, after]] == list(range(11))


def test_a_late_return_is_not_taken_for_the_next_attempt(engine: Engine, jobs: Jobs) -> None:
    """Both attempts run in one worker, and the first one commits its session too late."""
    first, second = threading.Event(), threading.Event()
    begun: list[int] = []
    returned: list[int] = []
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (note text)"))

    @jobs.handler("slow", timeout=3, max_attempts=2, backoff=fixed(0))
    def slow(session: Session) -> int:
        attempt = len(begun) + 1
        begun.append(attempt)
        session.execute(text("INSERT INTO effects VALUES (:note)"), {"note": str(attempt)})
        (first if attempt == 1 else second).wait(60)
        returned.append(attempt)
        return attempt

    (job_id,) = add(engine, jobs, "slow")
    with running(engine, jobs, concurrency=2) as worker:
        wait_until(lambda: begun == [1, 2], "the second attempt runs beside the first")
        first.set()
        wait_until(lambda: returned == [1], "the first one returns")
        second.set()
        wait_until(lambda: status(engine, job_id) != "running", "the second one ends")
        assert worker.error is None
        wait_until_done(engine, job_id)

    with engine.connect() as connection:
        committed = connection.execute(text("SELECT array_agg(note) FROM effects")).scalar()
    assert committed == [str(job(engine, job_id).result)]
    assert committed != ["1"]


def test_beyond_the_bound_the_worker_says_so_hands_back_and_ends(
    engine: Engine, jobs: Jobs
) -> None:
    go = threading.Event()
    began = threading.Event()

    @jobs.handler("stuck", timeout=0.3, max_attempts=1)
    def stuck() -> None:
        go.wait(60)

    @jobs.handler("waits")
    def waits() -> None:
        began.set()
        go.wait(60)

    (good,) = add(engine, jobs, "waits")
    worker = RunningWorker(Worker(engine, jobs, **{**SHORT, "concurrency": 2, "grace": 60.0}))
    assert began.wait(30)
    bad = add(engine, jobs, "stuck", {}, {}, {})
    worker.join()
    go.set()

    assert isinstance(worker.error, WorkerError)
    assert "3 handlers were told to stop and still run" in str(worker.error)
    assert [status(engine, job_id) for job_id in bad] == ["dead"] * 3
    assert (status(engine, good), job(engine, good).attempts) == ("ready", 0)
