"""The five failure paths that everything else builds on, with real workers and real signals."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from itertools import pairwise

import pytest
from sqlalchemy import Engine, func, select, update
from sqlalchemy.orm import Session

from sa_jobs import claims, enqueue
from sa_jobs.models import Job
from tests.acceptance.app import jobs
from tests.support.looking import effects_of, failures, job, starts_of, status, wait_until_done
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


def test_of_ten_workers_exactly_one_claims_a_job(app_database: str, engine: Engine) -> None:
    job_id = add(engine, "quick")
    with engine.connect() as connection:
        assert connection.execute(select(func.count()).select_from(Job)).scalar_one() == 1
    barrier = threading.Barrier(10)
    claimed: list[int] = []

    def one_claim(number: int) -> None:
        with engine.connect() as connection:
            connection.execute(select(1))
            barrier.wait()
            found = claims.claim(
                connection,
                worker=f"worker-{number}",
                queues=["default"],
                handlers=["quick"],
                limit=1,
                lease=30,
            )
            connection.commit()
            claimed.extend(entry.id for entry in found)

    threads = [threading.Thread(target=one_claim, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert claimed == [job_id]
    assert job(engine, job_id).attempts == 1


def test_ten_worker_processes_run_a_job_once(app_database: str, engine: Engine) -> None:
    workers = [WorkerProcess(app_database, "--concurrency", "2") for _ in range(10)]
    try:
        for worker in workers:
            worker.wait_until_ready()
        ids = [add(engine, "quick") for _ in range(5)]
        for job_id in ids:
            wait_until_done(engine, job_id)
    finally:
        for worker in workers:
            worker.__exit__(None, None, None)

    assert [len(starts_of(engine, job_id)) for job_id in ids] == [1] * 5


def test_a_job_whose_worker_was_killed_runs_again_on_another(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "effect", seconds=60.0)
    with WorkerProcess(app_database) as first:
        wait_until(lambda: starts_of(engine, job_id), "the first worker starts the job")
        name = job(engine, job_id).locked_by
        with WorkerProcess(app_database) as second:
            second.wait_until_ready()
            first.send(signal.SIGKILL)
            # The lease (3 s) and the sweep interval (1 s) bound it; the rest is for the machine.
            wait_until(lambda: len(starts_of(engine, job_id)) == 2, "it starts again", seconds=10)
            again = starts_of(engine, job_id)[1]
            assert again.pid == second.pid
            assert again.attempt == 2

    (lost,) = failures(engine, job_id)
    assert (lost.attempt, lost.worker, lost.error) == (1, name, "lease expired")


def test_a_worker_that_is_alone_reclaims_what_it_lost_when_it_was_killed(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "sleep", seconds=1.0)
    with WorkerProcess(app_database) as first:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        first.send(signal.SIGKILL)
        first.wait()
    with WorkerProcess(app_database):
        wait_until(lambda: status(engine, job_id) == "done", "the restarted worker finishes it")

    assert job(engine, job_id).attempts == 2
    assert len(starts_of(engine, job_id)) == 2


@pytest.mark.parametrize("first_ends", ["commit", "rollback"])
def test_one_idempotency_key_enqueued_at_once_gives_one_row(
    app_database: str, engine: Engine, first_ends: str
) -> None:
    key = "invoice:1842:send-receipt"
    barrier = threading.Barrier(9)
    results = []

    def other() -> None:
        with Session(engine) as session, session.begin():
            barrier.wait()
            results.append(enqueue(session, "quick", idempotency_key=key))

    with Session(engine) as session:
        first = enqueue(session, "quick", idempotency_key=key)
        threads = [threading.Thread(target=other) for _ in range(8)]
        for thread in threads:
            thread.start()
        barrier.wait()
        session.commit() if first_ends == "commit" else session.rollback()
    for thread in threads:
        thread.join()

    with engine.connect() as connection:
        (row_id,) = connection.execute(select(Job.id)).scalars()
    assert {result.id for result in results} == {row_id}
    assert sum(result.created for result in results) == (0 if first_ends == "commit" else 1)
    assert (first.id == row_id) is (first_ends == "commit")


def test_a_handler_that_always_fails_is_retried_ever_later_and_ends_dead(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "always_fails")
    with WorkerProcess(app_database):
        wait_until(lambda: status(engine, job_id) == "dead", "attempts run out")

    times = [start.at for start in starts_of(engine, job_id)]
    gaps = [(later - earlier).total_seconds() for earlier, later in pairwise(times)]
    assert len(times) == 4
    assert gaps[0] >= 0.4
    assert gaps[1] >= 0.8
    assert gaps[2] >= 1.6
    history = failures(engine, job_id)
    assert [entry.attempt for entry in history] == [1, 2, 3, 4]
    assert all(
        entry.error.endswith(f"ValueError: failure of attempt {entry.attempt}") for entry in history
    )
    assert job(engine, job_id).last_error == history[-1].error


def test_the_heartbeat_keeps_a_job_that_is_slower_than_its_lease(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "sleep", seconds=10.0)
    with (
        WorkerProcess(app_database, lease=2),
        WorkerProcess(app_database, lease=2),
        WorkerProcess(app_database, lease=2),
    ):
        wait_until(lambda: status(engine, job_id) == "done", "the job is done")

    assert len(starts_of(engine, job_id)) == 1
    assert failures(engine, job_id) == []


@pytest.mark.parametrize(
    ("handler", "payload"),
    [
        ("sleep", {"seconds": 4.5}),
        ("fails_after_sleep", {"seconds": 4.5}),
        ("effect", {"seconds": 4.5}),
        ("sleep_async", {"seconds": 4.5}),
    ],
)
def test_without_a_heartbeat_the_job_is_reclaimed_and_the_late_end_changes_nothing(
    app_database: str, engine: Engine, handler: str, payload: dict[str, float]
) -> None:
    """SIGSTOP holds the worker past its lease; after SIGCONT its handler ends too late."""
    job_id = add(engine, handler, **payload)
    with WorkerProcess(app_database) as first:
        wait_until(lambda: starts_of(engine, job_id), "the first worker starts the job")
        first.send(signal.SIGSTOP)
        with engine.begin() as connection:
            # The second run ends at once, so that it is over before the first wakes up.
            connection.execute(update(Job).values(payload={"seconds": 0.0}, handler=handler))
        with WorkerProcess(app_database) as second:
            wait_until(lambda: len(starts_of(engine, job_id)) == 2, "the second one starts it")
            wait_until(lambda: job(engine, job_id).locked_by is not None, "it has an owner")
            wait_until(lambda: job(engine, job_id).leased_until is None, "the second run ends")
            assert second.stop() == 0
        before = job(engine, job_id)
        history = failures(engine, job_id)
        first.send(signal.SIGCONT)
        wait_until(lambda: "lost its lease" in first.log, "the first worker sees that it lost")
        first.stop()

        assert first.log.count("lost its lease") == 1
    assert job(engine, job_id) == before
    assert failures(engine, job_id) == history
    if handler == "effect":
        assert effects_of(engine, job_id) == 1


def test_a_worker_that_is_stopped_anywhere_keeps_nobody_from_sweeping(
    app_database: str, engine: Engine
) -> None:
    """Also in the middle of its own sweep, which comes several times a second here."""
    job_id = add(engine, "sleep", seconds=0.0)
    for _ in range(3):
        with WorkerProcess(app_database, "--sweep", "0.01", "--queue", "another") as stopped:
            stopped.wait_until_ready()
            stopped.send(signal.SIGSTOP)
            with engine.begin() as connection:
                connection.execute(
                    update(Job).values(
                        status="running",
                        locked_by="gone",
                        leased_until=func.now() - timedelta(seconds=1),
                        finished_at=None,
                    )
                )
            with WorkerProcess(app_database):
                wait_until(lambda: status(engine, job_id) == "done", "it is reclaimed and run")
