"""Two transactions that want one key at the same time, with every kind of caller.

The second waits for the end of the first, and then has an id: the first one's job, or its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DBAPIError

from sa_jobs import DuplicateJobError, Enqueued, Row, enqueue, enqueue_many
from sa_jobs.models import Job
from tests.database.callers import Application, Caller, open_application
from tests.database.conftest import Look
from tests.support.waiting import wait_until

KEYS = ["idempotency_key", "unique_key"]
ENDS: list[Literal["commit", "rollback"]] = ["commit", "rollback"]
SERIALIZATION_FAILURE = "40001"

Work = Callable[[Caller], Any]


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def waits_for_a_lock(looker: Engine) -> bool:
    with looker.connect() as connection:
        waiting = connection.execute(
            text("""
                SELECT count(*) FROM pg_stat_activity
                WHERE datname = current_database() AND wait_event_type = 'Lock'
            """)
        )
        return bool(waiting.scalar_one())


def behind(
    application: Application,
    thread: ThreadPoolExecutor,
    looker: Engine,
    *,
    first: Work,
    second: Work,
    end: Literal["commit", "rollback"],
) -> tuple[Any, Any]:
    """Return what both had, where the second waited until the first one's transaction ended."""

    def run() -> Any:
        with application.open() as caller:
            result = second(caller)
            caller.commit()
            return result

    with application.open() as caller:
        had = first(caller)
        future: Future[Any] = thread.submit(run)
        wait_until(partial(waits_for_a_lock, looker), "the second waits for the key")
        getattr(caller, end)()
        return had, future.result(60)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("key", KEYS)
def test_whoever_waits_for_a_key_has_an_id(
    application: Application,
    thread: ThreadPoolExecutor,
    looker: Engine,
    name: str,
    committed: Look,
    key: str,
    end: Literal["commit", "rollback"],
) -> None:
    options: dict[str, Any] = {key: name}
    first, second = behind(
        application,
        thread,
        looker,
        first=lambda caller: caller(enqueue, name, {"n": 1}, **options),
        second=lambda caller: caller(enqueue, name, {"n": 2}, **options),
        end=end,
    )
    assert second.created is (end == "rollback")
    assert (second.id == first.id) is (end == "commit")
    assert [row.id for row in committed()] == [second.id]


@pytest.mark.parametrize("end", ENDS)
def test_whoever_waits_with_many_has_all_their_ids(
    application: Application,
    thread: ThreadPoolExecutor,
    looker: Engine,
    name: str,
    committed: Look,
    end: Literal["commit", "rollback"],
) -> None:
    def rows(*letters: str) -> list[Row]:
        return [Row({"n": letter}, unique_key=f"{name} {letter}") for letter in letters]

    first, second = behind(
        application,
        thread,
        looker,
        first=lambda caller: caller(enqueue_many, name, rows("b", "c")),
        second=lambda caller: caller(enqueue_many, name, rows("d", "c", "b", "a", "c")),
        end=end,
    )
    taken = [not result.created for result in second]
    assert taken == [False, end == "commit", end == "commit", False, True]
    if end == "commit":
        assert (second[1].id, second[2].id) == (first[1].id, first[0].id)
    assert second[4] == Enqueued(second[1].id, created=False)
    payloads = {row.id: row.payload["n"] for row in committed()}
    assert [payloads[result.id] for result in second] == ["d", "c", "b", "a", "c"]


@pytest.mark.parametrize("end", ENDS)
def test_whoever_waits_replaces_what_was_committed_meanwhile(
    application: Application,
    thread: ThreadPoolExecutor,
    looker: Engine,
    name: str,
    committed: Look,
    end: Literal["commit", "rollback"],
) -> None:
    def second(caller: Caller) -> Any:
        options: dict[str, Any] = {"unique_key": name, "on_conflict": "replace"}
        return caller(enqueue, name, {"n": 2}, **options)

    _, had = behind(
        application,
        thread,
        looker,
        first=lambda caller: caller(enqueue, name, {"n": 1}, unique_key=name),
        second=second,
        end=end,
    )
    assert [(row.id, row.payload) for row in committed()] == [(had.id, {"n": 2})]


def test_whoever_waits_is_refused_and_can_go_on(
    application: Application,
    thread: ThreadPoolExecutor,
    looker: Engine,
    name: str,
    committed: Look,
) -> None:
    def second(caller: Caller) -> Any:
        rows = [Row({"n": 2}, unique_key=name), {"n": 3}]
        with pytest.raises(DuplicateJobError) as caught:
            caller(enqueue_many, name, rows, on_conflict="raise")
        caller(enqueue, name, {"n": 4})
        return caught.value.id

    first, had = behind(
        application,
        thread,
        looker,
        first=lambda caller: caller(enqueue, name, {"n": 1}, unique_key=name),
        second=second,
        end="commit",
    )
    assert had == first.id
    assert [row.payload["n"] for row in committed()] == [1, 4]


@pytest.fixture(scope="module")
def repeatable_read(application: Application, shared_url: str) -> Iterator[Application]:
    """The same kind of application, whose transactions are REPEATABLE READ."""
    options = {"isolation_level": "REPEATABLE READ"}
    with open_application(application.name, shared_url, **options) as opened:
        yield opened


def sqlstate(error: DBAPIError) -> str | None:
    """Return the SQLSTATE of an error, which each driver keeps somewhere else."""
    original: Any = error.orig
    if original.args and isinstance(original.args[0], dict):
        return str(original.args[0]["C"])
    return getattr(original, "sqlstate", None) or getattr(original, "pgcode", None)


def in_another(application: Application, thread: ThreadPoolExecutor, work: Work, end: str) -> Any:
    """Do work in a whole transaction of another caller, in another thread."""

    def run() -> Any:
        with application.open() as caller:
            result = work(caller)
            getattr(caller, end)()
            return result

    return thread.submit(run).result(60)


def test_a_key_taken_after_the_snapshot_is_an_error_that_says_run_again(
    repeatable_read: Application, thread: ThreadPoolExecutor, name: str, committed: Look
) -> None:
    """There is no id that this transaction could see; the next one sees it."""

    def work(caller: Caller) -> Any:
        return caller(enqueue, name, idempotency_key=name)

    with repeatable_read.open() as caller:
        caller.execute(select(Job.id).limit(1))
        taken = in_another(repeatable_read, thread, work, "commit")
        with pytest.raises(DBAPIError) as caught:
            work(caller)
        assert sqlstate(caught.value) == SERIALIZATION_FAILURE
        caller.rollback()
        assert work(caller) == Enqueued(taken.id, created=False)
        caller.commit()
    assert [row.id for row in committed()] == [taken.id]


def test_a_key_given_up_after_the_snapshot_is_free(
    repeatable_read: Application, thread: ThreadPoolExecutor, name: str, committed: Look
) -> None:
    def work(caller: Caller) -> Any:
        return caller(enqueue, name, idempotency_key=name)

    with repeatable_read.open() as caller:
        caller.execute(select(Job.id).limit(1))
        in_another(repeatable_read, thread, work, "rollback")
        own = work(caller)
        caller.commit()
    assert own.created
    assert [row.id for row in committed()] == [own.id]
