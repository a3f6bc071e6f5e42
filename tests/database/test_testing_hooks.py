"""Hooks, and a context around each job, in users' tests: as under a worker."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, func, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sa_jobs import AttemptLostError, ClaimedJob, Discard, JobContext, Jobs, Retry, Snooze, fixed
from sa_jobs.models import Job
from sa_jobs.testing import RunError, drain, rolled_back, run_job

scope = contextvars.ContextVar("scope", default="the test's")


class Told:
    """A registry whose hooks note what they are told of."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.raises: BaseException | None = None
        self.jobs = jobs = Jobs()

        @jobs.before
        def before(ctx: JobContext) -> None:
            self.told.append(("before", ctx.attempt))
            if self.raises is not None:
                raise self.raises

        @jobs.after
        def after(ctx: JobContext, end: str) -> None:
            self.told.append(("after", end))

        @jobs.on_failure
        async def on_failure(ctx: JobContext, error: BaseException) -> None:
            await asyncio.sleep(0)
            self.told.append(("on_failure", type(error)))

        @jobs.on_dead
        def on_dead(ctx: JobContext, error: BaseException) -> None:
            self.told.append(("on_dead", type(error)))

        @jobs.handler("end", max_attempts=2, backoff=fixed(60))
        def end(how: str) -> str:
            return self.end(how)

        @jobs.handler("end_in_session", max_attempts=2, backoff=fixed(60))
        def end_in_session(how: str, session: Session) -> str:
            return self.end(how)

        @jobs.handler("end_async", max_attempts=2, backoff=fixed(60))
        async def end_async(how: str) -> str:
            return self.end(how)

        @jobs.handler("end_in_async_session", max_attempts=2, backoff=fixed(60))
        async def end_in_async_session(how: str, session: AsyncSession) -> str:
            return self.end(how)

    def end(self, how: str) -> str:
        self.told.append(("handler", scope.get()))
        scope.set("the handler's")
        ends = {
            "retry": Retry(60),
            "snooze": Snooze(60),
            "discard": Discard("no"),
            "raise": ValueError("no"),
        }
        if how in ends:
            raise ends[how]
        return how


@pytest.fixture
def registry() -> Told:
    return Told()


HANDLER = ("handler", "the test's")
ENDS = [
    ("return", [HANDLER, ("after", "done")]),
    ("snooze", [HANDLER, ("after", "snoozed")]),
    ("retry", [HANDLER, ("on_failure", Retry), ("after", "failed")]),
    ("raise", [HANDLER, ("on_failure", ValueError), ("after", "failed")]),
    (
        "discard",
        [HANDLER, ("on_failure", Discard), ("after", "failed"), ("on_dead", Discard)],
    ),
]


@pytest.mark.parametrize("handler", ["end", "end_in_session", "end_async"])
@pytest.mark.parametrize(("how", "told"), ENDS)
def test_hooks_are_called_as_by_a_worker(
    session: Session, registry: Told, handler: str, how: str, told: list[Any]
) -> None:
    job = registry.jobs.enqueue(session, handler, {"how": how})
    run_job(session, registry.jobs, job, raise_errors=False)
    assert registry.told == [("before", 1), *told]
    assert scope.get() == "the test's"


@pytest.mark.parametrize("handler", ["end", "end_async", "end_in_async_session"])
@pytest.mark.parametrize(("how", "told"), ENDS)
def test_hooks_are_called_under_an_async_session_too(
    engine: Engine, registry: Told, handler: str, how: str, told: list[Any]
) -> None:
    async def test() -> None:
        async_engine = create_async_engine(engine.url, poolclass=NullPool)
        async with rolled_back(async_engine) as session:
            job = await registry.jobs.enqueue(session, handler, {"how": how})
            await run_job(session, registry.jobs, job, raise_errors=False)
        await async_engine.dispose()

    asyncio.run(test())
    assert registry.told == [("before", 1), *told]


def test_a_death_is_told_before_its_error_is_raised(session: Session, registry: Told) -> None:
    registry.jobs.enqueue(session, "end", {"how": "raise"}, max_attempts=1)
    with pytest.raises(ValueError, match="no"):
        drain(session, registry.jobs)
    assert registry.told[-1] == ("on_dead", ValueError)


def test_before_decides_whether_the_handler_is_called(session: Session, registry: Told) -> None:
    registry.raises = Snooze(60)
    ran = run_job(session, registry.jobs, registry.jobs.enqueue(session, "end", {"how": "return"}))
    assert (ran.status, ran.job.attempts) == ("ready", 0)
    assert registry.told == [("before", 1), ("after", "snoozed")]


def test_a_hook_that_fails_changes_nothing(
    session: Session, registry: Told, caplog: pytest.LogCaptureFixture
) -> None:
    registry.raises = RuntimeError("the hook is broken")
    job = registry.jobs.enqueue(session, "end_in_session", {"how": "return"})
    assert run_job(session, registry.jobs, job).status == "done"
    assert "the hook is broken" in caplog.text


def test_what_a_hook_has_not_committed_is_taken_back(session: Session) -> None:
    """Under a worker it would have to open a session of its own."""
    jobs = Jobs()
    jobs.handler("nothing")(lambda: None)

    @jobs.after
    def after(ctx: JobContext, end: str) -> None:
        jobs.enqueue(session, "nothing", {}, delay=60)

    @jobs.before
    def before(ctx: JobContext) -> None:
        jobs.enqueue(session, "nothing", {}, delay=60)
        session.commit()

    jobs.enqueue(session, "nothing")
    assert [one.status for one in drain(session, jobs, limit=1)] == ["done"]
    assert session.scalar(select(func.count()).select_from(Job)) == 2


@pytest.mark.parametrize("handler", ["end", "end_in_session", "end_async"])
def test_a_context_surrounds_hooks_and_handler(
    session: Session, registry: Told, handler: str
) -> None:
    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        token = scope.set("around's")
        registry.told.append("entered")
        yield
        registry.told.append("left")
        scope.reset(token)

    registry.jobs.enqueue(session, handler, {"how": "return"})
    drain(session, registry.jobs, around=around)
    assert registry.told == [
        "entered",
        ("before", 1),
        ("handler", "around's"),
        ("after", "done"),
        "left",
    ]


def test_a_context_that_cannot_be_entered_is_a_failed_attempt(
    session: Session, registry: Told
) -> None:
    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        raise ValueError("no context")
        yield

    registry.jobs.enqueue(session, "end", {"how": "return"})
    (ran,) = drain(session, registry.jobs, around=around, raise_errors=False)
    assert ran.status == "ready"
    assert "around(job) could not be entered" in str(ran.job.last_error)
    assert registry.told == [("on_failure", AttemptLostError)]

    drain(session, registry.jobs, around=around, raise_errors=False, advance=3600)
    assert registry.told[1:] == [("on_failure", AttemptLostError), ("on_dead", AttemptLostError)]


@pytest.mark.parametrize("where", ["before", "after", "on_failure", "on_dead", "entry", "exit"])
@pytest.mark.parametrize("ending", [KeyboardInterrupt, pytest.fail.Exception])
def test_what_ends_the_test_is_no_failure_of_a_hook(
    session: Session, where: str, ending: type[BaseException]
) -> None:
    jobs = Jobs()

    def end_at(place: str) -> None:
        if place == where:
            raise ending("the end")

    jobs.before(lambda ctx: end_at("before"))
    jobs.after(lambda ctx, end: end_at("after"))
    jobs.on_failure(lambda ctx, error: end_at("on_failure"))
    jobs.on_dead(lambda ctx, error: end_at("on_dead"))

    @contextmanager
    def around(job: ClaimedJob) -> Iterator[None]:
        end_at("entry")
        try:
            yield
        finally:
            end_at("exit")

    @jobs.handler("fail", max_attempts=1)
    def fail() -> None:
        raise ValueError("no")

    jobs.enqueue(session, fail)
    with pytest.raises(ending, match="the end"):
        drain(session, jobs, raise_errors=False, around=around)


def test_a_test_that_is_cancelled_in_a_hook_is_cancelled(engine: Engine) -> None:
    jobs = Jobs()
    jobs.handler("nothing")(lambda: None)
    waits = asyncio.Event()

    @jobs.before
    async def before(ctx: JobContext) -> None:
        waits.set()
        await asyncio.Event().wait()

    async def drain_all() -> None:
        async_engine = create_async_engine(engine.url, poolclass=NullPool)
        try:
            async with rolled_back(async_engine) as session:
                await jobs.enqueue(session, "nothing")
                await drain(session, jobs)
        finally:
            await async_engine.dispose()

    async def test() -> None:
        draining = asyncio.create_task(drain_all())
        await waits.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining

    asyncio.run(test())


def test_a_coroutine_hook_in_a_coroutine_test_needs_an_async_session(
    session: Session, registry: Told
) -> None:
    job = registry.jobs.enqueue(session, "end", {"how": "return"})

    async def test() -> None:
        with pytest.raises(RunError, match=r"the hook .*on_failure is a coroutine.* AsyncSession"):
            run_job(session, registry.jobs, job)
        with pytest.raises(RunError, match="AsyncSession"):
            drain(session, registry.jobs)

    asyncio.run(test())
    assert registry.told == []
    assert run_job(session, registry.jobs, job).attempt == 1
