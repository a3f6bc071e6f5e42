"""A job that kills its worker each time ends dead, and takes nothing with it."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from tests.acceptance.app import jobs
from tests.support.looking import failures, job, starts_of, status, unfinished
from tests.support.waiting import wait_until
from tests.support.workers import Supervisor

pytestmark = pytest.mark.acceptance


def enqueue_poison_and_bystanders(engine: Engine) -> tuple[int, list[int]]:
    with Session(engine) as session, session.begin():
        poison = jobs.enqueue(session, "kills_its_worker").id
        others = jobs.enqueue_many(session, "quick", [{}] * 10)
    return poison, [other.id for other in others]


def test_with_one_slot_a_poison_job_starts_exactly_three_times_and_harms_no_other(
    app_database: str, engine: Engine
) -> None:
    poison, others = enqueue_poison_and_bystanders(engine)
    with Supervisor(app_database, "--concurrency", "1") as supervisor:

        def tended() -> bool:
            supervisor.tend()
            return unfinished(engine) == 0

        wait_until(tended, "every job ends", seconds=60)

    assert [start.attempt for start in starts_of(engine, poison)] == [1, 2, 3]
    dead = job(engine, poison)
    assert (dead.status, dead.last_error) == ("dead", "lease expired on final attempt")
    assert [entry.error for entry in failures(engine, poison)] == [
        "lease expired",
        "lease expired",
        "lease expired on final attempt",
    ]
    assert {(status(engine, other), job(engine, other).attempts) for other in others} == {
        ("done", 1)
    }


def test_with_more_slots_a_bystander_loses_one_attempt_at_most_for_each_crash_it_ran_in(
    app_database: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        others = [
            other.id for other in jobs.enqueue_many(session, "sleep", [{"seconds": 0.5}] * 10)
        ]
        poison = jobs.enqueue(session, "kills_its_worker", priority=1).id
    with Supervisor(app_database, "--concurrency", "4") as supervisor:

        def tended() -> bool:
            supervisor.tend()
            return unfinished(engine) == 0

        wait_until(tended, "every job ends", seconds=60)
        crashed = {start.pid for start in starts_of(engine, poison)}

    assert len(starts_of(engine, poison)) == 3
    assert status(engine, poison) == "dead"
    for other in others:
        assert status(engine, other) == "done"
        lost = [int(entry.worker.split(":")[-2]) for entry in failures(engine, other)]
        assert job(engine, other).attempts == 1 + len(lost)
        assert len(set(lost)) == len(lost)
        assert set(lost) <= crashed
