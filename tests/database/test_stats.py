"""What there is to watch: counts, ages, live workers, jobs that nobody takes; each look bounded."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    MetaData,
    create_engine,
    func,
    insert,
    select,
    text,
)

from sa_jobs import InvalidJobError, InvalidJobTypeError, attach, enqueue, stats
from sa_jobs.models import DEFAULT_TABLES, STATES
from sa_jobs.stats import Count, DueJobs, QueueDepth
from tests.database.callers import Caller
from tests.support.jobs import add

MINUTE = dt.timedelta(minutes=1)
NOT_HELD: dict[str, Any] = {}
HELD: dict[str, Any] = {"locked_by": "worker-1", "leased_until": func.now() + MINUTE}


def add_many(connection: Connection, count: int, **values: Any) -> None:
    """Insert jobs that differ by their id alone, and commit."""
    row = {"queue": "default", "handler": "send", **values}
    source = select(*(v if hasattr(v, "compare") else text(f"'{v}'") for v in row.values()))
    rows = source.select_from(func.generate_series(1, count))
    connection.execute(insert(DEFAULT_TABLES.jobs).from_select(list(row), rows))
    connection.commit()


def add_worker(
    connection: Connection,
    pid: int = 1,
    *,
    queues: tuple[str, ...] = ("default",),
    handlers: tuple[str, ...] = ("send",),
    seen: dt.timedelta = dt.timedelta(),
    alive_for: dt.timedelta = MINUTE,
) -> None:
    connection.execute(
        insert(DEFAULT_TABLES.workers).values(
            id=f"host:{pid}",
            host="host",
            pid=pid,
            version="0",
            queues=queues,
            handlers=handlers,
            concurrency=8,
            running=3,
            heartbeat_at=func.now() - seen,
            alive_until=func.now() + alive_for,
        )
    )
    connection.commit()


def depths(connection: Connection, **options: Any) -> dict[str, QueueDepth]:
    found = stats.queue_depths(connection, **options)
    connection.commit()
    assert [depth.queue for depth in found] == sorted(depth.queue for depth in found)
    return {depth.queue: depth for depth in found}


# --- depths -------------------------------------------------------------------------------------


def test_without_jobs_there_is_nothing_to_show(connection: Connection) -> None:
    assert stats.queue_depths(connection) == []
    assert stats.due_jobs(connection) == []
    assert stats.live_workers(connection) == []
    assert stats.dead_jobs(connection) == Count(0)
    assert stats.expired_leases(connection) == Count(0)


def test_a_queue_shows_due_scheduled_and_running_jobs_and_the_oldest_due_ones_age(
    connection: Connection,
) -> None:
    add(connection, run_at=func.now() - 2 * MINUTE, priority=-5)
    add(connection, run_at=func.now() - MINUTE, priority=7)
    add(connection, run_at=func.now() + MINUTE)
    add(connection, run_at=func.now() + MINUTE, priority=7)
    add(connection, run_at=func.now() + MINUTE, priority=7)
    add(connection, status="running", **HELD)
    add(connection, queue="later", run_at=func.now() + MINUTE)
    add(connection, queue="busy", status="running", **HELD)
    for state in ("done", "dead", "cancelled"):
        add(connection, queue="over", status=state)

    found = depths(connection)

    assert found.keys() == {"default", "later", "busy"}
    default = found["default"]
    assert (default.ready, default.scheduled, default.running) == (Count(2), Count(3), Count(1))
    assert default.oldest_ready_seconds is not None
    assert 120 <= default.oldest_ready_seconds < 180
    assert found["later"] == QueueDepth("later", Count(0), Count(1), Count(0), None)
    assert found["busy"] == QueueDepth("busy", Count(0), Count(0), Count(1), None)


@pytest.mark.parametrize("queue", ["", " x", "a'x", 'a"b', "a;drop table", "é" * 40, "Z", "a", "ä"])
def test_queues_of_any_name_are_told_apart(connection: Connection, queue: str) -> None:
    add(connection, queue="m")
    add(connection, queue=queue)
    add(connection, queue=queue + "~")

    found = stats.queue_depths(connection)

    assert {depth.queue: depth.ready.value for depth in found} == {
        "m": 1,
        queue: 1,
        queue + "~": 1,
    }


def test_counting_stops_at_the_cap_and_says_so(connection: Connection) -> None:
    add_many(connection, 6)
    add_many(connection, 5, run_at=func.now() + MINUTE)
    add_many(connection, 6, status="dead")
    add_many(connection, 6, status="running", locked_by="w", leased_until=func.now() - MINUTE)

    (depth,) = depths(connection, cap=5).values()

    assert (depth.ready, depth.scheduled) == (Count(5, capped=True), Count(5))
    assert depth.running == Count(5, capped=True)
    assert stats.dead_jobs(connection, cap=5) == Count(5, capped=True)
    assert stats.dead_jobs(connection, cap=6) == Count(6)
    assert stats.expired_leases(connection, cap=5) == Count(5, capped=True)
    assert str(Count(5, capped=True)) == "5+"
    assert str(Count(5)) == "5"


def test_a_lease_is_expired_once_it_has_run_out(connection: Connection) -> None:
    add(connection, status="running", locked_by="w", leased_until=func.now() - MINUTE)
    add(connection, status="running", **HELD)

    assert stats.expired_leases(connection) == Count(1)


def test_dead_jobs_are_counted_alone(connection: Connection) -> None:
    for state in STATES:
        add(connection, status=state, **(HELD if state == "running" else NOT_HELD))

    assert stats.dead_jobs(connection) == Count(1)


# --- workers and the jobs that none of them takes -----------------------------------------------


def test_only_workers_within_their_time_are_alive(connection: Connection) -> None:
    add_worker(connection, 20, queues=("mail", "b"), handlers=("send",), seen=MINUTE)
    add_worker(connection, 3)
    add_worker(connection, 4, alive_for=-MINUTE)

    three, twenty = stats.live_workers(connection)

    assert (three.pid, twenty.pid) == (3, 20)
    assert (twenty.queues, twenty.handlers) == (("mail", "b"), ("send",))
    assert (twenty.running, twenty.concurrency) == (3, 8)
    assert 60 <= twenty.heartbeat_age_seconds < 120
    assert twenty.heartbeat_at.utcoffset() is not None


def test_due_jobs_are_counted_for_each_handler(connection: Connection) -> None:
    add_many(connection, 3, handler="a")
    add_many(connection, 2, handler="b", priority=5)
    add_many(connection, 4, handler="a", priority=5)
    add_many(connection, 1, handler="a", queue="other")
    add_many(connection, 9, handler="later", run_at=func.now() + MINUTE)

    assert stats.due_jobs(connection) == [
        DueJobs("default", "a", Count(7)),
        DueJobs("default", "b", Count(2)),
        DueJobs("other", "a", Count(1)),
    ]


def test_of_more_due_jobs_than_the_cap_the_next_ones_are_looked_at(connection: Connection) -> None:
    add_many(connection, 5, handler="late")
    add_many(connection, 3, handler="early", run_at=func.now() - MINUTE)

    assert stats.due_jobs(connection, cap=4) == [
        DueJobs("default", "early", Count(3, capped=True)),
        DueJobs("default", "late", Count(1, capped=True)),
    ]


def test_jobs_without_a_worker_are_named_by_what_is_missing(connection: Connection) -> None:
    add_worker(connection, 1, queues=("default",), handlers=("send",))
    add_worker(connection, 2, queues=("reports",), handlers=("report",))
    for queue, handler, count in (
        ("default", "send", 1),
        ("default", "unknown", 3),
        ("misspelt", "send", 2),
        ("misspelt", "unknown", 1),
        ("default", "report", 1),
    ):
        add_many(connection, count, queue=queue, handler=handler)

    found = stats.unserved(stats.due_jobs(connection), stats.live_workers(connection))

    assert list(map(str, found)) == [
        "4 ready jobs, no live worker for handler unknown",
        "2 ready jobs, no live worker for queue misspelt",
        "1 ready job, no live worker for handler report on queue default",
    ]


# --- what only plain SQL writes -----------------------------------------------------------------

# From the first year to about now, in seconds.
AGES = 60e9


@pytest.mark.parametrize("first", ["-infinity", "4713-01-01 BC", "0001-01-01 00:00:00+00"])
def test_ages_of_times_that_no_datetime_can_hold_are_numbers(
    caller: Caller, connection: Connection, first: str
) -> None:
    for moment in (first, "infinity", "294276-01-01"):
        add(connection, run_at=text(f"timestamptz '{moment}'"))
    running = {"status": "running", "locked_by": "w"}
    add(connection, leased_until=text(f"timestamptz '{first}'"), **running)
    add(connection, leased_until=text("timestamptz 'infinity'"), **running)

    (depth,) = caller(stats.queue_depths)

    assert (depth.ready, depth.scheduled, depth.running) == (Count(1), Count(2), Count(2))
    assert AGES < depth.oldest_ready_seconds < AGES * 2
    assert caller(stats.expired_leases) == Count(1)
    assert caller(stats.due_jobs) == [DueJobs("default", "send", Count(1))]


def test_workers_with_times_that_no_datetime_can_hold_are_shown(
    caller: Caller, connection: Connection
) -> None:
    for pid, moment in enumerate(("infinity", "-infinity"), start=1):
        add_worker(connection, pid)
        connection.execute(
            text(
                f"UPDATE sa_jobs_workers SET started_at = '{moment}', heartbeat_at = '{moment}',"
                f" alive_until = 'infinity' WHERE pid = {pid}"
            )
        )
    connection.commit()

    late, early = caller(stats.live_workers)

    assert (late.started_at.year, early.started_at.year) == (9999, 1)
    assert (late.heartbeat_at.year, early.heartbeat_at.year) == (9999, 1)
    assert -AGES * 8 < late.heartbeat_age_seconds < -AGES
    assert AGES < early.heartbeat_age_seconds < AGES * 2


@pytest.mark.parametrize("written", ["1" + "0" * 5_000, "[" * 2_000 + "]" * 2_000, "{}", "null"])
def test_a_worker_whose_names_cannot_be_read_has_none(connection: Connection, written: str) -> None:
    add_worker(connection)
    connection.execute(
        text("UPDATE sa_jobs_workers SET handlers = CAST(:written AS jsonb)"), {"written": written}
    )

    (worker,) = stats.live_workers(connection)

    assert (worker.queues, worker.handlers) == (("default",), ())


@pytest.mark.parametrize("cap", [0, -1, 2**63, True])
@pytest.mark.parametrize(
    "look", [stats.queue_depths, stats.dead_jobs, stats.expired_leases, stats.due_jobs]
)
def test_a_cap_that_cannot_be_is_refused_before_any_sql(
    engine: Engine, look: Any, cap: int
) -> None:
    with engine.connect() as connection:
        with pytest.raises((InvalidJobError, InvalidJobTypeError), match="cap must be "):
            look(connection, cap=cap)
        assert not connection.in_transaction()


# --- every caller, any engine, any size ---------------------------------------------------------


def test_every_kind_of_session_and_connection_can_look(
    caller: Caller, connection: Connection
) -> None:
    add_many(connection, 3)
    add(connection, status="dead")
    add_worker(connection)

    (depth,) = caller(stats.queue_depths)
    assert depth.ready == Count(3)
    assert caller(stats.due_jobs) == [DueJobs("default", "send", Count(3))]
    assert caller(stats.dead_jobs) == Count(1)
    assert caller(stats.expired_leases) == Count(0)
    (worker,) = caller(stats.live_workers)
    assert worker.handlers == ("send",)


def test_the_callers_planner_settings_are_put_back(connection: Connection) -> None:
    settings = select(
        *(func.current_setting(name) for name in ("enable_bitmapscan", "enable_seqscan", "jit"))
    )
    connection.execute(text("SET LOCAL jit = off"))
    before = connection.execute(settings).one()

    stats.queue_depths(connection)
    stats.due_jobs(connection)
    stats.dead_jobs(connection)

    assert connection.execute(settings).one() == before


LOOKS = (stats._waiting, stats._running, stats._due_by_handler, stats._dead, stats._expired)


def nodes(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [plan, *(node for part in plan.get("Plans", []) for node in nodes(part))]


def explain(connection: Connection, statement: Executable, enough: int) -> list[dict[str, Any]]:
    compiled = statement.compile(dialect=connection.dialect)  # type: ignore[attr-defined]
    (plan,) = connection.exec_driver_sql(
        f"EXPLAIN (ANALYZE, FORMAT JSON) {compiled}", {"enough": enough}
    ).scalar_one()
    assert "JIT" not in plan
    return nodes(plan["Plan"])


@pytest.mark.slow
@pytest.mark.parametrize("analyzed", [False, True], ids=["stale statistics", "analyzed"])
def test_no_look_reads_more_rows_than_its_cap_however_many_there_are(
    connection: Connection, analyzed: bool
) -> None:
    connection.execute(text("ALTER TABLE sa_jobs SET (autovacuum_enabled = false)"))
    connection.execute(text("ANALYZE sa_jobs"))
    add_many(connection, 60_000, status="done")
    add_many(connection, 20_000, run_at=func.now() + MINUTE)
    add_many(connection, 20_000, queue="big")
    add_many(connection, 3_000, status="dead")
    add_many(connection, 3_000, status="running", locked_by="w", leased_until=func.now() - MINUTE)
    if analyzed:
        connection.execute(text("ANALYZE sa_jobs"))
        connection.commit()
    enough = 100

    for look in LOOKS:
        with stats._by_index(connection):
            plan = explain(connection, look(DEFAULT_TABLES), enough)
        scans = [node for node in plan if node.get("Relation Name") == "sa_jobs"]
        assert scans
        for node in scans:
            assert node["Node Type"] in ("Index Scan", "Index Only Scan")
            assert node["Actual Rows"] <= enough
            assert node.get("Rows Removed by Filter", 0) == 0


@pytest.mark.parametrize("name", ["queue", "user", "Order", "enough"])
def test_tables_of_any_name_can_be_looked_at(empty_database: str, name: str) -> None:
    metadata = MetaData()
    tables = attach(metadata, name=name)
    engine = create_engine(empty_database)
    metadata.create_all(engine)
    with engine.begin() as connection:
        enqueue(connection, "send", tables=tables)

        (depth,) = stats.queue_depths(connection, tables=tables)
        assert depth.ready == Count(1)
        assert stats.due_jobs(connection, tables=tables) == [DueJobs("default", "send", Count(1))]
        assert stats.dead_jobs(connection, tables=tables) == Count(0)
    engine.dispose()


def test_an_engines_own_json_deserializer_changes_nothing(database_url: str) -> None:
    engine = create_engine(database_url, json_deserializer=json.dumps)
    with engine.connect() as connection:
        add_worker(connection, queues=("a", "b"))
        (worker,) = stats.live_workers(connection)
    engine.dispose()

    assert worker.queues == ("a", "b")
