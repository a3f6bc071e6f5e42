"""Handlers that leave the heartbeat no time: those that compute, and those that stop everything."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.acceptance.app import jobs
from tests.support.looking import failures, job, starts_of, status
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]


def test_heartbeats_hold_while_all_slots_compute(app_database: str, engine: Engine) -> None:
    with WorkerProcess(app_database, "--concurrency", "8", lease=5) as worker:
        worker.wait_until_ready()
        with Session(engine) as session, session.begin():
            added = jobs.enqueue_many(session, "burns", [{"seconds": 10.0}] * 8)
        ids = [entry.id for entry in added]
        wait_until(lambda: all(starts_of(engine, job_id) for job_id in ids), "all have started")
        with WorkerProcess(app_database, lease=5):
            wait_until(
                lambda: {status(engine, job_id) for job_id in ids} == {"done"},
                "all are done",
                seconds=60,
            )

    assert [len(starts_of(engine, job_id)) for job_id in ids] == [1] * 8
    assert [failures(engine, job_id) for job_id in ids] == [[]] * 8


def test_a_call_that_keeps_the_interpreter_for_longer_than_the_lease_loses_it(
    app_database: str, engine: Engine
) -> None:
    """Nothing else of that process runs. A worker with a longer lease finishes the job."""
    with WorkerProcess(app_database, "--concurrency", "1", lease=5) as first:
        first.wait_until_ready()
        with Session(engine) as session, session.begin():
            job_id = jobs.enqueue(session, "keeps_the_interpreter", {"seconds": 8}).id
        wait_until(lambda: starts_of(engine, job_id), "it starts")
        with WorkerProcess(app_database, "--concurrency", "1", lease=30) as second:
            wait_until(lambda: status(engine, job_id) == "done", "it is done", seconds=60)
            wait_until(lambda: "lost its lease" in first.log, "the first one sees that it lost")
            wait_until(lambda: "the heartbeat is" in first.log, "it says that it was late")
            assert job(engine, job_id).locked_by.split(":")[1] == str(second.pid)

    assert [start.attempt for start in starts_of(engine, job_id)] == [1, 2]
    assert [entry.error for entry in failures(engine, job_id)] == ["lease expired"]
