"""The handler has ended, and the end cannot be written: it is written later, as what it was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sa_jobs import JobContext, Jobs, fixed
from sa_jobs.worker import EXIT_HANDED_BACK
from tests.support.faults import kill_backends
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.postgres import Cluster
from tests.support.proxy import Proxy
from tests.support.running import running
from tests.support.waiting import wait_until

DOWN_SECONDS = 5.0
INSERT = text("INSERT INTO effects VALUES (:note)")


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Engine]:
    """An engine that keeps no connection, on a database with a table for effects."""
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (note text)"))
    engine.dispose()
    fresh = create_engine(engine.url, poolclass=NullPool)
    yield fresh
    fresh.dispose()


def add(engine: Engine, jobs: Jobs, handler: str) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler).id


def notes(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT note FROM effects")).scalars())


def test_an_end_whose_connection_is_lost_is_written_on_another(fresh: Engine, jobs: Jobs) -> None:
    def lose() -> None:
        assert kill_backends(str(fresh.url), "sa-jobs claim") == 1

    @jobs.handler("returns")
    def returns() -> str:
        lose()
        return "result"

    @jobs.handler("raises", max_attempts=1)
    def raises() -> None:
        lose()
        raise ValueError("the handler's own")

    with running(fresh, jobs, lease=30, heartbeat=5, concurrency=1):
        good = add(fresh, jobs, "returns")
        wait_until_done(fresh, good)
        bad = add(fresh, jobs, "raises")
        wait_until(lambda: status(fresh, bad) == "dead", "its failure is written")

    assert (job(fresh, good).attempts, job(fresh, good).result) == (1, "result")
    assert failures(fresh, good) == []
    (failure,) = failures(fresh, bad)
    assert failure.error.endswith("ValueError: the handler's own")


def test_ends_in_an_outage_are_written_after_it(
    cluster: Cluster, fresh: Engine, jobs: Jobs
) -> None:
    """The work of a transactional handler is rolled back with its connection, and done again."""
    together = threading.Barrier(4)
    down = threading.Event()

    def await_outage() -> None:
        if not down.is_set():
            together.wait(20)
            down.wait(20)

    @jobs.handler("returns")
    def returns() -> str:
        await_outage()
        return "result"

    @jobs.handler("raises", max_attempts=1)
    def raises() -> None:
        await_outage()
        raise ValueError("the handler's own")

    @jobs.handler("writes", backoff=fixed(0.1))
    def writes(session: Session) -> None:
        session.execute(INSERT, {"note": "effect"})
        await_outage()

    good, bad, transactional = (add(fresh, jobs, name) for name in ("returns", "raises", "writes"))
    with running(fresh, jobs, lease=30, heartbeat=5):
        together.wait(20)
        cluster.stop("immediate")
        try:
            down.set()
            time.sleep(DOWN_SECONDS)
        finally:
            cluster.start()
        for job_id in (good, transactional):
            wait_until_done(fresh, job_id, seconds=15)
        wait_until(lambda: status(fresh, bad) == "dead", "its failure is written")

    assert (job(fresh, good).attempts, failures(fresh, good)) == (1, [])
    (own,) = failures(fresh, bad)
    assert own.error.endswith("ValueError: the handler's own")
    (lost,) = failures(fresh, transactional)
    assert lost.error.startswith("the handler returned, and its session's connection was lost")
    assert "Traceback" not in lost.error
    assert job(fresh, transactional).attempts == 2
    assert notes(fresh) == ["effect"]


def test_a_commit_whose_answer_is_lost_is_found_in_the_row(
    database_url: str, fresh: Engine, jobs: Jobs
) -> None:
    returned = threading.Event()

    with Proxy(database_url) as proxy:

        @jobs.handler("writes", max_attempts=1)
        def writes(session: Session) -> None:
            session.execute(INSERT, {"note": "effect"})
            proxy.delay_seconds = 1.5
            returned.set()

        host = create_engine(proxy.url, poolclass=NullPool)
        job_id = add(fresh, jobs, "writes")
        with running(fresh, jobs, lease=30, heartbeat=5, session_factory=sessionmaker(host)):
            assert returned.wait(20)
            # The server has committed, and its answer is held back.
            wait_until_done(fresh, job_id)
            assert proxy.cut() == 1
            proxy.delay_seconds = 0.0

    done = job(fresh, job_id)
    assert (done.status, done.attempts, done.last_error) == ("done", 1, None)
    assert failures(fresh, job_id) == []
    assert notes(fresh) == ["effect"]


def test_what_still_runs_is_handed_back_though_the_connection_was_lost_meanwhile(
    fresh: Engine, jobs: Jobs
) -> None:
    """While all slots are busy nothing needs the connection, and nobody notices."""
    started = threading.Event()

    @jobs.handler("waits")
    def waits(ctx: JobContext) -> None:
        started.set()
        ctx.wait(30)

    for stops in (1, 2):
        started.clear()
        job_id = add(fresh, jobs, "waits")
        with running(fresh, jobs, lease=30, concurrency=1, grace=1) as worker:
            assert started.wait(10)
            assert kill_backends(str(fresh.url), "sa-jobs claim") == 1
            for _ in range(stops):
                worker.worker.stop()
            worker.join()
        assert worker.code == EXIT_HANDED_BACK
        assert (job(fresh, job_id).status, job(fresh, job_id).attempts) == ("ready", 0)
        with fresh.begin() as connection:
            connection.execute(text("DELETE FROM sa_jobs"))


def test_an_end_that_waits_for_its_answer_does_not_lose_its_lease(
    engine: Engine, database_url: str, jobs: Jobs
) -> None:
    """The answer may take longer than the lease lasts, and the job would run again elsewhere."""
    started = threading.Event()
    go_on = threading.Event()

    @jobs.handler("returns")
    def returns() -> None:
        started.set()
        go_on.wait(20)

    with Proxy(database_url) as proxy:
        through = create_engine(proxy.url, poolclass=NullPool)
        with running(through, jobs, lease=3, answer=4, concurrency=1):
            job_id = add(engine, jobs, "returns")
            assert started.wait(10)
            with running(engine, jobs):
                assert proxy.silence("sa-jobs claim") == 1
                go_on.set()
                wait_until_done(engine, job_id)
        through.dispose()
    assert job(engine, job_id).attempts == 1
    assert failures(engine, job_id) == []


def test_progress_whose_heartbeat_fails_comes_with_the_next(fresh: Engine, jobs: Jobs) -> None:
    reported = threading.Event()
    go_on = threading.Event()

    @jobs.handler("reports")
    def reports(ctx: JobContext) -> None:
        # The heartbeat finds its connection lost when it takes the progress along.
        ctx.progress({"page": 3})
        assert kill_backends(str(fresh.url), "sa-jobs heartbeat") == 1
        reported.set()
        go_on.wait(20)

    with running(fresh, jobs):
        job_id = add(fresh, jobs, "reports")
        assert reported.wait(10)
        wait_until(lambda: job(fresh, job_id).meta.get("progress") == {"page": 3}, "it is stored")
        go_on.set()
        wait_until_done(fresh, job_id)
