"""Steps on tables that are large, or that others are using."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text

from sa_jobs import migrations
from sa_jobs.errors import MigrationError, NeedsOwnTransactionError
from sa_jobs.migrations import Step
from sa_jobs.migrations._ddl import LARGE_TABLE_ROWS
from tests.migrations.schema import (
    CUSTOM,
    DEFAULT,
    Host,
    Place,
    create_all,
    execute,
    marker,
    pg_dump,
    run_psql,
    run_script,
)
from tests.support.waiting import wait_until

MakeHost = Callable[..., Host]

STEPS = [step.revision for step in migrations.revisions()]
FIRST, HEAD = STEPS[0], STEPS[-1]


def fill(url: str, rows: int = LARGE_TABLE_ROWS + 1, place: Place = DEFAULT) -> None:
    execute(
        url,
        f"INSERT INTO {place.table()} (queue, handler, status, finished_at)"
        f" SELECT 'q', 'h', 'done', now() FROM generate_series(1, {rows})",
        f"INSERT INTO {place.table('_failures')} (job_id, queue, handler, attempt, claim_no, error)"
        f" SELECT id, 'q', 'h', 1, 1, 'e' FROM {place.table()}",
    )


@contextmanager
def statements(engine: Engine) -> Iterator[list[str]]:
    """Collect what an engine sends."""
    sent: list[str] = []

    def collect(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", collect)
    yield sent
    event.remove(engine, "before_cursor_execute", collect)


def invalid_indexes(url: str) -> int:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return int(
            connection.scalar(text("SELECT count(*) FROM pg_index WHERE NOT indisvalid")) or 0
        )


# --- From each step to each -----------------------------------------------------------------------


@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
@pytest.mark.parametrize("rows", [0, 3])
def test_from_each_step_to_the_newest_and_back(
    rows: int, place: Place, empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    create_all(another_database, place)
    whole = pg_dump(another_database)
    dumps = {}
    for step in STEPS:
        migrations.apply(empty_engine, step, **place.options)
        fill(empty_database, rows, place)
        dumps[step] = pg_dump(empty_database)
    assert dumps[HEAD] == whole
    for step in STEPS[::-1]:
        migrations.revert(empty_engine, step, **place.options)
        assert pg_dump(empty_database) == dumps[step]
        migrations.apply(empty_engine, **place.options)
        assert pg_dump(empty_database) == whole
    migrations.revert(empty_engine, "base", **place.options)
    for step in STEPS:
        migrations.apply(empty_engine, step, **place.options)
        assert marker(empty_database, place) == [step]
        migrations.apply(empty_engine, **place.options)
        assert pg_dump(empty_database) == whole
        migrations.revert(empty_engine, "base", **place.options)


@pytest.mark.parametrize("start", STEPS[:-1])
def test_a_script_from_each_step_equals_the_command(
    start: str,
    make_host: MakeHost,
    empty_engine: Engine,
    empty_database: str,
    another_database: str,
) -> None:
    create_all(another_database)
    host = make_host()
    first = host.add_steps(start)
    last = host.add_steps(HEAD, start)
    migrations.apply(empty_engine, start)
    execute(empty_database, "CREATE TABLE alembic_version (version_num varchar(32))")
    execute(empty_database, f"INSERT INTO alembic_version VALUES ('{first}')")

    run_script(empty_database, host.upgrade_script(f"{first}:{last}"))

    assert pg_dump(empty_database) == pg_dump(another_database)
    run_script(empty_database, host.downgrade_script(f"{last}:{first}"))
    assert marker(empty_database) == [start]


# --- Large tables ---------------------------------------------------------------------------------


def test_a_large_table_gets_its_indexes_concurrently_and_a_small_one_does_not(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    create_all(another_database)
    for rows, expected in [(3, 0), (LARGE_TABLE_ROWS + 1, 3)]:
        migrations.apply(empty_engine, FIRST)
        fill(empty_database, rows)
        with statements(empty_engine) as sent:
            migrations.apply(empty_engine)
        assert sum("INDEX CONCURRENTLY" in statement for statement in sent) == expected
        assert pg_dump(empty_database) == pg_dump(another_database)
        assert invalid_indexes(empty_database) == 0
        migrations.revert(empty_engine, "base")


@pytest.mark.parametrize("choice", [True, False])
def test_a_host_may_choose(choice: bool, make_host: MakeHost, empty_database: str) -> None:
    host = make_host()
    host.add_steps(FIRST, concurrently=choice)
    host.upgrade()
    fill(empty_database, 1 if choice else LARGE_TABLE_ROWS + 1)
    host.add_steps(HEAD, FIRST, concurrently=choice)
    sent = []

    def collect(_: Any, __: Any, statement: str, *___: Any) -> None:
        sent.append(statement)

    event.listen(Engine, "before_cursor_execute", collect)
    try:
        host.upgrade()
    finally:
        event.remove(Engine, "before_cursor_execute", collect)
    assert any("INDEX CONCURRENTLY" in statement for statement in sent) is choice
    assert marker(empty_database) == [HEAD]


def test_a_script_builds_concurrently_where_it_is_told_to(
    make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    create_all(another_database)
    host = make_host()
    host.add_steps(FIRST, concurrently=True)
    host.add_steps(HEAD, FIRST, concurrently=True)

    script = host.upgrade_script()

    assert script.count("INDEX CONCURRENTLY") == 3
    assert "COMMIT;\n\nDO" in script
    run_psql(empty_database, script)
    assert pg_dump(empty_database) == pg_dump(another_database)


@pytest.mark.parametrize(
    ("start", "end", "index"),
    [
        ("sa_jobs_0001", "sa_jobs_0002", "sa_jobs_schedule_idx"),
        ("sa_jobs_0002", "sa_jobs_0003", "sa_jobs_finished_idx"),
    ],
)
def test_a_concurrent_script_that_was_stopped_is_run_again(
    start: str, end: str, index: str, empty_engine: Engine, empty_database: str
) -> None:
    script = migrations.script(end, from_=start, concurrently=True)
    assert f'INDEX CONCURRENTLY IF NOT EXISTS "{index}"' in script
    parts = script.split(";\n\n")
    migrations.apply(empty_engine, end)
    whole = pg_dump(empty_database)
    for stopped_after in range(1, len(parts) - 1):
        migrations.revert(empty_engine, start)
        run_psql(empty_database, ";\n".join(parts[:stopped_after]) + ";")
        # What a build leaves that was cut off in its midst.
        execute(
            empty_database,
            "UPDATE pg_index SET indisvalid = false FROM pg_class"
            f" WHERE pg_class.oid = indexrelid AND relname = '{index}'",
        )
        run_psql(empty_database, script)
        assert pg_dump(empty_database) == whole
        assert invalid_indexes(empty_database) == 0
        assert marker(empty_database) == [end]


class InjectedError(Exception):
    """Raised by a test in the midst of a migration."""


def test_a_failure_at_any_statement_is_resumed(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    create_all(another_database)
    whole = pg_dump(another_database)
    migrations.apply(empty_engine, FIRST)
    fill(empty_database)
    with statements(empty_engine) as sent:
        migrations.apply(empty_engine)
    for number in range(1, len(sent) + 1):
        count = 0

        def fail(*_: Any) -> None:
            nonlocal count
            count += 1
            if count == number:  # noqa: B023
                raise InjectedError

        migrations.revert(empty_engine, FIRST)
        event.listen(empty_engine, "after_cursor_execute", fail)
        with pytest.raises(InjectedError):
            migrations.apply(empty_engine)
        event.remove(empty_engine, "after_cursor_execute", fail)
        migrations.apply(empty_engine)
        assert pg_dump(empty_database) == whole
        assert invalid_indexes(empty_database) == 0


@pytest.mark.parametrize("rows", [3, LARGE_TABLE_ROWS + 1])
def test_an_invalid_index_is_built_anew(
    rows: int, empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, "sa_jobs_0002")
    fill(empty_database, rows)
    migrations.build_indexes(empty_engine)
    execute(
        empty_database,
        "UPDATE pg_index SET indisvalid = false"
        " WHERE indexrelid IN ('sa_jobs_finished_idx'::regclass, 'sa_jobs_schedule_idx'::regclass)",
    )
    assert invalid_indexes(empty_database) == 2
    migrations.apply(empty_engine)
    # The other one belongs to a step that is done.
    assert invalid_indexes(empty_database) == 1


def test_indexes_may_be_built_before_the_steps(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    with pytest.raises(MigrationError, match="no tables"):
        migrations.build_indexes(empty_engine)
    create_all(another_database)
    migrations.apply(empty_engine, FIRST)
    fill(empty_database)

    for _ in range(2):
        built = migrations.build_indexes(empty_engine)
        assert [step.revision for step in built] == STEPS[1:]
    assert marker(empty_database) == [FIRST]
    with empty_engine.begin() as connection, statements(empty_engine) as sent:
        migrations.apply(connection)

    assert not [statement for statement in sent if "CREATE" in statement and "INDEX" in statement]
    assert pg_dump(empty_database) == pg_dump(another_database)
    assert migrations.build_indexes(empty_engine) == ()


def test_what_was_prepared_goes_with_the_way_back(
    empty_engine: Engine, empty_database: str
) -> None:
    dumps = {}
    for step in STEPS:
        migrations.apply(empty_engine, step)
        dumps[step] = pg_dump(empty_database)
    for start, to in [(FIRST, FIRST), (STEPS[1], FIRST), (STEPS[1], STEPS[1])]:
        migrations.revert(empty_engine, FIRST)
        migrations.build_indexes(empty_engine)
        migrations.apply(empty_engine, start)
        assert pg_dump(empty_database) != dumps[start]
        migrations.revert(empty_engine, to)
        assert pg_dump(empty_database) == dumps[to]
        assert marker(empty_database) == [to]


def test_a_callers_transaction_is_not_left(empty_engine: Engine, empty_database: str) -> None:
    migrations.apply(empty_engine, FIRST)
    fill(empty_database)
    before = pg_dump(empty_database)
    with (
        pytest.raises(NeedsOwnTransactionError, match="sa-jobs db build-indexes --schema public"),
        empty_engine.begin() as connection,
    ):
        migrations.apply(connection)
    assert pg_dump(empty_database) == before
    with empty_engine.begin() as connection:
        migrations.apply(connection, concurrently=False)
    assert marker(empty_database) == [HEAD]


@pytest.mark.concurrency
def test_several_at_once_on_a_large_table_do_not_wait_for_each_other_for_ever(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    """Those who wait hold no snapshot, which the build would wait for in turn."""
    create_all(another_database)
    migrations.apply(empty_engine, FIRST)
    fill(empty_database, 50_000)
    barrier = Barrier(4)

    def work(_: int) -> tuple[Step, ...]:
        barrier.wait(30)
        return migrations.apply(empty_engine)

    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        results = sorted(len(steps) for steps in pool.map(work, range(4)))
    assert time.monotonic() - began < 50
    # Who waits may come to the marker between two steps of the first.
    assert sum(results) == len(STEPS) - 1
    assert pg_dump(empty_database) == pg_dump(another_database)


@pytest.mark.concurrency
def test_a_build_that_has_seen_who_waits_is_not_held_up(
    empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, "sa_jobs_0002")
    fill(empty_database)
    with (
        ThreadPoolExecutor(2) as pool,
        empty_engine.connect() as writer,
        empty_engine.connect() as waiting,
    ):
        pid = waiting.scalar(text("SELECT pg_backend_pid()"))
        writer.execute(text("UPDATE sa_jobs SET tenant = 't' WHERE id = 1"))
        writer.execute(text("SELECT pg_advisory_lock(1)"))
        building = pool.submit(migrations.apply, empty_engine)
        wait_for_session(empty_database, "query LIKE 'CREATE INDEX%' AND wait_event_type = 'Lock'")
        # The writer's end lets the build begin, which then finds the snapshot of a statement.
        lock = "SELECT pg_advisory_lock_shared(1)"
        statement = pool.submit(waiting.execute, text(lock))
        wait_for_session(empty_database, f"query = '{lock}' AND wait_event_type = 'Lock'")
        writer.commit()
        wait_for_session(empty_database, f"{pid} = ANY (pg_blocking_pids(pid))")
        writer.execute(text("SELECT pg_advisory_unlock(1)"))
        statement.result(30)

        with pytest.raises(MigrationError, match="must wait for the end of this transaction"):
            migrations.apply(waiting)
        assert not building.done()
        waiting.rollback()
        assert len(building.result(30)) == 1


@pytest.mark.concurrency
def test_on_an_engine_no_transaction_is_open_while_one_waits(
    empty_engine: Engine, empty_database: str
) -> None:
    with ThreadPoolExecutor(1) as pool, empty_engine.connect() as holder:
        migrations.apply(holder)
        waiting = pool.submit(migrations.apply, empty_engine)
        wait_for_session(empty_database, "query IN ('COMMIT', 'ROLLBACK') AND state = 'idle'")
        holder.commit()
        assert waiting.result(30) == ()


def wait_for_session(url: str, condition: str) -> None:
    """Wait until the condition holds for another session of the database."""
    query = (
        f"SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND {condition}"
    )
    with create_engine(url, poolclass=NullPool).connect() as connection:

        def found() -> bool:
            number = connection.scalar(text(f"{query} AND pid <> pg_backend_pid()"))
            connection.rollback()
            return bool(number)

        wait_until(found, f"a session where {condition}")


# --- Locks ----------------------------------------------------------------------------------------


@pytest.mark.concurrency
def test_a_lock_that_is_held_for_a_while_delays_nobody_else(
    empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, FIRST)
    fill(empty_database, 3)
    stop = threading.Event()
    longest = 0.0

    def insert() -> None:
        nonlocal longest
        with empty_engine.connect() as connection:
            while not stop.is_set():
                began = time.monotonic()
                connection.exec_driver_sql("INSERT INTO sa_jobs (queue, handler) VALUES ('q', 'h')")
                connection.commit()
                longest = max(longest, time.monotonic() - began)

    with ThreadPoolExecutor(2) as pool, empty_engine.connect() as holder:
        holder.exec_driver_sql("SELECT FROM sa_jobs LIMIT 1 FOR UPDATE")
        inserting = pool.submit(insert)
        migrating = pool.submit(migrations.apply, empty_engine)
        time.sleep(1.5)
        assert not migrating.done()
        holder.rollback()
        assert len(migrating.result(30)) == len(STEPS) - 1
        stop.set()
        inserting.result(30)

    assert longest < 1.0, "an insert waited behind the migration for as long as the lock was held"
    assert marker(empty_database) == [HEAD]


def test_a_lock_that_is_never_free_is_named(empty_engine: Engine, empty_database: str) -> None:
    migrations.apply(empty_engine, FIRST)
    with empty_engine.connect() as holder, empty_engine.begin() as connection:
        pid = holder.scalar(text("SELECT pg_backend_pid()"))
        holder.exec_driver_sql("LOCK TABLE sa_jobs IN ROW SHARE MODE")
        connection.exec_driver_sql("SET LOCAL lock_timeout = '7s'")
        with pytest.raises(MigrationError, match=rf"2 attempts \(server processes {pid}\)"):
            migrations.apply(connection, lock_timeout="10ms", lock_attempts=2)
        # The caller's transaction, and its setting, are as they were.
        assert connection.scalar(text("SHOW lock_timeout")) == "7s"
        holder.rollback()
        migrations.apply(connection)
        assert connection.scalar(text("SHOW lock_timeout")) == "7s"


def test_the_way_back_waits_for_locks_as_the_way_up_does(
    empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    before = pg_dump(empty_database)
    for table, step in [
        ("sa_jobs_archive", STEPS[1]),
        ("sa_jobs_queues", FIRST),
        ("sa_jobs_workers", None),
    ]:
        with empty_engine.connect() as holder:
            pid = holder.scalar(text("SELECT pg_backend_pid()"))
            holder.exec_driver_sql(f"LOCK TABLE {table} IN ACCESS SHARE MODE")
            with pytest.raises(MigrationError, match=rf"at each of 2 attempts .*\b{pid}\b"):
                migrations.revert(empty_engine, step, lock_timeout="10ms", lock_attempts=2)
        assert pg_dump(empty_database) == before

    with ThreadPoolExecutor(1) as pool, empty_engine.connect() as holder:
        holder.exec_driver_sql("LOCK TABLE sa_jobs_workers IN ACCESS SHARE MODE")
        migrating = pool.submit(migrations.revert, empty_engine, None)
        wait_until_tried(holder)
        holder.rollback()
        assert len(migrating.result(30)) == len(STEPS)


def wait_until_tried(holder: Connection) -> None:
    """Wait until another session has asked for a lock on a table."""
    query = text(
        "SELECT count(*) FROM pg_locks WHERE locktype = 'relation' AND NOT granted"
        " AND mode = 'AccessExclusiveLock'"
    )
    wait_until(lambda: bool(holder.scalar(query)), "another session waits for a table")


def test_a_script_puts_the_hosts_lock_timeout_back(
    empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, FIRST)
    up = migrations.script(from_=FIRST).replace("BEGIN;", "BEGIN; SET LOCAL lock_timeout = '7s';")
    down = migrations.script("base", from_=HEAD).replace(
        "BEGIN;", "BEGIN; SET LOCAL lock_timeout = '7s';"
    )
    look = "CREATE TABLE seen AS SELECT current_setting('lock_timeout') AS value;\nCOMMIT;"
    for script in (up, down):
        assert "lock_timeout = '100ms'" in script
        run_psql(empty_database, script.replace("COMMIT;", look))
        with empty_engine.begin() as connection:
            assert connection.scalar(text("SELECT value FROM seen")) == "7s"
            connection.exec_driver_sql("DROP TABLE seen")


def test_limits_of_the_role_do_not_cut_a_build_off_and_come_back(
    empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, FIRST)
    fill(empty_database)
    database = empty_engine.url.database
    execute(empty_database, f"ALTER DATABASE \"{database}\" SET statement_timeout = '1h'")
    with statements(empty_engine) as sent:
        migrations.apply(empty_engine)
    assert sum("set_config('statement_timeout'" in statement for statement in sent) == 6


@pytest.mark.parametrize(
    "option",
    [
        {"concurrently": "yes"},
        {"lock_timeout": "soon"},
        {"lock_timeout": "1s'; DROP TABLE x"},
        {"lock_timeout": 3},
        {"lock_attempts": 0},
    ],
)
def test_options_are_checked(option: dict[str, Any], empty_engine: Engine) -> None:
    with pytest.raises(MigrationError, match=f"^{next(iter(option))}="):
        migrations.apply(empty_engine, **option)
