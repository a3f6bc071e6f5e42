"""What a test may say of the jobs that were enqueued."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple, NoReturn, ParamSpec, TypeVar, cast

from sa_jobs.connections import Caller, Operation, connection_of, operation
from sa_jobs.job_options import HandlerName
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.testing.expectations import Delays, Expectation, Times, expectation, listing
from sa_jobs.testing.rows import EnqueuedJob, read

P = ParamSpec("P")
R = TypeVar("R")

# Of the jobs that are not meant, so many are looked through for the nearest.
_OTHERS = 200


class _Found(NamedTuple):
    matching: list[EnqueuedJob]
    others: list[EnqueuedJob]


def also_awaitable(function: Callable[Concatenate[Caller, P], R]) -> Operation[P, R]:
    """Tell the type checker what the function does by itself with an asynchronous session."""
    return cast("Operation[P, R]", function)


@also_awaitable
def assert_enqueued(
    session: Caller,
    handler: HandlerName,
    payload_subset: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: Times | None = None,
    delay: Delays | None = None,
    tenant: str | None = None,
    unique_key: str | None = None,
    idempotency_key: str | None = None,
    count: int | None = None,
    status: str | None = "ready",
    tables: Tables = DEFAULT_TABLES,
) -> list[EnqueuedJob]:
    """Return the jobs that wait and are as described; raise AssertionError if there is none.

    Of the payload the given part must be there: dicts within it are parts too, all other values
    must be equal. `run_at` and `delay` (from the job's creation) are met to the second, or lie
    between two values of which either may be None. What is not given is not looked at. With `count`
    there must be exactly that many. `status` is "ready", another one, or None for any.

    The error lists what there is instead, the nearest first, with its payload.
    """
    __tracebackhide__ = True
    expected = expectation(
        handler,
        payload_subset,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        tenant=tenant,
        unique_key=unique_key,
        idempotency_key=idempotency_key,
        status=status,
    )

    def verdict(found: _Found) -> list[EnqueuedJob]:
        __tracebackhide__ = True
        number = len(found.matching)
        if number == count or (count is None and number):
            return found.matching
        _fail(_too_few_or_many(expected, found, count))

    judged: list[EnqueuedJob] = _judged(_look(session, expected, tables), verdict)
    return judged


@also_awaitable
def refute_enqueued(
    session: Caller,
    handler: HandlerName,
    payload_subset: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: Times | None = None,
    delay: Delays | None = None,
    tenant: str | None = None,
    unique_key: str | None = None,
    idempotency_key: str | None = None,
    status: str | None = "ready",
    tables: Tables = DEFAULT_TABLES,
) -> None:
    """Raise AssertionError, which lists them, if jobs wait that are as `assert_enqueued` describes.

    A job that has run is no longer ready: with `status=None` there must not be any at all.
    """
    __tracebackhide__ = True
    expected = expectation(
        handler,
        payload_subset,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        tenant=tenant,
        unique_key=unique_key,
        idempotency_key=idempotency_key,
        status=status,
    )

    def verdict(found: _Found) -> None:
        __tracebackhide__ = True
        if found.matching:
            _fail([f"expected not to find: {expected}", "there is:", *listing(found.matching)])

    judged: None = _judged(_look(session, expected, tables), verdict)
    return judged


@also_awaitable
def enqueued(
    session: Caller,
    handler: HandlerName | None = None,
    payload_subset: Mapping[str, Any] | None = None,
    *,
    queue: str | None = None,
    priority: int | None = None,
    run_at: Times | None = None,
    delay: Delays | None = None,
    tenant: str | None = None,
    unique_key: str | None = None,
    idempotency_key: str | None = None,
    status: str | None = "ready",
    tables: Tables = DEFAULT_TABLES,
) -> list[EnqueuedJob]:
    """Return the jobs that wait, in the order in which they were added.

    All conditions that are given must hold, as for `assert_enqueued`.
    """
    expected = expectation(
        handler,
        payload_subset,
        queue=queue,
        priority=priority,
        run_at=run_at,
        delay=delay,
        tenant=tenant,
        unique_key=unique_key,
        idempotency_key=idempotency_key,
        status=status,
    )
    found: list[EnqueuedJob] = _judged(
        _look(session, expected, tables), lambda found: found.matching
    )
    return found


@operation
def _look(session: Caller, expected: Expectation, tables: Tables) -> _Found:
    jobs = tables.jobs
    wanted = {"handler": expected.handler, "status": expected.status}
    conditions = [jobs.c[name] == value for name, value in wanted.items() if value is not None]
    connection = connection_of(session, tables)
    matching = [job for job in read(connection, tables, *conditions) if not expected.misses(job)]
    others = [job for job in read(connection, tables, newest=_OTHERS) if expected.misses(job)]
    return _Found(matching, others)


def _judged(found: Any, verdict: Callable[[_Found], Any]) -> Any:
    __tracebackhide__ = True
    return verdict(found) if isinstance(found, _Found) else _judged_later(found, verdict)


async def _judged_later(found: Any, verdict: Callable[[_Found], Any]) -> Any:
    __tracebackhide__ = True
    return verdict(await found)


def _too_few_or_many(expected: Expectation, found: _Found, count: int | None) -> list[str]:
    number = len(found.matching)
    if count is None:
        lines = [f"expected to find: {expected}"]
    else:
        lines = [f"expected to find {count}, and found {number}: {expected}"]
    if found.matching:
        lines += ["found:", *listing(found.matching)]
    if number < (count or 1):
        nearest = sorted(found.others, key=expected.distance)
        if nearest:
            lines += ["there is, the nearest first:", *listing(nearest, expected)]
        elif not found.matching:
            lines.append(
                "there are no jobs at all: they may have been enqueued in another session or other "
                "tables (tables=), or rolled back"
            )
    return lines


def _fail(lines: Sequence[str]) -> NoReturn:
    __tracebackhide__ = True
    raise AssertionError("\n".join(lines))
