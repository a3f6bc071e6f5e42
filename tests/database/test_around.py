"""`Worker(around=)`: what an application puts around each job, and what its faults change."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from sa_jobs import Around, ClaimedJob, Discard, Jobs, Snooze, Worker, WorkerOptionError, fixed
from tests.support.looking import failures, job, status
from tests.support.running import run_all, running
from tests.support.waiting import wait_until

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def steps() -> list[str]:
    return []


def add(engine: Engine, jobs: Jobs, handler: str, count: int = 1) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, [{}] * count)
    return [entry.id for entry in added]


def recording(steps: list[str]) -> Around:
    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        steps.append("entered")
        try:
            yield
        except BaseException as error:
            steps.append(f"left by {type(error).__name__}")
            raise
        else:
            steps.append("left")

    return around


def test_a_plain_handler_runs_inside_on_the_same_thread(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    threads: list[int] = []

    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        threads.append(threading.get_ident())
        token = tenant.set(f"tenant of {job.id}")
        yield
        tenant.reset(token)
        threads.append(threading.get_ident())

    @jobs.handler("send")
    def send() -> str:
        threads.append(threading.get_ident())
        return tenant.get()

    [first, second] = add(engine, jobs, "send", 2)
    run_all(engine, jobs, concurrency=1, around=around)
    assert job(engine, first).result == f"tenant of {first}"
    assert job(engine, second).result == f"tenant of {second}"
    assert len(threads) == 6
    assert len(set(threads)) == 1


def test_coroutines_run_inside_in_their_own_tasks(engine: Engine, jobs: Jobs) -> None:
    tasks: dict[int, list[Any]] = {}
    all_inside = asyncio.Event()

    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        mine = tasks.setdefault(job.id, [])
        mine.append(asyncio.current_task())
        token = tenant.set(f"tenant of {job.id}")
        yield
        # Fails in another context than that of the entry.
        tenant.reset(token)
        mine.append(asyncio.current_task())

    @jobs.handler("send")
    async def send() -> str:
        if len(tasks) == 3:
            all_inside.set()
        await all_inside.wait()
        return tenant.get()

    ids = add(engine, jobs, "send", 3)
    run_all(engine, jobs, around=around)
    assert [job(engine, one).result for one in ids] == [f"tenant of {one}" for one in ids]
    assert len({id(mine[0]) for mine in tasks.values()}) == 3
    assert all(mine[0] is mine[1] for mine in tasks.values())


def test_it_is_left_after_the_session_was_committed_and_closed(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    class Recorded(Session):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            steps.append("session made")
            super().__init__(*arguments, **options)

        def close(self) -> None:
            steps.append("session closed")
            super().close()

    @event.listens_for(Recorded, "after_commit")
    def committed(session: Session) -> None:
        steps.append("committed")

    @jobs.handler("write")
    def write(session: Session) -> None:
        session.execute(text("SELECT 1"))
        steps.append("handler")

    [one] = add(engine, jobs, "write")
    factory = sessionmaker(engine, class_=Recorded)
    run_all(engine, jobs, around=recording(steps), session_factory=factory)
    assert status(engine, one) == "done"
    # What comes before is the worker's look at the factory as it starts.
    assert steps[steps.index("entered") :] == [
        "entered",
        "session made",
        "handler",
        "committed",
        "session closed",
        "left",
    ]


def test_it_is_left_after_an_asynchronous_session_was_closed(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    @jobs.handler("write")
    async def write(session: AsyncSession) -> None:
        def closing(*_: Any) -> None:
            steps.append("rolled back or committed")

        event.listen(session.sync_session, "after_transaction_end", closing)
        await session.execute(text("SELECT 1"))

    [one] = add(engine, jobs, "write")
    run_all(engine, jobs, around=recording(steps))
    assert status(engine, one) == "done"
    assert steps == ["entered", "rolled back or committed", "left"]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["thread", "coroutine"])
def test_it_sees_the_exception_and_cannot_make_a_success_of_it(
    engine: Engine, jobs: Jobs, steps: list[str], asynchronous: bool
) -> None:
    @contextmanager
    def swallowing(job: ClaimedJob) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            steps.append(str(error))

    if asynchronous:

        @jobs.handler("fail", max_attempts=1)
        async def fail() -> None:
            raise ValueError("of the handler")

    else:

        @jobs.handler("fail", max_attempts=1)
        def fail_plainly() -> None:
            raise ValueError("of the handler")

    [one] = add(engine, jobs, "fail")
    run_all(engine, jobs, around=swallowing)
    assert steps == ["of the handler"]
    assert status(engine, one) == "dead"
    assert job(engine, one).last_error.endswith("ValueError: of the handler")


def raising(job: ClaimedJob) -> Any:
    raise RuntimeError("no context today")


@contextmanager
def raising_on_entry(job: ClaimedJob) -> Iterator[None]:
    raise RuntimeError("no context today")
    yield


def exiting(job: ClaimedJob) -> Any:
    raise SystemExit("no context today")


@pytest.mark.parametrize("around", [raising, raising_on_entry, exiting])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["thread", "coroutine"])
def test_what_it_raises_on_entry_is_a_failed_attempt(
    engine: Engine, jobs: Jobs, around: Around, asynchronous: bool
) -> None:
    called: list[str] = []
    if asynchronous:

        @jobs.handler("send", max_attempts=2, backoff=fixed(0))
        async def send(session: AsyncSession) -> None:
            called.append("coroutine")

    else:

        @jobs.handler("send", max_attempts=2, backoff=fixed(0))
        def send_plainly(session: Session) -> None:
            called.append("plain")

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs, around=around)
    assert status(engine, one) == "dead"
    assert called == []
    first, second = failures(engine, one)
    for failure in (first, second):
        assert failure.error.splitlines()[-1] == (
            "sa_jobs.worker.surroundings.AroundError: around(job) could not be entered, so that "
            "the handler was not called: no context today"
        )


def test_an_object_that_cannot_be_entered_is_named(engine: Engine, jobs: Jobs) -> None:
    @jobs.handler("send", max_attempts=1)
    def send() -> None: ...

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs, around=lambda job: None)
    assert status(engine, one) == "dead"
    assert "it returned an object of NoneType, which is no context manager" in (
        job(engine, one).last_error
    )


@pytest.mark.parametrize(
    ("error", "end"), [(Discard("tenant is gone"), "dead"), (Snooze(3600), "ready")]
)
def test_it_may_say_on_entry_what_becomes_of_the_job(
    engine: Engine, jobs: Jobs, error: Exception, end: str
) -> None:
    @jobs.handler("send")
    def send() -> None:
        raise AssertionError("not called")

    def around(job: ClaimedJob) -> Any:
        raise error

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs, around=around)
    assert status(engine, one) == end


class RaisingOnLeaving:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, job: ClaimedJob) -> RaisingOnLeaving:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("broken teardown"), SystemExit("broken teardown")])
def test_what_it_raises_on_leaving_is_logged_and_changes_nothing(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    @jobs.handler("plain")
    def plain() -> str:
        return "kept"

    @jobs.handler("coroutine")
    async def coroutine() -> str:
        return "kept"

    @jobs.handler("transactional")
    def transactional(session: Session) -> str:
        return "kept"

    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        raise ValueError("of the handler")

    ids = {name: add(engine, jobs, name)[0] for name in jobs.names}
    with caplog.at_level(logging.ERROR, "sa_jobs.worker"):
        run_all(engine, jobs, around=RaisingOnLeaving(error))
    for name in ("plain", "coroutine", "transactional"):
        row = job(engine, ids[name])
        assert (row.status, row.result) == ("done", "kept")
    assert job(engine, ids["fails"]).last_error.endswith("ValueError: of the handler")
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "around(job) could not be left" in line]) == 4
    assert all("broken teardown" in line for line in lines)


def test_it_is_left_when_a_handler_that_timed_out_ends_at_last(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    go_on = threading.Event()

    @jobs.handler("stuck", timeout=0.2, max_attempts=1)
    def stuck() -> None:
        go_on.wait(60)

    @jobs.handler("hangs", timeout=0.2, max_attempts=1)
    async def hangs() -> None:
        await asyncio.sleep(60)

    with running(engine, jobs, around=recording(steps)):
        [one] = add(engine, jobs, "stuck")
        wait_until(lambda: status(engine, one) == "dead", "the time-out is booked", seconds=30)
        assert steps == ["entered"]
        go_on.set()
        wait_until(lambda: "left" in steps, "the handler ends", seconds=30)
        [other] = add(engine, jobs, "hangs")
        wait_until(lambda: status(engine, other) == "dead", "the time-out is booked", seconds=30)
        wait_until(lambda: len(steps) == 4, "the coroutine is left", seconds=30)
    assert steps == ["entered", "left", "entered", "left by CancelledError"]


@pytest.mark.parametrize("around", ["flask", 5])
def test_what_cannot_be_called_is_refused(engine: Engine, jobs: Jobs, around: Any) -> None:
    @jobs.handler
    def send() -> None: ...

    with pytest.raises(WorkerOptionError, match="around must be callable"):
        Worker(engine, jobs, around=around)
