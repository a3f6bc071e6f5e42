"""A request to cancel that meets the end of its job: one final state, never changed later."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import JobContext, Jobs, Retry, Worker, cancel, fixed
from sa_jobs.worker import EXIT_HANDED_BACK
from tests.support.looking import job, status, unfinished
from tests.support.running import SHORT, RunningWorker, running
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.concurrency, pytest.mark.slow]

ROUNDS = 500


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def transitions(engine: Engine) -> Engine:
    """A database that notes every change of a job's status."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE transitions (job_id bigint, was text, became text)"))
        connection.execute(
            text("""
                CREATE FUNCTION note_transition() RETURNS trigger LANGUAGE plpgsql AS $$
                BEGIN
                    INSERT INTO transitions VALUES (NEW.id, OLD.status, NEW.status);
                    RETURN NULL;
                END $$
            """)
        )
        connection.execute(
            text("""
                CREATE TRIGGER transitions AFTER UPDATE ON sa_jobs FOR EACH ROW
                WHEN (OLD.status <> NEW.status) EXECUTE FUNCTION note_transition()
            """)
        )
    return engine


def left_a_final_state(engine: Engine) -> int:
    with engine.connect() as connection:
        count: int = connection.execute(
            text("SELECT count(*) FROM transitions WHERE was IN ('done', 'dead', 'cancelled')")
        ).scalar_one()
    return count


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


@pytest.mark.parametrize("ending", ["returns", "fails", "retries", "transactional", "coroutine"])
def test_a_cancel_in_the_instant_of_the_end_gives_one_final_state(
    transitions: Engine, jobs: Jobs, ending: str
) -> None:
    engine = transitions
    ending_now: SimpleQueue[int | None] = SimpleQueue()
    answers: dict[int, str] = {}
    taken_by: dict[int, Session] = {}

    def returns(ctx: JobContext) -> str:
        ending_now.put(ctx.job.id)
        # So that the request comes before the end, after it, or in between.
        time.sleep(random.choice((0, 0.001, 0.002, 0.004, 0.008)))
        return "normal"

    def fails(ctx: JobContext) -> None:
        returns(ctx)
        raise ValueError("at the same time")

    def retries(ctx: JobContext) -> None:
        returns(ctx)
        raise Retry(0)

    def transactional(ctx: JobContext, session: Session) -> str:
        session.execute(text("SELECT 1"))
        return returns(ctx)

    async def coroutine(ctx: JobContext) -> str:
        return returns(ctx)

    handlers: dict[str, Callable[..., Any]] = {
        "returns": returns,
        "fails": fails,
        "retries": retries,
        "transactional": transactional,
        "coroutine": coroutine,
    }
    jobs.handler("ends", max_attempts=2, backoff=fixed(0))(handlers[ending])

    def cancel_them() -> None:
        with Session(engine) as session:
            while (job_id := ending_now.get()) is not None:
                # From before the outcome is written until after.
                time.sleep(random.choice((0, 0, 0.001, 0.002, 0.004)))
                # A job that is tried again is named twice; only the first to come here cancels it.
                if taken_by.setdefault(job_id, session) is session and job_id not in answers:
                    answers[job_id] = cancel(session, job_id)
                    session.commit()

    rounds = ROUNDS if ending == "returns" else ROUNDS // 5
    ids = add(engine, jobs, "ends", *[{}] * rounds)
    cancellers = [threading.Thread(target=cancel_them) for _ in range(4)]
    for canceller in cancellers:
        canceller.start()
    try:
        with running(engine, jobs, concurrency=4, lease=30.0, heartbeat=0.1) as worker:
            wait_until(lambda: not unfinished(engine), "all end", seconds=120)
            assert worker.thread.is_alive()
    finally:
        for _ in cancellers:
            ending_now.put(None)
        for canceller in cancellers:
            canceller.join()

    assert left_a_final_state(engine) == 0
    # Some requests came before the end and some after, or nothing was shown.
    assert len(set(answers.values())) > 1
    normal = "dead" if ending in ("fails", "retries") else "done"
    for job_id in ids:
        ended = job(engine, job_id)
        asked = answers[job_id]
        # "final": it had ended. "requested" and "cancelled": no further attempt begins.
        allowed = {
            "final": {normal},
            "requested": {"done"} if normal == "done" else {"cancelled"},
            "cancelled": {"cancelled"},
        }
        assert ended.status in allowed[asked], (asked, ended.status)
        assert (ended.result == "normal") is (ended.status == "done")


def test_a_job_that_is_asked_to_cancel_is_cancelled_however_it_goes_back(
    transitions: Engine, jobs: Jobs
) -> None:
    """At the end of the grace period it would be ready again otherwise."""
    go = threading.Event()

    @jobs.handler("stays")
    def stays() -> None:
        go.wait(20)

    (job_id,) = add(transitions, jobs, "stays")
    worker = RunningWorker(Worker(transitions, jobs, **{**SHORT, "grace": 0.5}))
    wait_until(lambda: status(transitions, job_id) == "running", "it runs")
    with Session(transitions) as session, session.begin():
        assert cancel(session, job_id) == "requested"
    assert worker.stop() == EXIT_HANDED_BACK
    go.set()

    assert status(transitions, job_id) == "cancelled"
    assert left_a_final_state(transitions) == 0


def test_a_coroutine_may_clean_up_for_longer_than_a_heartbeat(engine: Engine, jobs: Jobs) -> None:
    """Every heartbeat finds the request again, and must not cancel again."""
    steps: list[str] = []

    @jobs.handler("cleans_up")
    async def cleans_up() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            steps.append("told")
            await asyncio.sleep(1)
            steps.append("cleaned up")

    (job_id,) = add(engine, jobs, "cleans_up")
    with running(engine, jobs, heartbeat=0.2):
        wait_until(lambda: status(engine, job_id) == "running", "it runs")
        with Session(engine) as session, session.begin():
            cancel(session, job_id)
        wait_until(lambda: status(engine, job_id) == "cancelled", "it ends")

    assert steps == ["told", "cleaned up"]


def test_a_coroutine_cleans_up_when_the_worker_hands_it_back(engine: Engine, jobs: Jobs) -> None:
    steps: list[str] = []
    began = threading.Event()

    @jobs.handler("cleans_up")
    async def cleans_up() -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            steps.append("cleaned up")

    add(engine, jobs, "cleans_up")
    worker = RunningWorker(Worker(engine, jobs, **{**SHORT, "grace": 0.1}))
    assert began.wait(20)
    assert worker.stop() == EXIT_HANDED_BACK

    assert steps == ["cleaned up"]
