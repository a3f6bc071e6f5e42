"""Keys: which job has one when several want it, and the order in which a call takes its keys."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, text
from sqlalchemy.engine import make_url

from sa_jobs import DuplicateJobError, Enqueued, Row, enqueue, enqueue_many
from sa_jobs.inserts import ROWS_PER_STATEMENT
from tests.database.callers import Caller
from tests.support.jobs import add, all_jobs, claim, job
from tests.support.waiting import wait_until

KEYS = ["idempotency_key", "unique_key"]
LATER = dt.datetime(2090, 1, 1, tzinfo=dt.timezone.utc)


def rows_of(key: str, names: Sequence[str]) -> list[Row]:
    return [Row({"n": n}, **{key: name}) for n, name in enumerate(names)]  # type: ignore[arg-type]


def blocked(connection: Connection, count: int) -> bool:
    """Return whether so many sessions of this database wait for a lock."""
    waiting = connection.execute(
        text("""
            SELECT count(*) FROM pg_stat_activity
            WHERE datname = current_database() AND wait_event_type = 'Lock'
        """)
    ).scalar_one()
    connection.rollback()
    return bool(waiting == count)


def at_once_behind_a_key(
    engine: Engine,
    connection: Connection,
    held: Row,
    *calls: Callable[[Connection], list[Enqueued]],
) -> list[list[Enqueued]]:
    """Run each call in a transaction of its own, started while a third one holds a key."""

    def run(call: Callable[[Connection], list[Enqueued]]) -> list[Enqueued]:
        with engine.begin() as own:
            return call(own)

    with ThreadPoolExecutor(len(calls)) as pool, engine.connect() as holder:
        enqueue_many(holder, "send", [held])
        running = []
        for number, call in enumerate(calls, start=1):
            running.append(pool.submit(run, call))
            wait_until(partial(blocked, connection, number), "each call waits for a key")
        holder.rollback()
        return [future.result(60) for future in running]


@pytest.mark.parametrize("key", KEYS)
def test_two_calls_with_the_same_keys_in_opposite_order_do_not_deadlock(
    engine: Engine, connection: Connection, key: str
) -> None:
    names = ["z", "m", "a"]
    first, second = at_once_behind_a_key(
        engine,
        connection,
        Row(**{key: "m"}),  # type: ignore[arg-type]
        lambda own: enqueue_many(own, "send", rows_of(key, names)),
        lambda own: enqueue_many(own, "send", rows_of(key, names[::-1])),
    )
    assert [result.created for result in first] == [True] * 3
    assert second == [Enqueued(result.id, created=False) for result in first[::-1]]


def test_two_calls_of_several_statements_do_not_deadlock(
    engine: Engine, connection: Connection
) -> None:
    names = [f"{n:06}" for n in range(ROWS_PER_STATEMENT + 10)]
    first, second = at_once_behind_a_key(
        engine,
        connection,
        Row(unique_key=names[ROWS_PER_STATEMENT // 2]),
        lambda own: enqueue_many(own, "send", rows_of("unique_key", names)),
        lambda own: enqueue_many(own, "send", rows_of("unique_key", names[::-1])),
    )
    assert [result.id for result in second] == [result.id for result in first[::-1]]


def test_two_calls_with_keys_of_both_kinds_do_not_deadlock(
    engine: Engine, connection: Connection
) -> None:
    rows = [Row(unique_key="z"), Row(idempotency_key="m"), Row(unique_key="b"), Row()]
    first, second = at_once_behind_a_key(
        engine,
        connection,
        Row(idempotency_key="m"),
        lambda own: enqueue_many(own, "send", rows),
        lambda own: enqueue_many(own, "send", rows[::-1]),
    )
    assert [result.created for result in first] == [True] * 4
    assert [result.created for result in second] == [True, False, False, False]


@pytest.mark.parametrize("key", KEYS)
def test_two_calls_that_replace_each_others_jobs_do_not_deadlock(
    engine: Engine, connection: Connection, key: str
) -> None:
    """One has added jobs and replaced others when the second wants the same in another order."""
    names = ["z", "old", "m", "older", "a"]
    for name in ("older", "old"):
        enqueue(connection, "send", {"n": name}, **{key: name})  # type: ignore[call-overload]
    connection.commit()
    first, second = at_once_behind_a_key(
        engine,
        connection,
        Row(**{key: "m"}),  # type: ignore[arg-type]
        lambda own: enqueue_many(own, "send", rows_of(key, names), on_conflict="replace"),
        lambda own: enqueue_many(own, "send", rows_of(key, names[::-1]), on_conflict="replace"),
    )
    assert [result.created for result in first] == [True, False, True, False, True]
    assert second == [Enqueued(result.id, created=False) for result in first[::-1]]
    rows = {row.id: row for row in all_jobs(connection)}
    assert [rows[result.id].payload["n"] for result in second] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("on_conflict", ["existing", "replace"])
def test_taken_keys_are_found_by_index_however_many_jobs_there_are(
    connection: Connection, on_conflict: Any
) -> None:
    """Hundreds of keys at once must not turn the look-up, or the replacement, into a scan."""
    count = 20_000
    rows = [Row(idempotency_key=f"i{n}", unique_key=f"u{n}") for n in range(count)]
    enqueue_many(connection, "send", rows)
    connection.execute(text("UPDATE sa_jobs SET status = 'done' WHERE id % 10 <> 0"))
    connection.commit()
    connection.execute(text("ANALYZE sa_jobs"))
    scans = text("SELECT pg_stat_get_xact_numscans('sa_jobs'::regclass)")
    before = connection.execute(scans).scalar_one()
    found = enqueue_many(connection, "send", rows[::100], on_conflict=on_conflict)
    assert not any(result.created for result in found)
    assert connection.execute(scans).scalar_one() == before
    connection.commit()


@pytest.mark.parametrize("key", KEYS)
def test_jobs_with_keys_keep_the_order_given(
    caller: Caller, connection: Connection, key: str
) -> None:
    caller(enqueue, "send", {"n": "before"}, **{key: "d"})
    caller.commit()
    names = ["z", "b", "d", "y", "b", "a"]
    results = caller(enqueue_many, "send", [*rows_of(key, names), {"n": "plain"}])
    caller.commit()
    assert [result.created for result in results] == [True, True, False, True, False, True, True]
    assert results[4].id == results[1].id
    ids = [result.id for result in results if result.created]
    assert ids == sorted(ids)
    order = [one.payload["n"] for one in claim(connection, 10)]
    assert order == ["before", 0, 1, 3, 5, "plain"]


def test_the_first_of_two_rows_that_share_one_of_two_keys_is_added(connection: Connection) -> None:
    results = enqueue_many(
        connection,
        "send",
        [
            Row({"n": 0}, idempotency_key="z", unique_key="one"),
            Row({"n": 1}, unique_key="one"),
            Row({"n": 2}, idempotency_key="a", unique_key="one"),
            Row({"n": 3}, idempotency_key="a"),
        ],
    )
    assert [result.created for result in results] == [True, False, False, True]
    assert {results[1].id, results[2].id} <= {results[0].id, results[3].id}
    assert [row.payload["n"] for row in all_jobs(connection)] == [0, 3]


def test_a_row_whose_rival_in_the_call_was_not_added_is_added(connection: Connection) -> None:
    holder = add(connection, idempotency_key="old")
    results = enqueue_many(
        connection,
        "send",
        [Row({"n": 0}, idempotency_key="old", unique_key="new"), Row({"n": 1}, unique_key="new")],
    )
    assert results[0] == Enqueued(holder, created=False)
    assert results[1].created
    assert job(connection, results[1].id).payload == {"n": 1}


@contextmanager
def role_that_may_insert(connection: Connection, database_url: str) -> Iterator[str]:
    role = make_url(database_url).database
    for statement in (
        f"CREATE ROLE {role}",
        f"GRANT SELECT, INSERT ON sa_jobs TO {role}",
        f"GRANT SELECT ON sa_jobs_sleepers TO {role}",
    ):
        connection.execute(text(statement))
    connection.commit()
    try:
        yield str(role)
    finally:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))
        connection.commit()


@pytest.mark.parametrize("grant", ["", "GRANT USAGE ON SEQUENCE sa_jobs_id_seq TO {role}"])
def test_a_role_that_may_only_insert_enqueues_many_with_keys(
    engine: Engine, connection: Connection, database_url: str, grant: str
) -> None:
    with role_that_may_insert(connection, database_url) as role:
        if grant:
            connection.execute(text(grant.format(role=role)))
            connection.commit()
        with engine.connect() as application:
            application.execute(text(f"SET ROLE {role}"))
            results = enqueue_many(application, "send", rows_of("unique_key", ["b", "a", "b"]))
            application.commit()
            application.execute(text("RESET ROLE"))
            application.commit()
        assert [result.created for result in results] == [True, True, False]
        assert [row.unique_key for row in all_jobs(connection)] == ["b", "a"]


@pytest.mark.parametrize("other", [{"handler": "make_pdf"}, {"queue": "pdf"}])
@pytest.mark.parametrize("state", ["ready", "done"])
def test_a_job_of_another_handler_or_queue_is_not_replaced(
    caller: Caller, connection: Connection, other: dict[str, str], state: str
) -> None:
    """Its payload would be another handler's; or the new job would be lost without a word."""
    holder = add(connection, idempotency_key="k", payload={"to": "x"}, status=state)
    options: dict[str, Any] = {"handler": "send", "queue": "default"} | other
    with pytest.raises(DuplicateJobError, match=f"^job {holder} has idempotency_key='k'") as caught:
        caller(enqueue, payload={}, idempotency_key="k", on_conflict="replace", **options)
    assert caught.value.id == holder
    assert all(value in str(caught.value) for value in other.values())
    caller(enqueue, "send", {"after": 1})
    caller.commit()
    assert [row.payload for row in all_jobs(connection)] == [{"to": "x"}, {"after": 1}]


def test_a_duplicate_of_another_handler_is_reported_as_any_other(connection: Connection) -> None:
    holder = add(connection, unique_key="k")
    assert enqueue(connection, "make_pdf", unique_key="k") == Enqueued(holder, created=False)


def test_an_error_names_only_the_keys_that_were_given(connection: Connection) -> None:
    enqueue(connection, "send", unique_key="u")
    with pytest.raises(DuplicateJobError) as caught:
        enqueue(connection, "send", unique_key="u", on_conflict="raise")
    assert str(caught.value) == f"job {caught.value.id} has unique_key='u' already"
