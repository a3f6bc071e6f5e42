"""However a handler ends, its attempt is booked, its text can be stored, and the worker goes on."""

from __future__ import annotations

import asyncio
import builtins
import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import Discard, JobContext, Jobs, Retry, Snooze, fixed
from sa_jobs.limits import MAX_ERROR_BYTES, unstorable
from sa_jobs.models import Job
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.running import constraint, run_all, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


# --- exceptions ---------------------------------------------------------------------------------


class NoText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class ExitingText(Exception):
    def __str__(self) -> str:
        raise SystemExit

    __repr__ = __str__


class TextOfAnotherType(Exception):
    def __str__(self) -> Any:
        return 5  # noqa: PLE0307


class LyingClass(Exception):
    @property
    def __class__(self) -> Any:
        return Snooze

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class RaisingClass(Exception):
    @property
    def __class__(self) -> Any:
        raise RuntimeError("no class")

    @__class__.setter
    def __class__(self, kind: Any) -> None: ...


class RaisingAttributes(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(name)


class NamelessKind(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Nameless(Exception, metaclass=NamelessKind):
    pass


class SnoozeWithoutDelay(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self, "its parent was not called")


class RetryWithOddDelay(Retry):
    def __init__(self) -> None:
        super().__init__(1)
        self.delay = float("nan")


class DiscardWithoutText(Discard):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def circle() -> BaseException:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    return first


def long_chain() -> BaseException:
    error = ValueError("innermost")
    for number in range(20_000):
        outer = ValueError(f"error {number}")
        outer.__cause__ = error
        error = outer
    return error


def deep_recursion() -> BaseException:
    def deeper() -> None:
        deeper()

    try:
        deeper()
    except RecursionError as error:
        return error
    raise AssertionError


def with_notes() -> BaseException:
    error = ValueError("with notes")
    error.__notes__ = [5, "a\x00b", "\ud800"]  # type: ignore[attr-defined]
    return error


MAKERS: list[Callable[[], BaseException]] = [
    lambda: SystemExit(3),
    KeyboardInterrupt,
    GeneratorExit,
    asyncio.CancelledError,
    MemoryError,
    BaseException,
    StopIteration,
    StopAsyncIteration,
    NoText,
    ExitingText,
    TextOfAnotherType,
    LyingClass,
    RaisingClass,
    RaisingAttributes,
    Nameless,
    SnoozeWithoutDelay,
    RetryWithOddDelay,
    DiscardWithoutText,
    circle,
    long_chain,
    deep_recursion,
    with_notes,
    lambda: ValueError("a\x00b\ud800\udcff"),
    lambda: ValueError("x" * 50_000_000),
    lambda: ValueError("\x00" * 1_000_000),
    lambda: ValueError(object(), [1], {"a": NoText()}),
]
if sys.version_info >= (3, 11):

    def group(members: list[BaseException]) -> BaseException:
        made: BaseException = builtins.BaseExceptionGroup("several", members)
        return made

    MAKERS += [
        lambda: group([SystemExit(), KeyboardInterrupt(), NoText()]),
        lambda: group([ValueError(number) for number in range(20_000)]),
        lambda: group([ValueError("x" * 10_000_000)]),
    ]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_any_exception_is_a_recorded_failure_of_limited_size(
    engine: Engine, jobs: Jobs, kind: str
) -> None:
    """All on one slot: the worker that takes the next job has survived the one before."""
    if kind == "plain":

        @jobs.handler("fails", max_attempts=2, backoff=fixed(3600))
        def fails(number: int) -> None:
            error = MAKERS[number]()
            raise error
    else:

        @jobs.handler("fails", max_attempts=2, backoff=fixed(3600))
        async def fails_async(number: int) -> None:
            error = MAKERS[number]()
            raise error

    jobs.handler("good")(lambda: None)
    ids = add(engine, jobs, "fails", *[{"number": number} for number in range(len(MAKERS))])
    (good,) = add(engine, jobs, "good")
    run_all(engine, jobs, concurrency=1, lease=30.0, heartbeat=5.0)

    assert status(engine, good) == "done"
    for job_id, make in zip(ids, MAKERS, strict=True):
        (failure,) = failures(engine, job_id)
        ended = job(engine, job_id)
        # What was raised as a Discard is one, whatever its text.
        assert ended.status == ("dead" if make is DiscardWithoutText else "ready"), make
        assert failure.error == ended.last_error
        assert failure.error
        assert unstorable(failure.error) is None
        assert len(failure.error.encode()) <= MAX_ERROR_BYTES
        # The policy's delay, neither shortened nor blown up.
        waits = (ended.run_at - failure.failed_at).total_seconds()
        assert make is DiscardWithoutText or 3590 < waits < 3610


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_task_that_a_coroutine_has_started_may_raise_what_leaves_an_event_loop(
    engine: Engine, jobs: Jobs, kind: type[BaseException]
) -> None:
    beside = threading.Event()

    @jobs.handler("starts_a_task", max_attempts=1)
    async def starts_a_task() -> None:
        async def exits() -> None:
            raise kind

        await asyncio.create_task(exits())

    @jobs.handler("stops_the_loop")
    async def stops_the_loop() -> str:
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return "went on"

    @jobs.handler("stays", priority=1)
    async def stays() -> None:
        while not beside.is_set():  # noqa: ASYNC110 - set by another thread
            await asyncio.sleep(0.01)

    (long,) = add(engine, jobs, "stays")
    with running(engine, jobs):
        wait_until(lambda: status(engine, long) == "running", "one job runs all along")
        (bad,) = add(engine, jobs, "starts_a_task")
        wait_until(lambda: status(engine, bad) == "dead", "its attempt is booked")
        (stopped,) = add(engine, jobs, "stops_the_loop")
        wait_until_done(engine, stopped)
        beside.set()
        wait_until_done(engine, long)

    assert kind.__name__ in job(engine, bad).last_error
    assert job(engine, stopped).result == "went on"


def test_a_policy_that_raises_anything_has_the_default_in_its_place(
    engine: Engine, jobs: Jobs
) -> None:
    def exits(attempt: int) -> float:
        raise SystemExit

    @jobs.handler("fails", max_attempts=2, backoff=exits)
    def fails() -> None:
        raise ValueError("why")

    (job_id,) = add(engine, jobs, "fails")
    run_all(engine, jobs)

    # Its delay is jittered from nothing up, so the second attempt may come at once.
    recorded = failures(engine, job_id)
    assert recorded
    assert all(failure.error.endswith("why") for failure in recorded)


def test_a_context_variable_does_not_reach_the_next_job(engine: Engine, jobs: Jobs) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")
    seen: list[str] = []

    @jobs.handler("sets")
    def sets(name: str) -> None:
        seen.append(tenant.get())
        tenant.set(name)

    @jobs.handler("sets_async")
    async def sets_async(name: str) -> None:
        sets(name)

    for handler in ("sets", "sets_async"):
        add(engine, jobs, handler, {"name": "a"}, {"name": "b"})
    run_all(engine, jobs, concurrency=1)

    assert seen == ["nobody"] * 4


# --- results ------------------------------------------------------------------------------------


class HostileKey:
    def __hash__(self) -> int:
        return 1

    def __repr__(self) -> str:
        raise RuntimeError("no text")


RESULTS: list[Callable[[], Any]] = [
    lambda: "\x00",
    lambda: float("nan"),
    lambda: {1, 2},
    Job,
    lambda: "x" * 100_000_000,
    lambda: [0] * 2_000_000,
    lambda: (number for number in range(3)),
    lambda: {HostileKey(): 1},
    lambda: {"a": HostileKey()},
    object,
]


def test_a_result_that_cannot_be_stored_is_left_out_and_the_job_is_done_once(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[int] = []

    @jobs.handler("plain")
    def plain(number: int) -> Any:
        ran.append(number)
        return RESULTS[number]()

    @jobs.handler("coroutine")
    async def coroutine(number: int) -> Any:
        return plain(number)

    @jobs.handler("transactional")
    def transactional(number: int, session: Session) -> Any:
        session.execute(text("SELECT 1"))
        return plain(number)

    payloads = [{"number": number} for number in range(len(RESULTS))]
    ids = [
        job_id
        for handler in ("plain", "coroutine", "transactional")
        for job_id in add(engine, jobs, handler, *payloads)
    ]
    run_all(engine, jobs, concurrency=1, lease=30.0, heartbeat=5.0)

    ends = {job_id: (job(engine, job_id).status, job(engine, job_id).result) for job_id in ids}
    assert ends == dict.fromkeys(ids, ("done", None))
    assert sorted(ran) == sorted(list(range(len(RESULTS))) * 3)
    assert [len(failures(engine, job_id)) for job_id in ids] == [0] * len(ids)
    assert caplog.text.count("result left out") == len(ids)


def test_a_result_that_the_database_refuses_is_left_out_and_the_job_is_done_once(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    """As a database in another encoding than UTF-8 refuses what it has no character for."""
    together = threading.Barrier(4)

    @jobs.handler("number")
    def number(n: int) -> int:
        together.wait()
        return n

    ids = add(engine, jobs, "number", *[{"n": n} for n in range(4)])
    with constraint(engine, "result IS DISTINCT FROM '2'"):
        run_all(engine, jobs, concurrency=4)

    ends = [(job(engine, job_id).status, job(engine, job_id).result) for job_id in ids]
    assert ends == [("done", 0), ("done", 1), ("done", None), ("done", 3)]
    assert [failures(engine, job_id) for job_id in ids] == [[]] * 4
    assert "result left out" in caplog.text


# --- progress -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_progress_that_cannot_be_stored_fails_no_job(
    engine: Engine, jobs: Jobs, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def report(ctx: JobContext) -> str:
        for make in RESULTS:
            ctx.progress(make())
        return "reported"

    if kind == "plain":
        jobs.handler("reports")(report)
    else:

        @jobs.handler("reports")
        async def reports(ctx: JobContext) -> str:
            return report(ctx)

    (job_id,) = add(engine, jobs, "reports")
    run_all(engine, jobs, lease=30.0, heartbeat=5.0)

    assert (status(engine, job_id), job(engine, job_id).result) == ("done", "reported")
    assert caplog.text.count("progress left out") == len(RESULTS)


def test_progress_that_the_database_refuses_costs_no_lease(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    @jobs.handler("reports")
    def reports(ctx: JobContext) -> bool:
        while not go.wait(0.02):
            ctx.progress("refused")
        return ctx.cancelled

    @jobs.handler("stays")
    def stays(ctx: JobContext) -> bool:
        go.wait(20)
        return ctx.cancelled

    ids = add(engine, jobs, "reports") + add(engine, jobs, "stays")
    with (
        constraint(engine, "meta->>'progress' IS DISTINCT FROM 'refused'"),
        running(engine, jobs, lease=1.5, heartbeat=0.4),
    ):
        wait_until(lambda: caplog.text.count("left out") >= 6, "longer than the lease")
        go.set()
        for job_id in ids:
            wait_until_done(engine, job_id)

    assert [(job(engine, job_id).result, job(engine, job_id).attempts) for job_id in ids] == [
        (False, 1)
    ] * 2
    assert [failures(engine, job_id) for job_id in ids] == [[], []]
