"""The trigger: an insert wakes the workers that sleep on its queue, and no others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Connection, Engine, create_engine

from tests.migrations.schema import CUSTOM, DEFAULT, Place, create_all, libpq
from tests.support.waiting import wait_until

INSERT = "INSERT INTO {jobs} (queue, handler) VALUES ('mail', 'send')"


def short_hash(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()[:16]


def channel_of(place: Place) -> str:
    schema = place.schema or "public"
    return "sa_jobs_" + short_hash(f"{schema}.{place.name}")


@contextmanager
def listening(url: str, place: Place = DEFAULT) -> Iterator[Callable[[], list[str]]]:
    """Give a function that returns the payloads which have arrived so far."""
    channel = channel_of(place)
    arrived: list[str] = []
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        # Old releases of psycopg keep what comes with a statement's answer for handlers alone.
        connection.add_notify_handler(lambda notification: arrived.append(notification.payload))
        connection.execute(f'LISTEN "{channel}"'.encode())

        def heard() -> list[str]:
            # What was sent before this one has arrived before it.
            connection.execute(f"NOTIFY \"{channel}\", 'end'".encode())

            def has_ended() -> bool:
                connection.execute(b"SELECT 1")
                return "end" in arrived

            wait_until(has_ended, "all has arrived")
            payloads = arrived[: arrived.index("end")]
            arrived.clear()
            return payloads

        yield heard


@contextmanager
def gates_open(url: str, *queues: str, place: Place = DEFAULT) -> Iterator[None]:
    """Hold the gates of these queues open, as the session of a worker that sleeps."""
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        for queue in queues:
            connection.execute(
                "SELECT pg_advisory_lock(hashtextextended(%s, hashtextextended(%s, 0)))",
                [queue, f"{place.schema or 'public'}.{place.name}"],
            )
        yield


def insert(connection: Connection, place: Place = DEFAULT) -> None:
    connection.exec_driver_sql(INSERT.format(jobs=place.table()))


def test_an_insert_sends_one_notification_for_the_queue(engine: Engine, database_url: str) -> None:
    with gates_open(database_url, "mail"), listening(database_url) as heard:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO sa_jobs (queue, handler)"
                " SELECT 'mail', 'send' FROM generate_series(1, 100)"
            )
            insert(connection)
            assert heard() == []
        assert heard() == [short_hash("mail")]


def test_each_queue_with_a_sleeper_gets_one(engine: Engine, database_url: str) -> None:
    with gates_open(database_url, "mail", "höflich", "idle"), listening(database_url) as heard:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                "INSERT INTO sa_jobs (queue, handler) VALUES"
                " ('mail', 'a'), ('höflich', 'b'), ('awake', 'c'), ('mail', 'd')"
            )
        assert sorted(heard()) == sorted([short_hash("mail"), short_hash("höflich")])


def test_nobody_asleep_means_no_notification(engine: Engine, database_url: str) -> None:
    with gates_open(database_url, "other"), listening(database_url) as heard:
        with engine.begin() as connection:
            insert(connection)
        assert heard() == []


@pytest.mark.parametrize(
    ("columns", "values"),
    [
        ("run_at", "now() + interval '1 minute'"),
        ("status, finished_at", "'done', now()"),
        ("status, locked_by, leased_until", "'running', 'w', now()"),
    ],
)
def test_what_no_worker_could_claim_wakes_none(
    columns: str, values: str, engine: Engine, database_url: str
) -> None:
    with gates_open(database_url, "mail"), listening(database_url) as heard:
        with engine.begin() as connection:
            connection.exec_driver_sql(
                f"INSERT INTO sa_jobs (queue, handler, {columns}) VALUES ('mail', 'x', {values})"
            )
        assert heard() == []


def test_the_setting_switches_it_off(engine: Engine, database_url: str) -> None:
    with gates_open(database_url, "mail"), listening(database_url) as heard:
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL sa_jobs.notify = off")
            insert(connection)
        assert heard() == []
        # The setting ends with the transaction, and leaves an empty text behind.
        with engine.begin() as connection:
            insert(connection)
        assert heard() == [short_hash("mail")]


def test_a_rollback_wakes_nobody(engine: Engine, database_url: str) -> None:
    with gates_open(database_url, "mail"), listening(database_url) as heard:
        with engine.connect() as connection:
            insert(connection)
            connection.rollback()
        with engine.begin() as connection:
            savepoint = connection.begin_nested()
            insert(connection)
            savepoint.rollback()
        assert heard() == []


def test_each_queue_of_tables_has_a_channel_of_its_own(empty_database: str) -> None:
    create_all(empty_database)
    create_all(empty_database, CUSTOM)
    engine = create_engine(empty_database)
    with (
        gates_open(empty_database, "mail"),
        gates_open(empty_database, "mail", place=CUSTOM),
        listening(empty_database, CUSTOM) as heard,
        listening(empty_database) as heard_default,
    ):
        with engine.begin() as connection:
            insert(connection, CUSTOM)
        assert heard() == [short_hash("mail")]
        assert heard_default() == []
        with engine.begin() as connection:
            insert(connection)
        assert heard() == []
        assert heard_default() == [short_hash("mail")]
    engine.dispose()


def test_no_object_on_the_search_path_stands_in_for_ours(engine: Engine, database_url: str) -> None:
    with engine.begin() as connection:
        for statement in (
            "CREATE SCHEMA decoy",
            "CREATE TABLE decoy.sa_jobs (id bigint)",
            (
                "CREATE FUNCTION decoy.pg_try_advisory_lock_shared(bigint) RETURNS boolean"
                " LANGUAGE sql AS $$ SELECT false $$"
            ),
            (
                "CREATE FUNCTION decoy.hashtextextended(text, bigint) RETURNS bigint"
                " LANGUAGE sql AS $$ SELECT 1::bigint $$"
            ),
            (
                "CREATE FUNCTION decoy.pg_notify(text, text) RETURNS void LANGUAGE plpgsql"
                " AS $$ BEGIN RAISE 'decoy'; END $$"
            ),
            (
                "CREATE FUNCTION decoy.sha256(bytea) RETURNS bytea LANGUAGE sql"
                " AS $$ SELECT 'decoy'::bytea $$"
            ),
            (
                "CREATE FUNCTION decoy.clock_timestamp() RETURNS timestamptz LANGUAGE sql"
                " AS $$ SELECT 'epoch'::timestamptz $$"
            ),
            (
                "CREATE FUNCTION decoy.never(text, text) RETURNS boolean LANGUAGE sql"
                " AS $$ SELECT false $$"
            ),
            "CREATE OPERATOR decoy.= (LEFTARG = text, RIGHTARG = text, FUNCTION = decoy.never)",
        ):
            connection.exec_driver_sql(statement)
    with gates_open(database_url, "mail"), listening(database_url) as heard:
        with engine.begin() as connection:
            connection.exec_driver_sql("SET LOCAL search_path TO decoy, pg_catalog, public")
            connection.exec_driver_sql("CREATE TEMP TABLE new_jobs (queue text)")
            connection.exec_driver_sql(INSERT.format(jobs="public.sa_jobs"))
        assert heard() == [short_hash("mail")]


def test_the_enqueuing_role_needs_no_more_than_insert(engine: Engine, database_url: str) -> None:
    role = f"sa_jobs_role_{engine.url.database}"[:63]
    with engine.begin() as connection:
        connection.exec_driver_sql(f'CREATE ROLE "{role}"')
    try:
        with gates_open(database_url, "mail"), listening(database_url) as heard:
            with engine.begin() as connection:
                connection.exec_driver_sql(f'GRANT INSERT ON sa_jobs TO "{role}"')
                connection.exec_driver_sql(f'SET LOCAL ROLE "{role}"')
                insert(connection)
            assert heard() == [short_hash("mail")]
    finally:
        with engine.begin() as connection:
            connection.exec_driver_sql(f'DROP OWNED BY "{role}"')
            connection.exec_driver_sql(f'DROP ROLE "{role}"')
