"""`sa-jobs cancel`, at each stage of a job's life: what it says, and what becomes of the job."""

from __future__ import annotations

import signal

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.acceptance.app import jobs
from tests.support.commands import sa_jobs
from tests.support.looking import job, starts_of, status, wait_until_done
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = pytest.mark.acceptance


def add(engine: Engine, handler: str, delay: float | None = None, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload, delay=delay).id


CANCELLED = "cancelled"
REQUESTED = "is running; its handler is told to stop with the next heartbeat"
FINAL = "not cancelled: it has ended already"


def cancel(url: str, *job_ids: int) -> list[str]:
    """Cancel jobs by the command, and return what it says of each."""
    ended = sa_jobs("cancel", *map(str, job_ids), url=url)
    lines = ended.out.splitlines()
    said = [line.removeprefix(f"{job_id}: ") for job_id, line in zip(job_ids, lines, strict=True)]
    assert ended.code == (1 if FINAL in said else 0), ended.error
    return said


def wait_for_starts(engine: Engine, *job_ids: int) -> None:
    wait_until(lambda: all(starts_of(engine, job_id) for job_id in job_ids), "they run")


def test_a_job_at_each_stage_gets_one_final_state(app_database: str, engine: Engine) -> None:
    finished = add(engine, "quick")
    with WorkerProcess(app_database, "--concurrency", "3") as worker:
        wait_until_done(engine, finished)
        listens = add(engine, "wait_for_cancel")
        ignores = add(engine, "ignores_cancel")
        fails = add(engine, "fails_when_cancelled")
        wait_for_starts(engine, listens, ignores, fails)
        scheduled = add(engine, "quick", delay=3600)
        waiting = add(engine, "quick")
        before = job(engine, finished)

        assert cancel(app_database, waiting, scheduled, listens, ignores, fails, finished) == [
            *[CANCELLED] * 2,
            *[REQUESTED] * 3,
            FINAL,
        ]
        wait_until(lambda: status(engine, listens) == "cancelled", "the handler that listens stops")
        wait_until(lambda: status(engine, fails) == "cancelled", "the one that fails is no retry")
        wait_until_done(engine, ignores)
        wait_until_done(engine, add(engine, "quick"))
        assert worker.stop() == 0

    assert [status(engine, job_id) for job_id in (waiting, scheduled)] == ["cancelled"] * 2
    assert starts_of(engine, waiting) == starts_of(engine, scheduled) == []
    assert [len(starts_of(engine, job_id)) for job_id in (listens, ignores, fails)] == [1] * 3
    assert job(engine, ignores).result == "went on to its end"
    assert job(engine, finished) == before


def test_a_job_is_cancelled_while_its_worker_drains(app_database: str, engine: Engine) -> None:
    listens = add(engine, "wait_for_cancel")
    coroutine = add(engine, "sleep_async", seconds=60.0)
    with WorkerProcess(app_database, "--grace", "60") as worker:
        wait_for_starts(engine, listens, coroutine)
        worker.send(signal.SIGTERM)
        wait_until(lambda: "stopping" in worker.log, "the worker drains")
        assert cancel(app_database, listens, coroutine) == [REQUESTED] * 2
        assert worker.wait() == 0

    assert [status(engine, job_id) for job_id in (listens, coroutine)] == ["cancelled"] * 2
    assert [len(starts_of(engine, job_id)) for job_id in (listens, coroutine)] == [1, 1]
