"""Jobs from a SELECT of the caller's: its names are its own, and its data may be anything."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    Integer,
    bindparam,
    column,
    func,
    insert,
    literal,
    literal_column,
    select,
    table,
    text,
    union_all,
)
from sqlalchemy.exc import StatementError
from sqlalchemy.types import String

from sa_jobs import InvalidJobError, enqueue, enqueue_from_select, presence
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.statements import ENQUEUE_COLUMNS
from tests.database.callers import Caller
from tests.database.conftest import ServerLog
from tests.support.gates import gates_held_open
from tests.support.jobs import all_jobs

# Without a parameter of its own, so that each name is free for the test's.
orders: Any = (
    text("SELECT 1 AS id, 'acme' AS tenant UNION ALL SELECT 2, 'other'")
    .columns(id=Integer, tenant=String)
    .subquery("orders")
)
OUR_PARAMETERS = [
    *ENQUEUE_COLUMNS,
    "delay",
    "param_1",
    "now",
    "seconds",
    "left_1",
    "convert_to_1",
    "sa_jobs_queue",
    "sa_jobs_tenant",
]
WITH_OPTION = [True, False]


def query_of(*conditions: Any, with_option: bool = False) -> Any:
    option: list[Any] = [literal_column("'mine'").label("sa_jobs_queue")] if with_option else []
    return select(orders.c.id, *option).where(*conditions)


def added(connection: Connection) -> list[Any]:
    return [row.payload for row in all_jobs(connection)]


@pytest.mark.parametrize("with_option", WITH_OPTION)
def test_a_parameter_of_the_callers_may_have_any_name(
    caller: Caller, connection: Connection, with_option: bool
) -> None:
    for name in OUR_PARAMETERS:
        bound = orders.c.tenant == bindparam(name, value="acme")
        query = query_of(bound, with_option=with_option)
        assert caller(enqueue_from_select, "send", query, queue="q", tenant="t") == 1
        query = query_of(text(f"orders.tenant = :{name}"), with_option=with_option)
        query = query.params({name: "acme"})
        assert caller(enqueue_from_select, "send", query, queue="q", tenant="t") == 1
    caller.commit()
    rows = all_jobs(connection)
    assert [row.payload for row in rows] == [{"id": 1}] * (2 * len(OUR_PARAMETERS))
    queue = "mine" if with_option else "q"
    assert {(row.queue, row.tenant, row.handler) for row in rows} == {(queue, "t", "send")}


def test_a_parameter_without_a_value_is_refused_and_never_takes_one_of_ours(
    connection: Connection,
) -> None:
    for name in OUR_PARAMETERS:
        query = query_of(orders.c.tenant == bindparam(name, type_=String))
        with pytest.raises(StatementError, match=f"bind parameter '{name}'"):
            enqueue_from_select(connection, "send", query, queue="acme", tenant="acme")
    assert enqueue(connection, "send").created


def test_two_selects_of_one_shape_keep_their_values_apart(connection: Connection) -> None:
    """SQLAlchemy compiles them once; the call's options are no part of that."""
    for number in range(3):
        tenant: Any = bindparam("tenant", value=("acme", "other")[number % 2])
        enqueue_from_select(
            connection, f"send-{number}", query_of(orders.c.tenant == tenant), tenant=f"t{number}"
        )
    assert [(row.handler, row.tenant, row.payload["id"]) for row in all_jobs(connection)] == [
        ("send-0", "t0", 1),
        ("send-1", "t1", 2),
        ("send-2", "t2", 1),
    ]


@pytest.mark.parametrize("with_option", WITH_OPTION)
@pytest.mark.parametrize("name", ["source", "given", "refused", "added", "anon_1", "excluded"])
def test_a_table_and_a_cte_of_the_callers_may_have_any_name(
    connection: Connection, name: str, with_option: bool
) -> None:
    connection.execute(text(f"CREATE TEMP TABLE {name} AS SELECT 5 AS id"))
    option = [literal("k").label("sa_jobs_tenant")] if with_option else []
    own = table(name, column("id", Integer))
    assert enqueue_from_select(connection, "send", select(own.c.id, *option)) == 1
    nested = select(literal(6).label("id")).cte(name)
    assert enqueue_from_select(connection, "send", select(nested.c.id, *option)) == 1
    payloads = [row.payload for row in all_jobs(connection)]
    assert payloads == [{"id": 5}, {"id": 6}]
    connection.execute(text(f"DROP TABLE {name}"))
    connection.commit()


def test_a_select_with_an_option_may_be_of_any_kind(connection: Connection) -> None:
    key: Any = literal_column("'k' || n").label("sa_jobs_unique_key")
    numbers = func.generate_series(1, 3).table_valued("n").render_derived("numbers")
    counting = select(literal(10).label("n")).cte("counting", recursive=True)
    counting = counting.union_all(select(counting.c.n + 1).where(counting.c.n < 12))
    connection.execute(text("CREATE TEMP TABLE fresh (n int)"))
    fresh = table("fresh", column("n", Integer))
    moved = insert(fresh).values(n=30).returning(fresh.c.n).cte("moved")
    queries: list[Any] = [
        select(numbers.c.n, key).order_by(numbers.c.n),
        select(counting.c.n, key),
        union_all(
            select(literal(20).label("n"), literal("k20").label("sa_jobs_unique_key")),
            select(literal(21).label("n"), literal("k21").label("sa_jobs_unique_key")),
        ),
        select(moved.c.n, key),
        select(fresh.c.n, literal("k31").label("sa_jobs_unique_key")).with_for_update(),
    ]
    counts = [enqueue_from_select(connection, "send", query) for query in queries]
    again = [enqueue_from_select(connection, "send", query) for query in queries[:3]]
    connection.execute(text("DROP TABLE fresh"))
    assert (counts, again) == ([3, 3, 2, 1, 1], [0, 0, 0])
    assert [payload["n"] for payload in added(connection)] == [
        1, 2, 3, 10, 11, 12, 20, 21, 30, 30,
    ]  # fmt: skip


REFUSED = {
    "an empty queue": ("queue", "''"),
    "an over-long queue": ("queue", "repeat('é', 101)"),
    "a control character in the queue": ("queue", "E'a\\nb'"),
    "a late control character": ("queue", "chr(133)"),
    "an empty tenant": ("tenant", "''"),
    "an over-long tenant": ("tenant", "repeat('x', 201)"),
    "a priority too high": ("priority", "32768"),
    "a priority too low": ("priority", "-32769"),
    "a priority beyond bigint": ("priority", "1e30::numeric"),
    "no number as priority": ("priority", "'NaN'::float8"),
    "an endless time": ("run_at", "timestamptz 'infinity'"),
    "a time before all": ("run_at", "timestamptz '-infinity'"),
    "a time that no datetime can hold": ("run_at", "timestamptz '10000-01-01 00:00+00'"),
    "a time before Christ": ("run_at", "timestamptz '0044-03-15 00:00+00 BC'"),
    "an endless day": ("run_at", "date 'infinity'"),
    "an empty idempotency key": ("idempotency_key", "''"),
    "an over-long idempotency key": ("idempotency_key", "repeat('é', 251)"),
    "an empty unique key": ("unique_key", "''"),
    # Too long for the index, however well it is compressed.
    "a unique key of random text": (
        "unique_key",
        "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 400) AS g)",
    ),
}


@pytest.mark.parametrize(("option", "value"), REFUSED.values(), ids=REFUSED)
def test_an_option_that_the_queue_cannot_hold_adds_nothing_and_harms_nothing(
    connection: Connection, server_log: ServerLog, option: str, value: str
) -> None:
    """The last of three rows is the bad one."""
    before = enqueue(connection, "send", {"before": 1})
    bad: Any = literal_column(f"CASE WHEN orders.id = 2 THEN {value} END").label(
        f"sa_jobs_{option}"
    )
    with pytest.raises(InvalidJobError, match=f"as sa_jobs_{option}, which must be .*nothing"):
        enqueue_from_select(connection, "send", select(orders.c.id, bad))
    after = enqueue(connection, "send", {"after": 1})
    rows = all_jobs(connection)
    assert [row.id for row in rows] == [before.id, after.id]
    assert server_log.errors() == []


def test_a_refusal_is_told_on_every_driver(caller: Caller, connection: Connection) -> None:
    bad = select(orders.c.id, literal("").label("sa_jobs_queue"))
    with pytest.raises(InvalidJobError, match="the select gives '' as sa_jobs_queue, which must"):
        caller(enqueue_from_select, "send", bad)
    fine = select(orders.c.id, orders.c.tenant.label("sa_jobs_tenant")).order_by(orders.c.id)
    assert caller(enqueue_from_select, "send", fine) == 2
    caller.commit()
    assert [row.tenant for row in all_jobs(connection)] == ["acme", "other"]


ALLOWED = {
    "the longest queue": ("queue", "repeat('é', 100)"),
    "the highest priority": ("priority", "32767"),
    "the lowest priority": ("priority", "-32768"),
    "the longest key": ("unique_key", "repeat('é', 250)"),
    "a key with a control character": ("idempotency_key", "E'a\\nb'"),
    "the first time": ("run_at", "timestamptz '0001-01-02 00:00+00'"),
    "the last time": ("run_at", "timestamptz '9999-12-30 23:59:59.999999+00'"),
    "letters of an escape": ("queue", "'u0001-u001f'"),
}


@pytest.mark.parametrize(("option", "value"), ALLOWED.values(), ids=ALLOWED)
def test_an_option_at_the_edge_of_what_the_queue_holds_is_added(
    connection: Connection, option: str, value: str
) -> None:
    query: Any = select(literal(1).label("n"), literal_column(value).label(f"sa_jobs_{option}"))
    assert enqueue_from_select(connection, "send", query) == 1


def test_the_select_is_evaluated_once(connection: Connection) -> None:
    connection.execute(text("CREATE TEMP SEQUENCE counter"))
    query: Any = select(
        func.nextval("counter").label("n"), orders.c.tenant.label("sa_jobs_tenant")
    ).select_from(orders)
    assert enqueue_from_select(connection, "send", query) == 2
    assert connection.execute(select(func.nextval("counter"))).scalar() == 3
    connection.execute(text("DROP SEQUENCE counter"))
    assert [payload["n"] for payload in added(connection)] == [1, 2]


def test_workers_are_woken_by_jobs_of_a_select_with_options(
    engine: Engine, connection: Connection, database_url: str
) -> None:
    """The trigger sees rows that a CTE inserts as it sees all others."""
    with (
        gates_held_open(database_url, "acme"),
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as listener,
    ):
        presence.listen(listener, presence.channel_name(listener, DEFAULT_TABLES))
        query = select(orders.c.id, orders.c.tenant.label("sa_jobs_queue"))
        assert enqueue_from_select(connection, "send", query) == 2
        connection.commit()
        raw: Any = listener.connection.driver_connection
        heard = list(raw.notifies(timeout=20, stop_after=1))
    assert len(heard) == 1
