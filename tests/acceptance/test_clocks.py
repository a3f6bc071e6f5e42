"""Workers whose clocks are hours apart: every lease is by the database's clock."""

from __future__ import annotations

import datetime as dt

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.acceptance.app import jobs
from tests.support import clock
from tests.support.looking import failures, job, starts_of, wait_until_done
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

HOUR = 3600.0

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(clock.library() is None, reason="the system's package faketime is absent"),
]


def hours_off(worker: WorkerProcess) -> float:
    """Return by how many hours the times in a worker's log differ from ours."""
    logged = dt.datetime.fromisoformat(worker.log.split(" ", 1)[0])
    return (logged - dt.datetime.now(dt.timezone.utc)).total_seconds() / HOUR


def test_a_clock_that_is_wrong_neither_takes_a_job_early_nor_late(
    app_database: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        job_id = jobs.enqueue(session, "sleep", {"seconds": 5}).id

    with (
        WorkerProcess(app_database, variables=clock.shifted_by(HOUR)) as ahead,
        WorkerProcess(app_database, variables=clock.shifted_by(-HOUR)) as behind,
    ):
        workers = {worker.pid: worker for worker in (ahead, behind)}
        ahead.wait_until_ready()
        behind.wait_until_ready()
        assert hours_off(ahead) == pytest.approx(1, abs=0.1)
        assert hours_off(behind) == pytest.approx(-1, abs=0.1)

        # Longer than a lease, by either clock.
        wait_until_done(engine, job_id)
        assert len(starts_of(engine, job_id)) == 1

        with Session(engine) as session, session.begin():
            job_id = jobs.enqueue(session, "sleep", {"seconds": 1}).id
        (start,) = wait_until(lambda: starts_of(engine, job_id), "the job starts")
        workers[start.pid].process.kill()
        wait_until_done(engine, job_id)

    first, second = starts_of(engine, job_id)
    assert first.pid != second.pid
    # Not before the lease ran out, which was no more than a heartbeat old.
    assert (second.at - first.at).total_seconds() > 1.5
    assert job(engine, job_id).attempts == 2
    (lost,) = failures(engine, job_id)
    assert lost.error == "lease expired"
