"""Half-open connections: the network drops a flow without a word, and TCP finds nothing wrong."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import JobContext, Jobs, Worker
from sa_jobs.worker.answers import CUT_FACTOR, LONGEST_PERIOD_SECONDS, can_cancel
from sa_jobs.worker.worker import DEFAULT_ANSWER_SECONDS, DEFAULT_LEASE_SECONDS, PROBE_FACTOR
from tests.support.gates import wait_until_asleep
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.proxy import Proxy
from tests.support.running import SHORT, RunningWorker, running
from tests.support.waiting import assert_within, wait_until


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    return jobs


@pytest.fixture
def proxy(database_url: str) -> Iterator[Proxy]:
    with Proxy(database_url) as proxy:
        yield proxy


@pytest.fixture
def through(proxy: Proxy) -> Iterator[Engine]:
    """An engine whose connections go through the proxy."""
    engine = create_engine(proxy.url, poolclass=NullPool)
    yield engine
    engine.dispose()


def add(engine: Engine, jobs: Jobs, handler: str, **payload: Any) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


def test_a_silent_listener_is_replaced_within_the_bound(
    engine: Engine, proxy: Proxy, through: Engine, jobs: Jobs
) -> None:
    """Its bound: it is asked when it was quiet for 1.5 times the time for an answer."""
    with running(through, jobs, poll=60, answer=1.0):
        wait_until(lambda: proxy.count("sa-jobs listen"), "it listens")
        wait_until_asleep(engine)
        assert proxy.silence("sa-jobs listen") == 1
        job_id = add(engine, jobs, "noop")
        # 1.5 s until it is asked, 1.25 s for the answer; the rest is for the machine.
        wait_until(lambda: proxy.count("sa-jobs listen"), "it is replaced", seconds=6)
        wait_until_done(engine, job_id, seconds=3)
        wait_until_done(engine, add(engine, jobs, "noop"), seconds=3)


def test_by_default_a_silent_connection_is_found_within_thirty_seconds() -> None:
    longest = DEFAULT_ANSWER_SECONDS * (PROBE_FACTOR + CUT_FACTOR) + LONGEST_PERIOD_SECONDS
    assert longest <= 30
    assert longest <= DEFAULT_LEASE_SECONDS


@pytest.mark.parametrize("role", ["claim", "sweep", "heartbeat"])
def test_a_silent_connection_is_replaced_and_the_running_job_is_not_lost(
    engine: Engine, proxy: Proxy, through: Engine, jobs: Jobs, role: str
) -> None:
    go = threading.Event()
    told: list[bool] = []

    @jobs.handler("waits")
    def waits(ctx: JobContext) -> None:
        go.wait(20)
        told.append(ctx.cancelled)

    held = add(engine, jobs, "waits")
    name = f"sa-jobs {role}"
    with running(through, jobs, lease=6, heartbeat=1, answer=1.0):
        wait_until(lambda: status(engine, held) == "running", "it runs")
        wait_until(lambda: proxy.count(name) == 1, "the connection is there")
        proxy.silence(name)
        # At most half a second until it is used, and 1.25 s for the answer.
        wait_until(lambda: proxy.count(name) == 1, "it is replaced", seconds=10)
        before = job(engine, held).leased_until
        wait_until(lambda: job(engine, held).leased_until > before, "the lease is renewed")
        wait_until_done(engine, add(engine, jobs, "noop"))
        go.set()
        wait_until_done(engine, held)

    assert told == [False]
    assert (job(engine, held).attempts, job(engine, held).claim_no) == (1, 1)
    assert failures(engine, held) == []


def test_jobs_of_a_claim_whose_answer_never_came_are_given_back(
    engine: Engine, proxy: Proxy, through: Engine, jobs: Jobs
) -> None:
    """The claim reaches the server, and what it took is on its way when the flow is dropped."""
    with running(through, jobs, lease=30, heartbeat=10, answer=1.0) as worker:
        wait_until_asleep(engine)
        proxy.delay_seconds = 1.0
        job_id = add(engine, jobs, "noop")
        wait_until(lambda: status(engine, job_id) == "running", "the claim lands")
        assert job(engine, job_id).locked_by == worker.worker.id
        proxy.silence("sa-jobs claim")
        proxy.delay_seconds = 0.0
        wait_until_done(engine, job_id, seconds=15)

    assert (job(engine, job_id).attempts, job(engine, job_id).claim_no) == (1, 2)
    assert failures(engine, job_id) == []


def test_with_the_database_out_of_reach_the_job_is_given_up_before_its_lease_ends(
    engine: Engine, proxy: Proxy, through: Engine, jobs: Jobs
) -> None:
    told: list[Any] = []

    @jobs.handler("watches")
    def watches(ctx: JobContext) -> None:
        ctx.wait(20)
        with engine.connect() as connection:
            told.append(connection.execute(text("SELECT clock_timestamp()")).scalar_one())

    job_id = add(engine, jobs, "watches")
    with running(through, jobs, lease=3, heartbeat=1, answer=1.0, sweep=0.5):
        wait_until(lambda: status(engine, job_id) == "running", "it runs")
        first = job(engine, job_id).leased_until
        wait_until(lambda: job(engine, job_id).leased_until > first, "it is renewed")
        proxy.refuse()
        proxy.silence()
        wait_until(lambda: told, "the handler is told", seconds=10)
        assert told[0] < job(engine, job_id).leased_until
        proxy.refuse(False)
        wait_until(lambda: status(engine, job_id) == "done", "what it returned is written")

    assert job(engine, job_id).attempts == 1


@pytest.mark.parametrize("stops", [1, 2])
def test_a_stop_does_not_wait_for_a_server_that_takes_no_connection(jobs: Jobs, stops: int) -> None:
    """The connection is accepted, and then nothing comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        engine = create_engine(f"postgresql+psycopg://nobody@127.0.0.1:{port}/nothing")
        worker = RunningWorker(Worker(engine, jobs, **SHORT))
        with listener.accept()[0]:
            began = time.monotonic()
            for _ in range(stops):
                worker.worker.stop()
            worker.join()
        assert time.monotonic() - began < 3
        assert (worker.code, worker.error) == (0, None)


def test_a_second_stop_ends_a_worker_whose_connections_are_all_silent(
    engine: Engine, proxy: Proxy, through: Engine, jobs: Jobs
) -> None:
    began = threading.Event()

    @jobs.handler("stays")
    def stays(ctx: JobContext) -> None:
        began.set()
        ctx.wait(30)

    add(engine, jobs, "stays")
    worker = RunningWorker(Worker(through, jobs, **{**SHORT, "lease": 60, "heartbeat": 1}))
    assert began.wait(20)
    proxy.silence()
    proxy.refuse()
    time.sleep(1.5)  # so that the heartbeat and the sweep wait for an answer
    asked_at = time.monotonic()
    worker.worker.stop()
    worker.worker.stop()
    worker.join()

    assert_within(5, time.monotonic() - asked_at)
    assert worker.error is None


def test_a_statement_behind_a_lock_leaves_no_session_behind_when_it_is_given_up(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """Each try would else leave one more that waits for the lock, and claims once it has it."""

    def waiting() -> int:
        with engine.connect() as connection:
            return int(
                connection.execute(
                    text(
                        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                        " AND application_name = 'sa-jobs claim' AND wait_event_type = 'Lock'"
                    )
                ).scalar_one()
            )

    with running(engine, jobs, answer=0.5) as worker:
        wait_until_asleep(engine)
        with engine.connect() as holder:
            holder.execute(text("LOCK TABLE sa_jobs IN ACCESS EXCLUSIVE MODE"))
            wait_until(lambda: "no answer from the server" in caplog.text, "it is given up")
            most = 0
            end = time.monotonic() + 3
            while time.monotonic() < end:
                most = max(most, waiting())
                time.sleep(0.05)
            holder.rollback()
        wait_until_done(engine, add(engine, jobs, "noop"))
        assert worker.error is None

    if can_cancel():
        assert most == 1
    lines = [line for line in caplog.messages if line.startswith("claim: ")]
    assert [line.partition(";")[0] for line in lines[:1]] == [
        "claim: no answer from the server within 0.5 s"
    ]
