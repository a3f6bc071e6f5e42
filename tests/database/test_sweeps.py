"""The sweep of a running worker: killed half-way, among rows that are not its to touch."""

from __future__ import annotations

import datetime as dt
import logging
import threading
import time

import pytest
from sqlalchemy import Engine, func, insert, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from sa_jobs import Jobs, enqueue, retry
from sa_jobs.claims import RECLAIM_BATCH
from sa_jobs.models import DEFAULT_TABLES
from tests.support.faults import kill_backends
from tests.support.looking import failures, job
from tests.support.running import running
from tests.support.waiting import wait_until

SWEEP_SECONDS = 1.0
LAPSED = 300
table = DEFAULT_TABLES.jobs


@pytest.fixture
def jobs() -> Jobs:
    """A registry without a handler for the jobs here: they are reclaimed, and not run."""
    jobs = Jobs()
    jobs.handler("another")(lambda: None)
    return jobs


def add_running(
    engine: Engine, count: int, *, lease_seconds: float, keyed: bool = False
) -> list[int]:
    """Insert jobs as another worker's claims have left them."""
    row = {
        "queue": "default",
        "handler": "send",
        "status": "running",
        "attempts": 1,
        "claim_no": 1,
        "locked_by": "gone",
        "claimed_at": func.now(),
        "leased_until": func.now() + dt.timedelta(seconds=lease_seconds),
    }
    rows = [{**row, "unique_key": f"key {n}" if keyed else None} for n in range(count)]
    with engine.begin() as connection:
        return list(connection.execute(insert(table).values(rows).returning(table.c.id)).scalars())


def count(engine: Engine, status: str) -> int:
    with engine.connect() as connection:
        return int(
            connection.execute(
                text("SELECT count(*) FROM sa_jobs WHERE status = :status"), {"status": status}
            ).scalar_one()
        )


def test_a_sweep_that_is_killed_half_way_is_made_again(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    ids = add_running(engine, LAPSED, lease_seconds=-1)
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END'"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER slow BEFORE INSERT ON sa_jobs_failures"
                " FOR EACH ROW EXECUTE FUNCTION slow()"
            )
        )

    def sweeping() -> bool:
        with engine.connect() as connection:
            return bool(
                connection.execute(
                    text(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                        " AND application_name = 'sa-jobs sweep' AND wait_event = 'PgSleep'"
                    )
                ).scalar()
            )

    with running(engine, jobs, sweep=SWEEP_SECONDS), caplog.at_level(logging.WARNING):
        wait_until(sweeping, "the sweep is under way")
        assert kill_backends(str(engine.url), "sa-jobs sweep") == 1
        with engine.begin() as connection:
            connection.execute(text("DROP TRIGGER slow ON sa_jobs_failures"))
            connection.execute(text("DROP FUNCTION slow()"))
        wait_until(
            lambda: count(engine, "ready") == LAPSED,
            "all are ready again",
            seconds=2 * SWEEP_SECONDS + 3,
        )

    assert {job(engine, job_id).attempts for job_id in ids[::30]} == {1}
    assert {len(failures(engine, job_id)) for job_id in ids[::30]} == {1}
    assert caplog.messages.count(f"the leases of {LAPSED} jobs ran out: {LAPSED} ready now") == 1
    assert len(caplog.messages) <= 3


def test_no_twin_can_take_the_unique_key_of_a_lapsed_job(engine: Engine, jobs: Jobs) -> None:
    """So no sweep can fail on one: the key is held from the enqueue to the end of the job."""
    ids = add_running(engine, LAPSED, lease_seconds=-1, keyed=True)
    with Session(engine) as session, session.begin():
        existing = enqueue(session, "send", unique_key="key 7")
        assert (existing.id, existing.created) == (ids[7], False)
        dead = enqueue(session, "send", unique_key="old").id
    with engine.begin() as connection:
        twin = update(table).where(table.c.id == dead).values(unique_key="key 8")
        with pytest.raises(IntegrityError), connection.begin_nested():
            connection.execute(twin)
        connection.execute(twin.values(status="dead", unique_key="key 8", finished_at=func.now()))
    with running(engine, jobs, sweep=SWEEP_SECONDS):
        with Session(engine) as session, session.begin():
            assert retry(session, dead) == "duplicate"
        wait_until(lambda: count(engine, "ready") == LAPSED, "all are ready again", seconds=5)

    assert count(engine, "dead") == 1


def test_a_page_of_rows_that_must_not_be_touched_hides_no_lapsed_job(
    engine: Engine, jobs: Jobs
) -> None:
    alive = add_running(engine, RECLAIM_BATCH + 100, lease_seconds=600)
    locked = add_running(engine, RECLAIM_BATCH + 100, lease_seconds=-60)
    lapsed = add_running(engine, LAPSED, lease_seconds=-1)
    with engine.connect() as holder:
        holder.execute(
            text("SELECT id FROM sa_jobs WHERE id = ANY(:ids) FOR UPDATE"), {"ids": locked}
        )
        with running(engine, jobs, sweep=SWEEP_SECONDS):
            wait_until(
                lambda: count(engine, "ready") == LAPSED,
                "the others are ready again",
                seconds=2 * SWEEP_SECONDS + 3,
            )
            assert job(engine, lapsed[0]).status == job(engine, lapsed[-1]).status == "ready"
            holder.rollback()
            wait_until(
                lambda: count(engine, "ready") == LAPSED + len(locked), "then the locked ones too"
            )

    assert count(engine, "running") == len(alive)


def test_a_worker_with_a_short_lease_takes_nothing_from_one_with_a_long_one(
    engine: Engine,
) -> None:
    """The owner writes when its lease ends; nobody else's settings play a part."""
    go = threading.Event()
    starts: list[float] = []
    jobs = Jobs()

    @jobs.handler("waits")
    def waits() -> None:
        starts.append(time.monotonic())
        go.wait(20)

    with running(engine, jobs, lease=12, heartbeat=4, concurrency=1):
        with Session(engine) as session, session.begin():
            job_id = jobs.enqueue(session, "waits").id
        wait_until(lambda: starts, "it runs")
        with running(engine, jobs, lease=1.0, heartbeat=0.3, sweep=0.1):
            time.sleep(3.5)  # more than three of the short leases, and less than one heartbeat
            go.set()
            wait_until(lambda: job(engine, job_id).status == "done", "it is done")

    assert (len(starts), job(engine, job_id).claim_no) == (1, 1)
