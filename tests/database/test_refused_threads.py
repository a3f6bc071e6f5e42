"""A system that refuses threads to the worker, as with a container's limit of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker, WorkerError
from tests.support.looking import job, status, wait_until_done
from tests.support.running import SHORT, running
from tests.support.waiting import wait_until

# No address space has room for such a stack.
ENDLESS = 1 << 47


@pytest.fixture
def refuse() -> Iterator[Callable[[], None]]:
    """Let the system refuse every thread from the call on, until the test's end or `allow()`."""

    def refuse() -> None:
        threading.stack_size(ENDLESS)

    yield refuse
    allow()


def allow() -> None:
    threading.stack_size(0)


def add(engine: Engine, jobs: Jobs, handler: str, number: int = 1) -> list[int]:
    with Session(engine) as session, session.begin():
        return [added.id for added in jobs.enqueue_many(session, handler, [{}] * number)]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_a_worker_without_a_thread_for_handlers_hands_back_and_says_why(
    engine: Engine, refuse: Callable[[], None], kind: str
) -> None:
    jobs = Jobs()

    @jobs.handler("plain")
    def plain() -> None:
        pass

    @jobs.handler("coroutine")
    async def coroutine() -> None:
        pass

    ids = add(engine, jobs, kind, 3)
    # Called between the first claim and its handlers.
    worker = Worker(engine, jobs, on_ready=refuse, **SHORT)
    with pytest.raises(WorkerError, match=r"refuses .*thread.*hands back its jobs.*ulimit -u"):
        worker.run()
    allow()

    assert [(status(engine, job_id), job(engine, job_id).attempts) for job_id in ids] == [
        ("ready", 0)
    ] * 3


def test_the_threads_that_there_are_do_the_work_until_there_are_more(
    engine: Engine, refuse: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs()
    begun, go_on = threading.Event(), threading.Event()

    @jobs.handler("first")
    def first() -> None:
        begun.set()
        go_on.wait(20)

    @jobs.handler("later")
    def later() -> None:
        pass

    both = threading.Barrier(2)

    @jobs.handler("meets")
    def meets() -> None:
        both.wait(20)

    ids = add(engine, jobs, "first")
    with running(engine, jobs, concurrency=3, listen=False):
        assert begun.wait(20)
        refuse()
        ids += add(engine, jobs, "later", 5)
        wait_until(lambda: "refuses another thread" in caplog.text, "a thread is refused")
        go_on.set()
        for job_id in ids:
            wait_until_done(engine, job_id)
        allow()
        for job_id in add(engine, jobs, "meets", 2):
            wait_until_done(engine, job_id)

    assert caplog.text.count("1 of 3 run plain handlers") == 1
    assert {job(engine, job_id).attempts for job_id in ids} == {1}
