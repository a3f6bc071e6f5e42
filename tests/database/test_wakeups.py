"""Notifications: only for due work, only where a worker sleeps, one per queue and transaction."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, MetaData, create_engine, func, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from sa_jobs import attach, cancel, claims, enqueue, enqueue_many, presence, retry
from sa_jobs.claims import Settled
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.outcome import Released
from tests.support.gates import gates_held_open
from tests.support.jobs import add, all_jobs, change, claim

Heard = Callable[[], list[str]]


def hash_of(queue: str) -> str:
    return hashlib.sha256(queue.encode()).hexdigest()[:16]


def listening(database_url: str, channel: str) -> Iterator[Heard]:
    """Listen, and give a function that returns the notifications since its last call.

    A marker that is sent after all else says when everything has arrived.
    """
    conninfo = make_url(database_url).set(drivername="postgresql").render_as_string(False)
    with psycopg.connect(conninfo, autocommit=True) as listener:
        listener.execute(f'LISTEN "{channel}"')

        def heard() -> list[str]:
            with psycopg.connect(conninfo, autocommit=True) as other:
                other.execute("SELECT pg_notify(%s, 'marker')", [channel])
            payloads: list[str] = []
            for notification in listener.notifies(timeout=20):
                if notification.payload == "marker":
                    return payloads
                payloads.append(notification.payload)
            raise AssertionError("the marker did not arrive")

        yield heard


def channel_of(connection: Connection, tables: Tables) -> str:
    channel: Any = connection.execute(presence.channel(tables)).scalar_one()
    connection.commit()
    return str(channel)


@pytest.fixture
def heard(database_url: str, connection: Connection) -> Iterator[Heard]:
    channel = channel_of(connection, DEFAULT_TABLES)
    yield from listening(database_url, channel)


@pytest.fixture
def asleep(database_url: str) -> Iterator[None]:
    with gates_held_open(database_url, "default", "mail"):
        yield


def test_a_commit_wakes_a_sleeping_worker(
    connection: Connection, asleep: None, heard: Heard
) -> None:
    enqueue(connection, "send")
    assert heard() == []
    connection.commit()
    assert heard() == [hash_of("default")]


def test_many_jobs_of_a_queue_wake_it_once(
    connection: Connection, asleep: None, heard: Heard
) -> None:
    enqueue_many(connection, "send", [{}] * 200)
    for queue in ("default", "mail", "mail"):
        enqueue(connection, "send", queue=queue)
    connection.commit()
    assert sorted(heard()) == sorted([hash_of("default"), hash_of("mail")])


def test_a_thousand_calls_in_a_transaction_wake_once(
    connection: Connection, asleep: None, heard: Heard
) -> None:
    for _ in range(1000):
        enqueue(connection, "send")
    connection.commit()
    assert heard() == [hash_of("default")]


def test_plain_sql_wakes_too(connection: Connection, asleep: None, heard: Heard) -> None:
    connection.execute(text("INSERT INTO sa_jobs (queue, handler) VALUES ('mail', 'send')"))
    connection.commit()
    assert heard() == [hash_of("mail")]


def test_nobody_is_woken_where_nobody_sleeps(
    connection: Connection, database_url: str, heard: Heard
) -> None:
    with gates_held_open(database_url, "default"):
        pass
    with gates_held_open(database_url, "mail"):
        enqueue(connection, "send")
        connection.commit()
    assert heard() == []


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_transaction_with_an_old_snapshot_wakes_who_fell_asleep_since(
    engine: Engine, database_url: str, heard: Heard, level: str
) -> None:
    with engine.connect().execution_options(isolation_level=level) as host:
        host.execute(text("SELECT count(*) FROM sa_jobs")).all()
        with gates_held_open(database_url, "default"):
            enqueue(host, "send")
            host.commit()
            assert heard() == [hash_of("default")]


def test_an_open_transaction_keeps_nobody_from_falling_asleep(
    engine: Engine, connection: Connection, database_url: str, heard: Heard
) -> None:
    with engine.connect() as host:
        enqueue(host, "send")
        with gates_held_open(database_url, "default"):
            enqueue(connection, "send")
            connection.commit()
            assert heard() == [hash_of("default")]
        host.rollback()


def test_of_two_who_sleep_on_a_queue_one_holds_its_gate(
    engine: Engine, connection: Connection, database_url: str, heard: Heard
) -> None:
    autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")
    opening = presence.open_gates(DEFAULT_TABLES)
    with autocommit.connect() as other:
        with gates_held_open(database_url, "mail"):
            for _ in range(2):
                found = other.execute(opening, {"queues": ["mail", "default"]})
                assert sorted(map(tuple, found)) == [("default", "self"), ("mail", "other")]
        other.execute(presence.shut_gates())
        enqueue(connection, "send")
        enqueue(connection, "send", queue="mail")
        connection.commit()
        assert heard() == []
        assert tuple(other.execute(opening, {"queues": ["mail"]}).one()) == ("mail", "self")
        other.execute(presence.shut_gates())


def test_work_for_later_wakes_nobody(connection: Connection, asleep: None, heard: Heard) -> None:
    enqueue(connection, "send", delay=60)
    enqueue_many(connection, "send", [{}], delay=60)
    connection.commit()
    assert heard() == []


def test_a_duplicate_wakes_nobody(connection: Connection, asleep: None, heard: Heard) -> None:
    enqueue(connection, "send", idempotency_key="k")
    connection.commit()
    heard()
    enqueue(connection, "send", idempotency_key="k")
    connection.commit()
    assert heard() == []


@pytest.mark.parametrize("scope", ["transaction", "session", "engine", "database"])
def test_notifications_can_be_switched_off(
    database_url: str, connection: Connection, asleep: None, heard: Heard, scope: str
) -> None:
    job_id = add(connection, status="dead")
    if scope == "database":
        name = connection.execute(text("SELECT current_database()")).scalar_one()
        connection.execute(text(f"ALTER DATABASE {name} SET sa_jobs.notify = 'off'"))
        connection.commit()
    options = {"options": "-c sa_jobs.notify=off"} if scope == "engine" else {}
    engine = create_engine(database_url, connect_args=options)
    with Session(engine) as session:
        if scope in ("transaction", "session"):
            local = scope == "transaction"
            session.execute(func.set_config("sa_jobs.notify", "off", local).select())
        enqueue(session, "send")
        retry(session, job_id)
        session.commit()
        assert heard() == []
    engine.dispose()


def test_a_single_call_can_be_kept_quiet(engine: Engine, asleep: None, heard: Heard) -> None:
    with Session(engine) as session, session.begin():
        session.execute(text("SET LOCAL sa_jobs.notify = off"))
        enqueue(session, "send", queue="mail")
        session.execute(text("SET LOCAL sa_jobs.notify = on"))
        enqueue(session, "send")
    assert heard() == [hash_of("default")]


def test_a_rolled_back_savepoint_wakes_nobody(engine: Engine, asleep: None, heard: Heard) -> None:
    with Session(engine) as session:
        with session.begin_nested() as savepoint:
            enqueue(session, "send")
            savepoint.rollback()
        assert heard() == []
        session.commit()
    assert heard() == []


def test_a_released_savepoint_wakes_at_the_commit(
    engine: Engine, asleep: None, heard: Heard
) -> None:
    with Session(engine) as session:
        with session.begin_nested():
            enqueue(session, "send")
        assert heard() == []
        session.commit()
    assert heard() == [hash_of("default")]


def test_what_becomes_ready_again_wakes_too(
    connection: Connection, asleep: None, heard: Heard
) -> None:
    job_id = add(connection, status="dead")
    retry(connection, job_id)
    connection.commit()
    assert heard() == [hash_of("default")]

    (one,) = claim(connection)
    claims.settle(connection, [Settled(one, Released())], worker="worker-1")
    connection.commit()
    assert heard() == [hash_of("default")]

    (one,) = claim(connection)
    change(connection, job_id, leased_until=func.now())
    claims.reclaim(connection)
    connection.commit()
    assert heard() == [hash_of("default")]

    enqueue(connection, "send", delay=60, unique_key="k")
    connection.commit()
    assert heard() == []
    enqueue(connection, "send", unique_key="k", on_conflict="replace")
    connection.commit()
    assert heard() == [hash_of("default")]


def test_what_does_not_become_ready_wakes_nobody(
    connection: Connection, asleep: None, heard: Heard
) -> None:
    add(connection)
    heard()
    (one,) = claim(connection)
    cancel(connection, one.id)
    claims.settle(connection, [Settled(one, Released())], worker="worker-1")
    connection.commit()
    assert heard() == []


@pytest.mark.parametrize("queue", ["o'x", 'a"b', "a$$b", "a\\b", "é" * 100, "a;--", "%s", "{}"])
def test_any_name_of_a_queue_is_woken(
    connection: Connection, database_url: str, heard: Heard, queue: str
) -> None:
    with gates_held_open(database_url, queue):
        enqueue(connection, "send", queue=queue)
        job_id = add(connection, queue=queue, status="dead")
        connection.commit()
        retry(connection, job_id)
        connection.commit()
    assert heard() == [hash_of(queue)] * 2


def test_two_queues_tables_have_channels_of_their_own(
    engine: Engine, connection: Connection, heard: Heard, database_url: str
) -> None:
    host = MetaData()
    other = attach(host, name="Other", schema="Else_where")
    host.create_all(engine)
    channels = [channel_of(connection, tables) for tables in (DEFAULT_TABLES, other)]
    assert len(set(channels)) == 2
    assert all(len(channel) <= 63 for channel in channels)
    for heard_there in listening(database_url, channels[1]):
        with gates_held_open(database_url, "default", tables=other):
            enqueue(connection, "send", tables=other)
            connection.commit()
            assert (heard(), heard_there()) == ([], [hash_of("default")])
            enqueue(connection, "send")
            connection.commit()
            assert (heard(), heard_there()) == ([], [])


def test_our_function_runs_as_its_caller_and_looks_nowhere_else(connection: Connection) -> None:
    rows = connection.execute(
        text("""
            SELECT prosecdef, proconfig FROM pg_proc
            WHERE pronamespace = current_schema()::regnamespace
        """)
    ).all()
    assert [tuple(row) for row in rows] == [(False, ["search_path=pg_catalog, pg_temp"])]


def test_shadows_in_the_callers_search_path_have_no_effect(
    engine: Engine, connection: Connection, asleep: None, heard: Heard
) -> None:
    with engine.connect() as evil:
        evil.execute(text("CREATE SCHEMA evil"))
        evil.execute(text("CREATE TEMP TABLE new_jobs (queue text)"))
        for name, result in (
            ("pg_notify(text, text)", "void"),
            ("pg_try_advisory_lock_shared(bigint)", "boolean"),
            ("pg_advisory_unlock_shared(bigint)", "boolean"),
            ("hashtextextended(text, bigint)", "bigint"),
            ("clock_timestamp()", "timestamptz"),
            ("now()", "timestamptz"),
        ):
            evil.execute(
                text(f"""
                CREATE FUNCTION evil.{name} RETURNS {result} LANGUAGE plpgsql
                AS 'BEGIN RAISE EXCEPTION ''the shadow ran''; END'
            """)
            )
        evil.execute(text("SET search_path = evil, public"))
        enqueued = enqueue(evil, "send")
        assert cancel(evil, enqueued.id) == "cancelled"
        enqueue(evil, "send")
        evil.commit()
        evil.invalidate()
    assert heard() == [hash_of("default")]
    assert [row.status for row in all_jobs(connection)] == ["cancelled", "ready"]


def test_a_role_that_may_only_insert_wakes_too(
    engine: Engine, connection: Connection, database_url: str, asleep: None, heard: Heard
) -> None:
    role = make_url(database_url).database
    for statement in (
        f"CREATE ROLE {role}",
        f"GRANT SELECT, INSERT ON sa_jobs TO {role}",
    ):
        connection.execute(text(statement))
    connection.commit()
    try:
        with engine.connect() as application:
            application.execute(text(f"SET ROLE {role}"))
            enqueue(application, "send", idempotency_key="k")
            enqueue(application, "send", idempotency_key="k")
            application.commit()
            application.execute(text("RESET ROLE"))
            application.commit()
        assert heard() == [hash_of("default")]
    finally:
        connection.execute(text(f"DROP OWNED BY {role}"))
        connection.execute(text(f"DROP ROLE {role}"))
        connection.commit()
