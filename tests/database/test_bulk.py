"""Many jobs at once, and values of every kind through the database and back."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from sqlalchemy import Connection, Engine, Integer, cast, column, event, func, literal, select

from sa_jobs import Row, enqueue, enqueue_from_select, enqueue_many
from sa_jobs.inserts import PAYLOADS_PER_STATEMENT, ROWS_PER_STATEMENT
from sa_jobs.models import DEFAULT_TABLES, Job
from sa_jobs.statements import OPTION_LABELS
from tests.support.jobs import all_jobs, claim
from tests.unit.test_jsontext import EQUAL, json_values


def test_twenty_thousand_jobs_keep_their_order_and_report_duplicates(
    connection: Connection,
) -> None:
    count = 20_000
    rows = [Row({"n": n}, idempotency_key=f"key {n}") for n in range(count)]
    # Within a statement, and across two.
    duplicates = {10: 3, 4_999: 4_998, 5_000: 4_997, 12_000: 1, 19_999: 0}
    for position, original in duplicates.items():
        rows[position] = Row({"n": position}, idempotency_key=f"key {original}")
    results = enqueue_many(connection, "send", rows)
    assert {n for n, result in enumerate(results) if not result.created} == set(duplicates)
    for position, original in duplicates.items():
        assert results[position].id == results[original].id
    ids = [result.id for result in results if result.created]
    assert ids == sorted(ids)
    numbers = connection.execute(
        select(Job.payload["n"].astext.cast(Integer)).order_by(Job.id)
    ).scalars()
    assert list(numbers) == [n for n in range(count) if n not in duplicates]


def test_a_batch_of_known_keys_alone_adds_nothing(connection: Connection) -> None:
    rows = [Row({"n": n}, unique_key=f"key {n}") for n in range(6_000)]
    first = enqueue_many(connection, "send", rows)
    again = enqueue_many(connection, "send", rows)
    assert [result.id for result in again] == [result.id for result in first]
    assert not any(result.created for result in again)
    assert connection.execute(select(func.count()).select_from(Job)).scalar() == 6_000


def test_large_payloads_go_in_several_statements(engine: Engine, connection: Connection) -> None:
    """In one they would pass what a message to the server, and a value in it, can hold."""
    sizes: list[int] = []

    @event.listens_for(engine, "before_cursor_execute")
    def measure(
        connection: Any, cursor: Any, statement: Any, parameters: Any, context: Any, many: Any
    ) -> None:
        sizes.append(len(parameters["payload"]))

    payload = {"data": "x" * 900_000}
    results = enqueue_many(connection, "send", [payload] * 40)
    event.remove(engine, "before_cursor_execute", measure)
    assert [row.id for row in all_jobs(connection)] == [result.id for result in results]
    assert len(sizes) == 3
    assert max(sizes) < PAYLOADS_PER_STATEMENT + 1_000_000


def test_rows_with_and_without_keys_may_be_in_statements_of_their_own(
    connection: Connection,
) -> None:
    """The first statement has no keys, the second has, and a key that is taken."""
    holder = enqueue(connection, "send", {"n": -1}, unique_key="k")
    rows = [Row({"n": n}) for n in range(ROWS_PER_STATEMENT)]
    rows += [Row({"n": ROWS_PER_STATEMENT}, unique_key="k"), Row({"n": ROWS_PER_STATEMENT + 1})]
    results = enqueue_many(connection, "send", rows)
    assert [n for n, result in enumerate(results) if not result.created] == [ROWS_PER_STATEMENT]
    assert results[ROWS_PER_STATEMENT].id == holder.id
    payloads = {row.id: row.payload["n"] for row in all_jobs(connection)}
    assert all(payloads[result.id] == n for n, result in enumerate(results) if result.created)


def test_jobs_of_a_select_of_many_rows_are_counted(connection: Connection) -> None:
    numbers = func.generate_series(1, 10_000).table_valued("n").render_derived()
    query = select(numbers.c.n, (numbers.c.n % 100).cast(Integer).label("sa_jobs_priority"))
    assert enqueue_from_select(connection, "send", query) == 10_000


@pytest.mark.parametrize("label", sorted(OPTION_LABELS))
def test_a_select_may_leave_an_option_to_the_call(connection: Connection, label: str) -> None:
    """A NULL in an option's column stands for the call's own value."""
    nothing = cast(None, DEFAULT_TABLES.jobs.c[OPTION_LABELS[label]].type)
    query = select(literal(1).label("n"), nothing.label(label))
    assert enqueue_from_select(connection, "send", query, queue="q", priority=3, tenant="t") == 1
    (row,) = all_jobs(connection)
    assert (row.queue, row.priority, row.tenant) == ("q", 3, "t")
    assert row.payload == {"n": 1}
    assert row.run_at == row.created_at


def test_a_select_sets_every_option(connection: Connection) -> None:
    query: Any = select(
        literal(1).label("n"),
        literal("q").label("sa_jobs_queue"),
        literal(-5).label("sa_jobs_priority"),
        (func.now() + func.make_interval(0, 0, 0, 1)).label("sa_jobs_run_at"),
        literal("t").label("sa_jobs_tenant"),
        literal("i").label("sa_jobs_idempotency_key"),
        literal("u").label("sa_jobs_unique_key"),
    )
    assert enqueue_from_select(connection, "send", query, queue="other", priority=3) == 1
    (row,) = all_jobs(connection)
    assert (row.queue, row.priority, row.tenant) == ("q", -5, "t")
    assert (row.idempotency_key, row.unique_key) == ("i", "u")
    assert (row.run_at - row.created_at).days == 1


def test_a_select_of_nothing_adds_nothing(connection: Connection) -> None:
    query: Any = select(column("n")).select_from(func.generate_series(1, 0).alias("n"))
    assert enqueue_from_select(connection, "send", query) == 0


def test_what_a_payload_may_hold_comes_back_equal_from_the_database(
    connection: Connection,
) -> None:
    payload: dict[str, Any] = {str(number): value for number, value in enumerate(EQUAL)}
    enqueue(connection, "send", payload)
    (claimed,) = claim(connection)
    assert claimed.payload == payload
    for key, value in payload.items():
        back = claimed.payload[key]
        assert type(back) is type(value), key
        if isinstance(value, float) and value:
            assert math.isclose(back, value, rel_tol=0)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(json_values)
def test_any_json_value_comes_back_equal_from_the_database(
    connection: Connection, value: Any
) -> None:
    enqueue(connection, "send", {"value": value})
    (claimed,) = claim(connection)
    back = claimed.payload["value"]
    assert back == value
    assert repr(_sorted(back)) == repr(_sorted(value)).replace("-0.0", "0.0")


def _sorted(value: Any) -> Any:
    """Return the value with its keys in order, which jsonb does not keep."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(item) for item in value]
    return value
