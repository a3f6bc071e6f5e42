"""Hooks: what is called, where and when, and that nothing they do changes what becomes of a job."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sa_jobs import (
    AttemptLostError,
    AttemptTimeoutError,
    ClaimedJob,
    Discard,
    JobContext,
    Jobs,
    Retry,
    Snooze,
    claims,
    fixed,
)
from sa_jobs.hooks import AttemptEnd
from tests.support.looking import failures, job, status
from tests.support.running import run_all, running
from tests.support.waiting import wait_until

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="none")


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


def record_all(jobs: Jobs, steps: list[str]) -> None:
    """Register a hook of each kind that a worker calls."""

    @jobs.before
    def before(ctx: JobContext) -> None:
        steps.append("before")

    @jobs.after
    def after(ctx: JobContext, end: AttemptEnd) -> None:
        steps.append(f"after: {end}")

    @jobs.on_failure
    def on_failure(ctx: JobContext, error: BaseException) -> None:
        steps.append(f"on_failure: {type(error).__name__}")

    @jobs.on_dead
    def on_dead(ctx: JobContext, error: BaseException) -> None:
        steps.append(f"on_dead: {type(error).__name__}")


# --- what is called -------------------------------------------------------------------------------


def test_hooks_of_a_plain_handler_run_on_its_thread_in_its_context(
    engine: Engine, jobs: Jobs
) -> None:
    threads: list[int] = []
    ends: list[tuple[int, str, str]] = []

    @jobs.before
    def before(ctx: JobContext) -> None:
        threads.append(threading.get_ident())
        request_id.set(f"request of {ctx.job.id}")

    @jobs.after
    def after(ctx: JobContext, end: AttemptEnd) -> None:
        threads.append(threading.get_ident())
        ends.append((ctx.job.id, end, request_id.get()))

    @jobs.handler("send")
    def send() -> str:
        threads.append(threading.get_ident())
        return request_id.get()

    first, second = add(engine, jobs, "send", 2)
    run_all(engine, jobs, concurrency=1)
    assert ends == [(one, "done", f"request of {one}") for one in (first, second)]
    assert job(engine, second).result == f"request of {second}"
    assert len(threads) == 6
    assert len(set(threads)) == 1


def test_hooks_of_a_coroutine_handler_run_in_its_task(engine: Engine, jobs: Jobs) -> None:
    tasks: list[Any] = []

    @jobs.before
    async def before(ctx: JobContext) -> None:
        await asyncio.sleep(0)
        tasks.append(asyncio.current_task())
        request_id.set(f"request of {ctx.job.id}")

    @jobs.before
    def plain(ctx: JobContext) -> None:
        tasks.append(asyncio.current_task())

    @jobs.after
    async def after(ctx: JobContext, end: AttemptEnd) -> None:
        await asyncio.sleep(0)
        tasks.append(asyncio.current_task())

    @jobs.handler("send")
    async def send() -> str:
        tasks.append(asyncio.current_task())
        return request_id.get()

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs)
    assert job(engine, one).result == f"request of {one}"
    assert len(tasks) == 4
    assert len({id(task) for task in tasks}) == 1


def test_a_coroutine_hook_of_a_plain_handler_is_awaited_on_the_event_loop_in_its_context(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    @contextmanager
    def around(claimed: ClaimedJob) -> Iterator[None]:
        request_id.set(f"request of {claimed.id}")
        yield

    @jobs.before
    async def before(ctx: JobContext) -> None:
        await asyncio.sleep(0.01)
        steps.append(f"{threading.current_thread().name}: {request_id.get()}")

    @jobs.handler("send")
    def send() -> None:
        steps.append("handler")

    ids = add(engine, jobs, "send", 4)
    run_all(engine, jobs, around=around, concurrency=1)
    expected = [[f"sa-jobs-event-loop: request of {one}", "handler"] for one in ids]
    assert steps == [step for pair in expected for step in pair]


def test_many_threads_share_one_loop_for_coroutine_hooks(engine: Engine, jobs: Jobs) -> None:
    loops: set[int] = set()

    @jobs.before
    async def before(ctx: JobContext) -> None:
        await asyncio.sleep(0.01)
        loops.add(id(asyncio.get_running_loop()))

    @jobs.handler("send")
    def send() -> None: ...

    ids = add(engine, jobs, "send", 40)
    run_all(engine, jobs, concurrency=8)
    assert {status(engine, one) for one in ids} == {"done"}
    assert len(loops) == 1


def test_before_comes_in_the_order_of_registration_and_after_in_the_reverse(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    def register(name: str) -> None:
        @jobs.before
        def before(ctx: JobContext) -> None:
            steps.append(f"before {name}")

        @jobs.after
        def after(ctx: JobContext, end: AttemptEnd) -> None:
            steps.append(f"after {name}")

    register("one")
    register("two")

    @jobs.handler("send")
    def send() -> None: ...

    add(engine, jobs, "send")
    run_all(engine, jobs)
    assert steps == ["before one", "before two", "after two", "after one"]


class Odd(Exception):
    pass


class Exits(SystemExit):
    pass


@pytest.mark.parametrize(
    ("error", "called"),
    [
        (None, ["before", "after: done"]),
        (Odd("once"), ["before", "on_failure: Odd", "after: failed", "on_dead: Odd"]),
        (Exits(3), ["before", "on_failure: Exits", "after: failed", "on_dead: Exits"]),
        (Retry(0), ["before", "on_failure: Retry", "after: failed", "on_dead: Retry"]),
        (Discard(), ["before", "on_failure: Discard", "after: failed", "on_dead: Discard"]),
        (Snooze(3600), ["before", "after: snoozed"]),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("kind", ["plain", "coroutine", "transactional", "async transactional"])
def test_each_end_has_its_hooks(
    engine: Engine,
    jobs: Jobs,
    steps: list[str],
    kind: str,
    error: BaseException | None,
    called: list[str],
) -> None:
    record_all(jobs, steps)

    def end() -> None:
        if error is not None:
            raise error

    @jobs.handler("plain", max_attempts=1)
    def plain() -> None:
        end()

    @jobs.handler("coroutine", max_attempts=1)
    async def coroutine() -> None:
        end()

    @jobs.handler("transactional", max_attempts=1)
    def transactional(session: Session) -> None:
        end()

    @jobs.handler("async transactional", max_attempts=1)
    async def async_transactional(session: AsyncSession) -> None:
        end()

    add(engine, jobs, kind)
    run_all(engine, jobs)
    assert steps == called


def test_on_failure_gets_the_traceback_with_its_locals(engine: Engine, jobs: Jobs) -> None:
    seen: list[Any] = []

    @jobs.on_failure
    def on_failure(ctx: JobContext, error: BaseException) -> None:
        trace = error.__traceback__
        assert trace is not None
        seen.extend((trace.tb_frame.f_code.co_name, trace.tb_frame.f_locals["invoice"]))

    @jobs.handler("send", max_attempts=1)
    def send() -> None:
        invoice = 1842
        raise ValueError(invoice)

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs)
    assert seen == ["send", 1842]
    assert job(engine, one).last_error.startswith(
        'Traceback (most recent call last):\n  File "' + __file__
    )


def test_a_failed_attempt_that_is_not_the_last_one_is_no_death(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    record_all(jobs, steps)

    @jobs.handler("send", max_attempts=2, backoff=fixed(0))
    def send(ctx: JobContext) -> None:
        raise Odd(ctx.attempt)

    add(engine, jobs, "send")
    run_all(engine, jobs)
    assert steps == [
        "before",
        "on_failure: Odd",
        "after: failed",
        "before",
        "on_failure: Odd",
        "after: failed",
        "on_dead: Odd",
    ]


def test_on_dead_comes_when_the_death_is_committed(engine: Engine, jobs: Jobs) -> None:
    seen: list[tuple[str, int, str]] = []

    @jobs.on_dead
    async def on_dead(ctx: JobContext, error: BaseException) -> None:
        seen.append((status(engine, ctx.job.id), ctx.job.id, str(error)))

    @jobs.handler("send", max_attempts=1)
    def send() -> None:
        raise Odd("for good")

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs)
    assert seen == [("dead", one, "for good")]


def test_hooks_run_inside_of_around(engine: Engine, jobs: Jobs, steps: list[str]) -> None:
    record_all(jobs, steps)

    @contextmanager
    def around(claimed: ClaimedJob) -> Iterator[None]:
        steps.append("entered")
        try:
            yield
        finally:
            steps.append("left")

    @jobs.handler("send", max_attempts=1)
    def send(session: Session) -> None:
        raise Odd

    add(engine, jobs, "send")
    run_all(engine, jobs, around=around)
    assert steps == [
        *("entered", "before", "on_failure: Odd", "after: failed", "left"),
        *("entered", "on_dead: Odd", "left"),
    ]


def test_what_cannot_be_entered_hides_no_failure(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    record_all(jobs, steps)

    def around(claimed: ClaimedJob) -> Any:
        raise Odd("no context today")

    @jobs.handler("send", max_attempts=1)
    def send() -> None: ...

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs, around=around)
    assert status(engine, one) == "dead"
    assert steps == ["on_failure: AttemptLostError", "on_dead: AttemptLostError"]


# --- sessions -------------------------------------------------------------------------------------


def test_hooks_share_no_session_with_the_handler(engine: Engine, jobs: Jobs) -> None:
    registry = scoped_session(sessionmaker(engine))
    seen: list[Any] = []

    def use(session: Session) -> None:
        session.execute(text("SELECT 1"))
        seen.append(session)

    @jobs.before
    def before(ctx: JobContext) -> None:
        use(registry())
        # Not the handler's: nothing refuses to commit it.
        registry.commit()

    @jobs.after
    def after(ctx: JobContext, end: AttemptEnd) -> None:
        use(registry())
        registry.commit()
        seen.append(status(engine, ctx.job.id))

    @jobs.handler("write")
    def write(session: Session) -> None:
        use(session)

    [one, two] = add(engine, jobs, "write", 2)
    run_all(engine, jobs, concurrency=1, session_factory=registry)
    assert [status(engine, one), status(engine, two)] == ["done", "done"]
    before_first, first, _, seen_status, before_second, second, *_ = seen
    assert seen_status == "done", "the handler's transaction is over"
    assert len({id(one) for one in (before_first, first, before_second, second)}) == 4


# --- hooks that fail ------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["plain hooks", "coroutine hooks"])
@pytest.mark.parametrize("error", [Odd("of a hook"), SystemExit(9), asyncio.CancelledError()])
def test_a_hook_that_raises_is_logged_once_and_changes_nothing(
    engine: Engine,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    asynchronous: bool,
) -> None:
    if asynchronous:

        async def raise_for(ctx: JobContext, *_: Any) -> None:
            await asyncio.sleep(0)
            raise error

    else:

        def raise_for(ctx: JobContext, *_: Any) -> Any:  # type: ignore[misc]
            raise error

    for register in (jobs.before, jobs.after, jobs.on_failure, jobs.on_dead):
        register(raise_for)

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

    ids = {name: add(engine, jobs, name, 2) for name in jobs.names}
    with caplog.at_level(logging.ERROR, "sa_jobs.hooks"):
        run_all(engine, jobs)
    for name in ("plain", "coroutine", "transactional"):
        rows = [job(engine, one) for one in ids[name]]
        assert [(row.status, row.result) for row in rows] == [("done", "kept")] * 2
    for one in ids["fails"]:
        assert job(engine, one).last_error.endswith("ValueError: of the handler")
    records = [record for record in caplog.records if record.name == "sa_jobs.hooks"]
    # On a thread the loop's answer is of another class for its cancellation.
    assert len(records) == (2 if asynchronous and type(error) is asyncio.CancelledError else 1)
    assert all("raise_for failed" in record.getMessage() for record in records)


@pytest.mark.parametrize(
    ("error", "end"), [(Discard("tenant is gone"), "dead"), (Snooze(3600), "ready")]
)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["thread", "coroutine"])
def test_before_may_say_on_purpose_what_becomes_of_the_job(
    engine: Engine, jobs: Jobs, error: Exception, end: str, asynchronous: bool
) -> None:
    called: list[str] = []

    @jobs.before
    def before(ctx: JobContext) -> None:
        raise error

    if asynchronous:

        @jobs.handler("send")
        async def send() -> None:
            called.append("coroutine")

    else:

        @jobs.handler("send")
        def send_plainly() -> None:
            called.append("plain")

    [one] = add(engine, jobs, "send")
    run_all(engine, jobs)
    assert status(engine, one) == end
    assert called == []


# --- hooks that hang ------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True], ids=["thread", "coroutine"])
def test_a_hook_that_hangs_counts_in_the_time_out(
    engine: Engine, jobs: Jobs, steps: list[str], asynchronous: bool
) -> None:
    go_on = threading.Event()

    if asynchronous:

        @jobs.before
        async def hang_in_task(ctx: JobContext) -> None:
            await asyncio.sleep(60)

        @jobs.handler("send", timeout=0.3, max_attempts=1)
        async def send() -> None:
            steps.append("handler")

    else:

        @jobs.before
        def hang(ctx: JobContext) -> None:
            go_on.wait(60)

        @jobs.handler("send", timeout=0.3, max_attempts=1)
        def send_plainly() -> None: ...

    told: list[BaseException] = []

    @jobs.on_failure
    def on_failure(ctx: JobContext, error: BaseException) -> None:
        told.append(error)

    [one] = add(engine, jobs, "send")
    with running(engine, jobs, concurrency=1):
        wait_until(lambda: status(engine, one) == "dead", "the time-out is booked", seconds=30)
        # While a thread still hangs.
        wait_until(lambda: told, "on_failure is called", seconds=30)
        go_on.set()
    assert [type(error) for error in told] == [AttemptTimeoutError]
    assert failures(engine, one)[0].error == "timed out after 0.3 s"
    assert steps == []


def test_a_hook_that_hangs_after_the_commit_undoes_nothing(engine: Engine, jobs: Jobs) -> None:
    go_on = threading.Event()
    hanging = threading.Event()

    @jobs.after
    def after(ctx: JobContext, end: AttemptEnd) -> None:
        if ctx.job.handler == "write":
            hanging.set()
            go_on.wait(60)

    @jobs.handler("write", timeout=0.3, max_attempts=1)
    def write(session: Session) -> str:
        return "kept"

    @jobs.handler("other")
    def other() -> None: ...

    [one] = add(engine, jobs, "write")
    with running(engine, jobs, concurrency=1):
        assert hanging.wait(30)
        [two] = add(engine, jobs, "other")
        wait_until(lambda: status(engine, two) == "done", "the slot is free again", seconds=30)
        go_on.set()
    assert (job(engine, one).status, job(engine, one).result) == ("done", "kept")
    assert failures(engine, one) == []


def test_a_hook_of_a_death_that_hangs_does_not_keep_the_worker(
    engine: Engine,
    jobs: Jobs,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sa_jobs.worker.worker.LAST_CALLS_SECONDS", 0.5)
    go_on = threading.Event()

    @jobs.on_dead
    def on_dead(ctx: JobContext, error: BaseException) -> None:
        go_on.wait(60)

    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        raise Odd

    ids = add(engine, jobs, "fails", 3)
    with caplog.at_level(logging.WARNING, "sa_jobs.worker"):
        run_all(engine, jobs)
    go_on.set()
    assert {status(engine, one) for one in ids} == {"dead"}
    [line] = [line for line in caplog.messages if "hooks of on_failure and on_dead" in line]
    assert line.endswith("2 calls are left out")


# --- what ends without its handler ----------------------------------------------------------------


def test_a_job_that_died_by_a_lapsed_lease_is_told_by_the_worker_that_finds_it(
    engine: Engine, jobs: Jobs
) -> None:
    told: list[tuple[JobContext, BaseException]] = []
    failed: list[BaseException] = []

    @jobs.on_dead
    def on_dead(ctx: JobContext, error: BaseException) -> None:
        told.append((ctx, error))

    @jobs.on_failure
    def on_failure(ctx: JobContext, error: BaseException) -> None:
        failed.append(error)

    @jobs.handler("send", max_attempts=1)
    def send(invoice_id: int) -> None: ...

    with Session(engine) as session, session.begin():
        one = jobs.enqueue(session, send, {"invoice_id": 7}, tenant="acme").id
    with engine.begin() as connection:
        [claimed] = claims.claim(
            connection,
            worker="gone:1",
            queues=["default"],
            handlers=["send"],
            limit=1,
            lease=-1,
        )
    with running(engine, jobs, sweep=0.1):
        wait_until(lambda: told, "on_dead is called", seconds=30)
    [(context, error)] = told
    assert status(engine, one) == "dead"
    assert type(error) is AttemptLostError
    assert "lease expired on final attempt" in str(error)
    assert context.job == claimed
    assert context.job.payload == {"invoice_id": 7}
    assert failed == [], "nobody here ran it"


def test_a_job_that_is_cancelled_while_it_runs_has_neither_failed_nor_died(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    record_all(jobs, steps)
    begun = threading.Event()

    @jobs.handler("plain", max_attempts=1)
    def plain(ctx: JobContext) -> None:
        begun.set()
        ctx.wait(60)
        raise Odd("told to stop")

    @jobs.handler("coroutine", max_attempts=1)
    async def coroutine() -> None:
        begun.set()
        await asyncio.sleep(60)

    with running(engine, jobs):
        for name in jobs.names:
            [one] = add(engine, jobs, name)
            assert begun.wait(30)
            begun.clear()
            with engine.begin() as connection:
                assert jobs.cancel(connection, one) == "requested"
            wait_until(lambda: status(engine, one) == "cancelled", "it is cancelled", seconds=30)  # noqa: B023
    assert steps == ["before", "after: cancelled"] * 2


def test_an_attempt_whose_lease_was_lost_is_told_so(
    engine: Engine, jobs: Jobs, steps: list[str]
) -> None:
    record_all(jobs, steps)
    go_on = threading.Event()
    begun = threading.Event()

    @jobs.handler("send", max_attempts=1)
    def send(session: Session) -> None:
        session.execute(text("SELECT 1"))
        begun.set()
        go_on.wait(60)

    [one] = add(engine, jobs, "send")
    with running(engine, jobs):
        assert begun.wait(30)
        with engine.begin() as connection:
            connection.execute(text("UPDATE sa_jobs SET claim_no = claim_no + 1"))
        go_on.set()
        wait_until(lambda: "after: lost" in steps, "after is called", seconds=30)
    assert steps == ["before", "after: lost"]
    assert status(engine, one) in ("running", "ready", "dead")


def test_a_worker_without_hooks_starts_no_thread_for_them(engine: Engine, jobs: Jobs) -> None:
    threads: list[str] = []

    @jobs.handler("look")
    def look() -> None:
        threads.extend(thread.name for thread in threading.enumerate())

    add(engine, jobs, "look")
    run_all(engine, jobs)
    assert "sa-jobs-heartbeat" in threads
    assert "sa-jobs-hooks" not in threads


def test_a_worker_holds_no_connection_for_hooks_between_two_deaths(
    engine: Engine, jobs: Jobs
) -> None:
    told: list[int] = []

    @jobs.on_dead
    def on_dead(ctx: JobContext, error: BaseException) -> None:
        told.append(ctx.job.id)

    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        raise Odd

    def held() -> int:
        with engine.connect() as connection:
            return int(
                connection.execute(
                    text("SELECT count(*) FROM pg_stat_activity WHERE application_name ~ 'hooks'")
                ).scalar_one()
            )

    with running(engine, jobs):
        for count in (1, 2):
            add(engine, jobs, "fails")
            wait_until(lambda: len(told) == count, "on_dead is called", seconds=30)  # noqa: B023
            wait_until(lambda: held() == 0, "the connection is given back", seconds=30)
