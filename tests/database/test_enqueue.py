"""What applications call, with every kind of session and connection, on every driver."""

from __future__ import annotations

import datetime as dt
from typing import Any, Literal

import pytest
from sqlalchemy import Connection, column, func, select, table, values
from sqlalchemy.types import Integer, String

from sa_jobs import (
    DuplicateJobError,
    Enqueued,
    Jobs,
    Row,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from sa_jobs.models import Job
from tests.database.callers import Caller
from tests.support.jobs import add, all_jobs, change, job

LATER = dt.datetime(2090, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=13)))
TEXTS = "emoji 😀, نص, e\u0301, \\, \", ', {}, %s, :name, \x7f"


def test_a_job_is_there_once_the_caller_commits(caller: Caller, connection: Connection) -> None:
    enqueued = caller(enqueue, "send", {"note": TEXTS, "amounts": [1, 1.5, None, True]})
    assert enqueued.created
    assert all_jobs(connection) == []
    caller.commit()
    row = job(connection, enqueued.id)
    assert row.payload == {"note": TEXTS, "amounts": [1, 1.5, None, True]}
    assert (row.queue, row.handler, row.status) == ("default", "send", "ready")
    assert (row.priority, row.attempts, row.max_attempts, row.claim_no) == (0, 0, 20, 0)
    assert row.run_at == row.created_at


def test_a_job_goes_with_the_callers_rollback(caller: Caller, connection: Connection) -> None:
    caller(enqueue, "send")
    caller(enqueue_many, "send", [None, None])
    caller.rollback()
    caller.commit()
    assert all_jobs(connection) == []


def test_every_option_is_stored(caller: Caller, connection: Connection) -> None:
    enqueued = caller(
        enqueue,
        "mail.send",
        {},
        queue="o'x",
        priority=-32_768,
        run_at=LATER,
        max_attempts=2**63 - 1,
        tenant='a"b',
        idempotency_key="invoice:1842:send\n",
        unique_key="é" * 250,
    )
    caller.commit()
    row = job(connection, enqueued.id)
    assert (row.queue, row.handler, row.tenant) == ("o'x", "mail.send", 'a"b')
    assert (row.priority, row.max_attempts) == (-32_768, 2**63 - 1)
    assert row.run_at == LATER
    assert (row.idempotency_key, row.unique_key) == ("invoice:1842:send\n", "é" * 250)


def test_a_delay_counts_from_the_databases_clock(caller: Caller, connection: Connection) -> None:
    enqueued = caller(enqueue, "send", delay=dt.timedelta(hours=2, milliseconds=5))
    caller.commit()
    row = job(connection, enqueued.id)
    assert row.run_at - row.created_at == dt.timedelta(hours=2, milliseconds=5)


def test_a_rolled_back_savepoint_takes_its_jobs_with_it(
    caller: Caller, connection: Connection
) -> None:
    kept = caller(enqueue, "send")
    savepoint = caller.savepoint()
    caller(enqueue, "send", idempotency_key="k")
    savepoint.rollback()
    released = caller.savepoint()
    again = caller(enqueue, "send", idempotency_key="k")
    released.commit()
    assert all_jobs(connection) == []
    caller.commit()
    assert again.created
    assert [row.id for row in all_jobs(connection)] == [kept.id, again.id]


@pytest.mark.parametrize("key", ["idempotency_key", "unique_key"])
def test_a_duplicate_key_gives_the_existing_job(
    caller: Caller, connection: Connection, key: str
) -> None:
    options: dict[str, Any] = {key: "k"}
    first = caller(enqueue, "send", {"a": 1}, **options)
    same = caller(enqueue, "send", {"a": 2}, **options)
    caller.commit()
    later = caller(enqueue, "send", {"a": 3}, **options)
    caller.commit()
    assert same == later == Enqueued(first.id, created=False)
    assert [row.payload for row in all_jobs(connection)] == [{"a": 1}]


def test_a_duplicate_may_replace_a_ready_jobs_payload_and_time(
    caller: Caller, connection: Connection
) -> None:
    first = caller(enqueue, "send", {"a": 1}, unique_key="k", priority=3)
    second = caller(
        enqueue, "send", {"a": 2}, unique_key="k", priority=5, run_at=LATER, on_conflict="replace"
    )
    caller.commit()
    assert second == Enqueued(first.id, created=False)
    row = job(connection, first.id)
    assert (row.payload, row.run_at, row.priority) == ({"a": 2}, LATER, 3)


def test_a_duplicate_may_raise_and_the_transaction_stays_usable(
    caller: Caller, connection: Connection
) -> None:
    first = caller(enqueue, "send", idempotency_key="k")
    with pytest.raises(DuplicateJobError) as caught:
        caller(enqueue, "send", idempotency_key="k", on_conflict="raise")
    assert caught.value.id == first.id
    other = caller(enqueue, "send")
    caller.commit()
    assert [row.id for row in all_jobs(connection)] == [first.id, other.id]


def test_many_jobs_have_ids_in_the_order_given(caller: Caller, connection: Connection) -> None:
    results = caller(enqueue_many, "send", [{"n": n, "t": TEXTS} for n in range(50)], priority=7)
    caller.commit()
    assert all(result.created for result in results)
    rows = all_jobs(connection)
    assert [row.id for row in rows] == [result.id for result in results]
    assert [row.payload for row in rows] == [{"n": n, "t": TEXTS} for n in range(50)]
    assert {row.priority for row in rows} == {7}


def test_each_of_many_jobs_may_have_options_of_its_own(
    caller: Caller, connection: Connection
) -> None:
    results = caller(
        enqueue_many,
        "send",
        [
            {"plain": 1},
            Row({"a": 1}, queue='q"1', priority=9, run_at=LATER, max_attempts=2, tenant="o'x"),
            Row({"b": 1}, delay=60, idempotency_key="k{}", unique_key="u,\\"),
            Row(delay=dt.timedelta(hours=1)),
            Row(),
        ],
        queue="common",
        run_at=LATER,
    )
    caller.commit()
    plain, every, delayed, hour, empty = (job(connection, result.id) for result in results)
    assert (plain.queue, plain.run_at, plain.tenant, plain.max_attempts) == (
        "common",
        LATER,
        None,
        20,
    )
    assert (every.queue, every.priority, every.tenant) == ('q"1', 9, "o'x")
    assert (every.run_at, every.max_attempts) == (LATER, 2)
    assert (delayed.idempotency_key, delayed.unique_key) == ("k{}", "u,\\")
    assert delayed.run_at - delayed.created_at == dt.timedelta(minutes=1)
    assert hour.run_at - hour.created_at == dt.timedelta(hours=1)
    assert (empty.payload, empty.run_at) == ({}, LATER)


def test_duplicates_in_one_call_and_from_before_are_reported_in_their_place(
    caller: Caller, connection: Connection
) -> None:
    before = caller(enqueue, "send", {"n": "before"}, idempotency_key="old", unique_key="one")
    caller.commit()
    results = caller(
        enqueue_many,
        "send",
        [
            Row({"n": 0}, idempotency_key="new"),
            Row({"n": 1}, idempotency_key="old"),
            Row({"n": 2}),
            Row({"n": 3}, idempotency_key="new"),
            Row({"n": 4}, unique_key="one"),
            Row({"n": 5}, unique_key="two"),
            Row({"n": 6}, unique_key="two", idempotency_key="other"),
            Row({"n": 7}),
        ],
    )
    caller.commit()
    assert [result.created for result in results] == [
        True, False, True, False, False, True, False, True,
    ]  # fmt: skip
    assert results[1].id == results[4].id == before.id
    assert results[3].id == results[0].id
    assert results[6].id == results[5].id
    payloads = {row.id: row.payload["n"] for row in all_jobs(connection)}
    created = {result.id: n for n, result in enumerate(results) if result.created}
    assert payloads == {before.id: "before", **created}


def test_no_payloads_are_no_jobs(caller: Caller) -> None:
    assert caller(enqueue_many, "send", []) == []
    assert caller(enqueue_many, "send", iter([])) == []


NUMBERS = values(
    column("n", Integer), column("name", String), column("key", String), name="numbers"
).data([(1, "one", "k1"), (2, "two", "k2"), (3, "three", "k1")])


def parsed(time: str) -> dt.datetime:
    """Read ISO 8601 text as PostgreSQL writes it, without trailing zeros of the fraction."""
    seconds, dot, rest = time.partition(".")
    if not dot:
        return dt.datetime.fromisoformat(time)
    fraction, sign, offset = rest.partition("+")
    return dt.datetime.fromisoformat(f"{seconds}.{fraction:0<6}{sign}{offset}")


def test_jobs_come_from_a_select(caller: Caller, connection: Connection) -> None:
    query = select(
        NUMBERS.c.n,
        NUMBERS.c.name,
        func.now().label("at"),
        NUMBERS.c.key.label("sa_jobs_idempotency_key"),
    ).order_by(NUMBERS.c.n)
    assert caller(enqueue_from_select, "send", query, queue="mail", delay=60) == 2
    assert caller(enqueue_from_select, "send", query) == 0
    caller.commit()
    rows = all_jobs(connection)
    assert [(row.payload["n"], row.payload["name"]) for row in rows] == [(1, "one"), (2, "two")]
    assert all(parsed(row.payload["at"]).tzinfo for row in rows)
    assert [row.idempotency_key for row in rows] == ["k1", "k2"]
    assert {row.queue for row in rows} == {"mail"}
    assert all(row.run_at - row.created_at == dt.timedelta(minutes=1) for row in rows)


def test_a_select_may_have_more_columns_than_one_function_takes_arguments(
    caller: Caller, connection: Connection
) -> None:
    one = table("sa_jobs_step")
    query = select(*((NUMBERS.c.n + i).label(f"c{i}") for i in range(120))).where(
        NUMBERS.c.n == 1, select(1).select_from(one).exists()
    )
    assert caller(enqueue_from_select, "send", query) == 1
    caller.commit()
    (row,) = all_jobs(connection)
    assert row.payload == {f"c{i}": i + 1 for i in range(120)}


def test_a_ready_job_is_cancelled_once(caller: Caller, connection: Connection) -> None:
    ready = add(connection)
    assert caller(cancel, ready) == "cancelled"
    assert caller(cancel, ready) == "final"
    assert caller(cancel, ready + 1) == "missing"
    caller.commit()
    row = job(connection, ready)
    assert (row.status, row.finished_at is not None) == ("cancelled", True)


def test_a_running_job_is_asked_to_cancel(caller: Caller, connection: Connection) -> None:
    running = add(
        connection, status="running", locked_by="w", leased_until=LATER, attempts=1, claim_no=1
    )
    assert caller(cancel, running) == "requested"
    first = caller.execute(select(Job.cancel_requested_at)).scalar()
    assert caller(cancel, running) == "requested"
    caller.commit()
    row = job(connection, running)
    assert (row.status, row.finished_at, row.cancel_requested_at) == ("running", None, first)


@pytest.mark.parametrize("status", ["dead", "cancelled"])
def test_a_dead_or_cancelled_job_can_be_retried(
    caller: Caller, connection: Connection, status: str
) -> None:
    ended = add(
        connection,
        status=status,
        attempts=20,
        claim_no=20,
        last_error="x",
        finished_at=func.now(),
        cancel_requested_at=func.now(),
    )
    assert caller(retry, ended, delay=60) == "ready"
    assert caller(retry, ended) == "refused"
    assert caller(retry, ended + 1) == "missing"
    caller.commit()
    row = job(connection, ended)
    assert (row.status, row.attempts, row.claim_no) == ("ready", 0, 20)
    assert (row.last_error, row.finished_at, row.cancel_requested_at) == (None, None, None)
    assert row.run_at - row.updated_at == dt.timedelta(minutes=1)


def test_a_retry_is_refused_while_a_live_twin_holds_the_unique_key(
    caller: Caller, connection: Connection
) -> None:
    dead = add(connection, status="dead", unique_key="k")
    twin = add(connection, unique_key="k")
    assert caller(retry, dead) == "duplicate"
    other = caller(enqueue, "send")
    caller.commit()
    assert [row.status for row in all_jobs(connection)] == ["dead", "ready", "ready"]
    change(connection, twin, status="done")
    assert caller(retry, dead) == "ready"
    caller.commit()
    assert job(connection, other.id).status == "ready"


@pytest.mark.parametrize("status", ["done", "dead", "cancelled"])
def test_a_unique_key_is_free_once_its_job_has_ended(connection: Connection, status: str) -> None:
    add(connection, status=status, unique_key="k")
    assert enqueue(connection, "send", unique_key="k").created


@pytest.mark.parametrize("status", ["done", "dead", "cancelled", "ready"])
def test_an_idempotency_key_is_taken_in_any_state(connection: Connection, status: str) -> None:
    holder = add(connection, status=status, idempotency_key="k")
    choices: tuple[Literal["existing", "replace"], ...] = ("existing", "replace")
    for on_conflict in choices:
        assert enqueue(
            connection,
            "send",
            {"a": 1},
            idempotency_key="k",
            on_conflict=on_conflict,
        ) == Enqueued(holder, created=False)
    assert job(connection, holder).payload == ({"a": 1} if status == "ready" else {})


def test_a_running_job_is_not_replaced(connection: Connection) -> None:
    holder = add(connection, status="running", locked_by="w", leased_until=LATER, unique_key="k")
    result = enqueue(connection, "send", {"a": 1}, unique_key="k", on_conflict="replace")
    assert result == Enqueued(holder, created=False)
    assert job(connection, holder).payload == {}


def test_where_two_jobs_hold_the_two_keys_the_idempotency_key_decides(
    connection: Connection,
) -> None:
    by_unique_key = add(connection, unique_key="u")
    by_idempotency_key = add(connection, idempotency_key="i")
    result = enqueue(connection, "send", idempotency_key="i", unique_key="u")
    assert result.id == by_idempotency_key != by_unique_key


def test_the_registry_gives_its_handlers_policy(caller: Caller, connection: Connection) -> None:
    jobs = Jobs()

    @jobs.handler("mail.send", queue="mail", priority=4, max_attempts=8)
    def send(n: int) -> None: ...

    one = caller(jobs.enqueue, send, {"n": 1}, idempotency_key="k")
    same = caller(jobs.enqueue, "mail.send", {"n": 2}, idempotency_key="k")
    many = caller(jobs.enqueue_many, send, [{"n": 1}, Row({"n": 2}, priority=5)])
    count = caller(jobs.enqueue_from_select, send, select(NUMBERS.c.n))
    explicit = caller(jobs.enqueue, send, {"n": 1}, queue="q", priority=0, max_attempts=1)
    assert caller(jobs.cancel, explicit.id) == "cancelled"
    assert caller(jobs.retry, explicit.id) == "ready"
    caller.commit()
    assert same == Enqueued(one.id, created=False)
    assert count == 3
    rows = all_jobs(connection)
    assert [row.id for row in rows][:3] == [one.id, many[0].id, many[1].id]
    policies = [(row.handler, row.queue, row.priority, row.max_attempts) for row in rows]
    policy = ("mail.send", "mail", 4, 8)
    assert policies == [
        policy,
        policy,
        ("mail.send", "mail", 5, 8),
        policy,
        policy,
        policy,
        ("mail.send", "q", 0, 1),
    ]
