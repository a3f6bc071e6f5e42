"""The worker among others that misbehave: locks, handlers that will not stop, lost answers."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, func, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from sa_jobs import JobContext, Jobs, Worker, WorkerError, cancel, claims, fixed
from sa_jobs.worker import EXIT_HANDED_BACK
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.proxy import Proxy
from tests.support.running import SHORT, RunningWorker, constraint, run_all, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


@contextmanager
def locked(engine: Engine, statement: str) -> Iterator[None]:
    """Hold the locks of a statement for the block."""
    with engine.connect() as connection:
        connection.execute(text(statement))
        yield
        connection.rollback()


# --- locks --------------------------------------------------------------------------------------


def test_a_row_that_a_host_has_locked_holds_up_no_other_job(engine: Engine, jobs: Jobs) -> None:
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    jobs.handler("noop")(lambda: None)
    (held,) = add(engine, jobs, "waits")
    with running(engine, jobs, lease=30, heartbeat=1):
        wait_until(lambda: status(engine, held) == "running", "it runs")
        with Session(engine) as session:
            assert cancel(session, held) == "requested"
            go.set()
            others = add(engine, jobs, "noop", *[{}] * 10)
            for other in others:
                wait_until_done(engine, other, seconds=10)
            assert status(engine, held) == "running"
            session.commit()
        wait_until_done(engine, held)

    assert job(engine, held).attempts == 1


def test_a_stop_ends_while_a_row_is_locked(engine: Engine, jobs: Jobs) -> None:
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    (held,) = add(engine, jobs, "waits")
    worker = RunningWorker(Worker(engine, jobs, **{**SHORT, "grace": 1.0}))
    wait_until(lambda: status(engine, held) == "running", "it runs")
    with locked(engine, "SELECT id FROM sa_jobs FOR UPDATE"):
        go.set()
        began = time.monotonic()
        worker.stop()
        assert time.monotonic() - began < 8

    assert worker.error is None


def test_a_second_stop_ends_a_worker_that_waits_behind_a_table_lock(
    engine: Engine, jobs: Jobs
) -> None:
    jobs.handler("noop")(lambda: None)
    worker = RunningWorker(Worker(engine, jobs, **SHORT))
    wait_until(lambda: role_is_there(engine, "claim"), "the worker works")
    with locked(engine, "LOCK TABLE sa_jobs IN ACCESS EXCLUSIVE MODE"):
        wait_until(lambda: role_is_there(engine, "claim", waiting=True), "its claim waits")
        began = time.monotonic()
        worker.worker.stop()
        worker.worker.stop()
        worker.join()
        assert time.monotonic() - began < 10


def test_the_grace_period_counts_from_the_stop(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Not from when the loop sees it, which may wait for the database."""
    caplog.set_level(logging.INFO)

    @jobs.handler("waits")
    def waits(ctx: JobContext) -> None:
        ctx.wait(30)

    (job_id,) = add(engine, jobs, "waits")
    with running(engine, jobs, concurrency=2, grace=60, lease=30, heartbeat=10) as stopped:
        wait_until(lambda: status(engine, job_id) == "running", "it runs")
        with locked(engine, "LOCK TABLE sa_jobs IN ACCESS EXCLUSIVE MODE"):
            wait_until(lambda: role_is_there(engine, "claim", waiting=True), "its claim waits")
            stopped.worker.stop()
            time.sleep(2)
        wait_until(lambda: "stopping: " in caplog.text, "it sees the stop")
        stopped.worker.stop()
    left = re.search(r"stopping: 1 jobs still run, for up to (\S+) s", caplog.text)
    assert left is not None
    assert float(left[1]) <= 58


def role_is_there(engine: Engine, role: str, *, waiting: bool = False) -> bool:
    with engine.connect() as connection:
        return bool(
            connection.execute(
                text(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND application_name = :name AND (NOT :waiting OR wait_event_type = 'Lock')"
                ),
                {"name": f"sa-jobs {role}", "waiting": waiting},
            ).scalar()
        )


def test_a_handler_that_locked_its_own_row_and_timed_out_is_booked_as_it_ended(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Its commit, which holds the row, comes first; the log must not say the opposite."""

    @jobs.handler("locks", timeout=0.3, max_attempts=1)
    def locks(session: Session, ctx: JobContext) -> str:
        session.execute(
            text("SELECT id FROM sa_jobs WHERE id = :id FOR UPDATE"), {"id": ctx.job.id}
        )
        time.sleep(1.5)
        return "done in the end"

    jobs.handler("noop")(lambda: None)
    (slow,) = add(engine, jobs, "locks")
    with running(engine, jobs, concurrency=2), caplog.at_level(logging.INFO):
        wait_until(lambda: status(engine, slow) == "running", "it runs")
        time.sleep(0.5)  # past the time-out
        (other,) = add(engine, jobs, "noop")
        wait_until_done(engine, other, seconds=5)
        assert status(engine, slow) == "running"
        wait_until_done(engine, slow)

    assert job(engine, slow).result == "done in the end"
    assert not [line for line in caplog.messages if f"job {slow} " in line and "dead" in line]


# --- handlers that will not stop ----------------------------------------------------------------


def test_a_coroutine_that_swallows_its_cancellation_keeps_no_slot(
    engine: Engine, jobs: Jobs
) -> None:
    go = threading.Event()

    @jobs.handler("swallows", timeout=0.3, max_attempts=1)
    async def swallows() -> None:
        while not go.is_set():
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    @jobs.handler("good")
    async def good() -> None: ...

    (bad,) = add(engine, jobs, "swallows")
    with running(engine, jobs, concurrency=1):
        wait_until(lambda: status(engine, bad) == "dead", "its time runs out")
        (after,) = add(engine, jobs, "good")
        wait_until_done(engine, after, seconds=10)
        go.set()


def test_an_event_loop_that_a_handler_blocks_ends_the_worker(engine: Engine, jobs: Jobs) -> None:
    go = threading.Event()

    @jobs.handler("blocks")
    async def blocks() -> None:
        go.wait(30)

    @jobs.handler("good")
    async def good() -> None: ...

    (bad,) = add(engine, jobs, "blocks")
    worker = RunningWorker(Worker(engine, jobs, **{**SHORT, "grace": 0.5}))
    wait_until(lambda: status(engine, bad) == "running", "it runs")
    time.sleep(0.3)  # so that the loop is blocked
    (waiting,) = add(engine, jobs, "good")
    worker.thread.join(20)
    go.set()
    worker.join()

    assert isinstance(worker.error, WorkerError)
    assert "the event loop has not answered" in str(worker.error)
    assert [job(engine, job_id).attempts for job_id in (bad, waiting)] == [0, 0]
    assert [status(engine, job_id) for job_id in (bad, waiting)] == ["ready", "ready"]


def test_a_coroutine_that_is_cancelled_before_its_first_step_ends(
    engine: Engine, jobs: Jobs
) -> None:
    go = threading.Event()
    ran: list[int] = []

    @jobs.handler("blocks")
    async def blocks() -> None:
        go.wait(30)

    @jobs.handler("never")
    async def never() -> None:
        ran.append(1)

    (busy,) = add(engine, jobs, "blocks")
    with running(engine, jobs, lease=30, heartbeat=0.5):
        wait_until(lambda: status(engine, busy) == "running", "the loop is busy")
        time.sleep(0.3)
        (job_id,) = add(engine, jobs, "never")
        wait_until(lambda: status(engine, job_id) == "running", "it is claimed")
        with Session(engine) as session, session.begin():
            assert cancel(session, job_id) == "requested"
        time.sleep(1.2)  # two heartbeats
        go.set()
        wait_until(lambda: status(engine, job_id) == "cancelled", "it ends")

    assert ran == []


def test_a_buffered_job_is_not_stranded_by_a_time_out(engine: Engine, jobs: Jobs) -> None:
    go = threading.Event()

    @jobs.handler("stuck", timeout=0.5, max_attempts=1, priority=1)
    def stuck() -> None:
        go.wait(20)

    jobs.handler("noop")(lambda: None)
    (bad,) = add(engine, jobs, "stuck")
    (good,) = add(engine, jobs, "noop")
    with running(engine, jobs, concurrency=1, buffer=1):
        wait_until(lambda: status(engine, bad) == "dead", "its time runs out")
        wait_until_done(engine, good, seconds=5)
        go.set()


@pytest.mark.parametrize("kind", ["thread", "swallowing coroutine", "blocked loop"])
def test_a_second_stop_waits_for_no_handler(engine: Engine, jobs: Jobs, kind: str) -> None:
    go = threading.Event()
    began = threading.Event()
    if kind == "thread":

        @jobs.handler("stays")
        def stays() -> None:
            began.set()
            go.wait(30)
    elif kind == "blocked loop":

        @jobs.handler("stays")
        async def stays_blocked() -> None:
            began.set()
            go.wait(30)
    else:

        @jobs.handler("stays")
        async def stays_swallowing() -> None:
            began.set()
            while not go.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.05)

    (job_id,) = add(engine, jobs, "stays")
    worker = RunningWorker(Worker(engine, jobs, **{**SHORT, "lease": 30.0, "grace": 30.0}))
    assert began.wait(20)
    asked_at = time.monotonic()
    worker.worker.stop()
    worker.worker.stop()
    worker.join()
    took = time.monotonic() - asked_at
    go.set()

    assert took < 5
    assert worker.code == EXIT_HANDED_BACK
    assert (status(engine, job_id), job(engine, job_id).attempts) == ("ready", 0)


# --- leases -------------------------------------------------------------------------------------


def test_a_handler_is_told_to_stop_when_its_lease_cannot_be_renewed(
    engine: Engine, jobs: Jobs
) -> None:
    told: list[float] = []

    @jobs.handler("watches")
    def watches(ctx: JobContext) -> None:
        began = time.monotonic()
        if ctx.wait(20):
            told.append(time.monotonic() - began)

    (job_id,) = add(engine, jobs, "watches")
    with running(engine, jobs, lease=2.0, heartbeat=0.5):
        wait_until(lambda: status(engine, job_id) == "running", "it runs")
        with locked(engine, "SELECT id FROM sa_jobs FOR UPDATE"):
            wait_until(lambda: told, "the handler is told", seconds=10)

    assert told[0] < 5


def test_a_claim_whose_answer_was_lost_is_given_back_at_no_cost(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """The row as the lost claim has left it, with an only attempt that must not be burnt."""
    jobs.handler("once", max_attempts=1)(lambda: None)
    with running(engine, jobs, lease=30, heartbeat=5) as worker:
        wait_until(lambda: role_is_there(engine, "claim"), "the worker works")
        with engine.begin() as connection:
            job_id = connection.execute(
                text(
                    "INSERT INTO sa_jobs (queue, handler, status, attempts, max_attempts, claim_no,"
                    " locked_by, claimed_at, leased_until) VALUES ('default', 'once', 'running', 1,"
                    " 1, 1, :worker, now(), now() + interval '30 s') RETURNING id"
                ),
                {"worker": worker.worker.id},
            ).scalar_one()
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                    " current_database() AND application_name = 'sa-jobs claim'"
                )
            )
        wait_until_done(engine, job_id, seconds=10)

    assert (job(engine, job_id).attempts, job(engine, job_id).claim_no) == (1, 2)
    assert failures(engine, job_id) == []


def test_a_job_that_comes_back_to_its_worker_is_lost_to_its_earlier_claim(
    engine: Engine, jobs: Jobs
) -> None:
    """At once: what both claims have to say must never be written together."""
    contexts: list[JobContext] = []
    go = threading.Event()

    @jobs.handler("waits", max_attempts=2)
    def waits(ctx: JobContext) -> str:
        contexts.append(ctx)
        if ctx.attempt == 1:
            ctx.wait(20)
            raise ValueError("of the first claim")
        go.wait(20)
        return "of the second claim"

    (job_id,) = add(engine, jobs, "waits")
    with running(engine, jobs, concurrency=2, lease=30, heartbeat=10):
        wait_until(lambda: contexts, "it runs")
        with engine.begin() as connection:
            # As another worker's sweep does it after an outage.
            connection.execute(text("UPDATE sa_jobs SET leased_until = now() - interval '1 s'"))
            assert [taken.id for taken in claims.reclaim(connection)] == [job_id]
        wait_until(lambda: len(contexts) == 2, "it runs again", seconds=8)
        assert contexts[0].cancelled
        assert not contexts[1].cancelled
        go.set()
        wait_until_done(engine, job_id)

    assert job(engine, job_id).result == "of the second claim"
    assert [failure.error for failure in failures(engine, job_id)] == ["lease expired"]


def test_a_transactional_job_ends_when_its_work_ends(engine: Engine, jobs: Jobs) -> None:
    """Not when the handler's transaction began, which now() would say."""

    @jobs.handler("works")
    def works(session: Session) -> None:
        session.execute(text("SELECT 1"))
        time.sleep(0.6)

    (job_id,) = add(engine, jobs, "works")
    run_all(engine, jobs)

    done = job(engine, job_id)
    assert (done.finished_at - done.claimed_at).total_seconds() >= 0.6


# --- sessions and pools -------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE", "AUTOCOMMIT"])
def test_handler_sessions_at_another_isolation_level_are_refused_at_the_start(
    engine: Engine, jobs: Jobs, level: str
) -> None:
    jobs.handler("works")(works_in_session)
    other = create_engine(engine.url, isolation_level=level)
    add(engine, jobs, "works")
    try:
        with pytest.raises(WorkerError, match=f"are at {level}, and must be READ COMMITTED"):
            Worker(engine, jobs, session_factory=sessionmaker(other)).run_until_empty()
    finally:
        other.dispose()


def works_in_session(session: Session) -> None:
    session.execute(text("SELECT 1"))


async def works_in_async_session(session: AsyncSession) -> None:
    await session.execute(text("SELECT 1"))


@pytest.mark.parametrize("function", [works_in_session, works_in_async_session])
def test_a_database_that_is_away_while_a_worker_starts_is_waited_for(
    engine: Engine, jobs: Jobs, function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the worker's own connection has come through, and the handlers' does not."""
    jobs.handler("works")(function)
    (job_id,) = add(engine, jobs, "works")
    with Proxy(engine.url.render_as_string(hide_password=False)) as proxy:
        proxy.refuse()
        host = create_engine(proxy.url, poolclass=NullPool)
        with running(host, jobs, control_engine=engine):
            wait_until(lambda: "trying again" in caplog.text, "it finds nobody")
            proxy.refuse(False)
            wait_until_done(engine, job_id)
        proxy.refuse()
        with running(host, jobs, control_engine=engine) as stopped:
            assert stopped.stop() == 0


def test_async_sessions_are_as_many_as_slots(engine: Engine, jobs: Jobs) -> None:
    holding: list[int] = []

    @jobs.handler("holds", max_attempts=1, timeout=20)
    async def holds(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        holding.append(1)
        while len(holding) < 20:  # noqa: ASYNC110 - the shortest rendezvous
            await asyncio.sleep(0.01)

    ids = add(engine, jobs, "holds", *[{}] * 20)
    run_all(engine, jobs, concurrency=20, lease=30, heartbeat=5)

    assert [status(engine, job_id) for job_id in ids] == ["done"] * 20


@pytest.mark.parametrize("given", [False, True], ids=["own-sessions", "given-factory"])
def test_a_pool_that_is_too_small_is_said_once_at_the_start(
    given: bool, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.handler("works")(works_in_session)
    small = create_engine(engine.url, pool_size=2, max_overflow=1)
    factory = sessionmaker(small) if given else None
    worker_engine = engine if given else small
    Worker(worker_engine, jobs, concurrency=4, session_factory=factory).run_until_empty()
    small.dispose()

    assert caplog.text.count("gives 3 connections to 4 handlers") == 1
    assert "give it pool_size=4" in caplog.text


@pytest.mark.slow
def test_a_pool_smaller_than_the_concurrency_loses_no_lease_and_no_finish(
    engine: Engine, jobs: Jobs
) -> None:
    small = create_engine(engine.url, pool_size=2, max_overflow=0)
    counts = []

    @jobs.handler("holds")
    def holds(session: Session) -> None:
        session.execute(select(func.pg_sleep(1.5)))
        connections = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        )
        counts.append(session.execute(connections).scalar_one())

    ids = add(engine, jobs, "holds", *[{}] * 8)
    # The last two wait for a connection for longer than a lease holds without a heartbeat.
    run_all(small, jobs, concurrency=8, lease=3, heartbeat=0.5)
    small.dispose()

    rows = [job(engine, job_id) for job_id in ids]
    assert [(row.status, row.attempts, row.claim_no) for row in rows] == [("done", 1, 1)] * 8
    # The pool's, the worker's own four, and the one that added the jobs.
    assert max(counts) <= 2 + 4 + 1


# --- what is logged -----------------------------------------------------------------------------


def test_a_lost_listener_is_one_line_without_a_traceback(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.handler("noop")(lambda: None)
    with running(engine, jobs):
        for _ in range(3):
            wait_until(lambda: role_is_there(engine, "listen"), "it listens")
            with engine.connect() as connection:
                connection.execute(
                    text(
                        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname ="
                        " current_database() AND application_name = 'sa-jobs listen'"
                    )
                )
            wait_until(lambda: not role_is_there(engine, "listen"), "it is gone")

    lines = [record for record in caplog.records if record.message.startswith("listen: ")]
    assert len([line for line in lines if line.levelno >= logging.WARNING]) == 1
    assert "Traceback" not in caplog.text


def test_the_listener_works_with_many_open_files(engine: Engine, jobs: Jobs) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip("this system does not allow so many open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        jobs.handler("noop")(lambda: None)
        with running(engine, jobs, poll=60):
            wait_until(lambda: role_is_there(engine, "listen"), "it listens")
            (job_id,) = add(engine, jobs, "noop")
            wait_until_done(engine, job_id, seconds=10)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_error_of_the_database_does_not_bring_the_payload_into_the_log(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    jobs.handler("noop")(lambda secret: None)
    add(engine, jobs, "noop", {"secret": "hunter2-XYZ"})
    with constraint(engine, "status <> 'running' OR payload ? 'x'"), running(engine, jobs):
        wait_until(lambda: "unexpected error" in caplog.text, "the claim fails")

    assert "hunter2-XYZ" not in caplog.text


def test_the_line_about_a_failure_says_what_the_database_said(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @jobs.handler("fails", max_attempts=1, backoff=fixed(0))
    def fails(session: Session) -> None:
        session.execute(text("SELECT no_such_column"))

    add(engine, jobs, "fails")
    run_all(engine, jobs)

    (line,) = [line for line in caplog.messages if " dead: " in line]
    assert "no_such_column" in line
    assert "Background" not in line
