"""Several migrations of one database at once."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, text

from sa_jobs import migrations
from sa_jobs.errors import MigrationError
from sa_jobs.migrations import Step
from tests.migrations.schema import create_all, marker, pg_dump

pytestmark = pytest.mark.concurrency


def test_six_at_once_all_succeed_and_one_does_the_work(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    barrier = Barrier(6)

    def work(_: int) -> tuple[Step, ...]:
        with empty_engine.connect() as connection:
            barrier.wait(30)
            with connection.begin():
                return migrations.apply(connection, schema="queue")

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(work, range(6)))

    assert sorted(map(len, results)) == [0, 0, 0, 0, 0, len(migrations.revisions())]
    with create_engine(another_database, poolclass=NullPool).begin() as connection:
        migrations.apply(connection, schema="queue")
    assert pg_dump(empty_database) == pg_dump(another_database)


def hold_lock(connection: Connection) -> int:
    """Run the steps in the connection's transaction, and return its server process."""
    migrations.apply(connection)
    pid: int = connection.scalar(text("SELECT pg_backend_pid()"))
    return pid


def test_waiting_ends_with_a_message_and_a_usable_transaction(empty_engine: Engine) -> None:
    with empty_engine.connect() as holder, empty_engine.begin() as connection:
        pid = hold_lock(holder)
        with pytest.raises(MigrationError, match=rf"for 0.2 seconds \(server process {pid}\)"):
            migrations.apply(connection, wait_seconds=0.2)
        assert connection.scalar(text("SELECT 1")) == 1
        # Looking takes no lock.
        assert migrations.current(connection) is None


def test_a_holder_that_rolls_back_hands_on(empty_engine: Engine, empty_database: str) -> None:
    with ThreadPoolExecutor(1) as pool, empty_engine.connect() as holder:
        hold_lock(holder)

        def work() -> int:
            with empty_engine.begin() as connection:
                return len(migrations.apply(connection))

        waiting = pool.submit(work)
        wait_until_locked_out(holder)
        holder.rollback()
        assert waiting.result(30) == len(migrations.revisions())
    assert marker(empty_database)


def test_a_snapshot_from_before_says_so(empty_engine: Engine) -> None:
    """Under REPEATABLE READ, what the other one did cannot be seen after the wait."""
    engine = empty_engine.execution_options(isolation_level="REPEATABLE READ")
    with ThreadPoolExecutor(1) as pool, empty_engine.connect() as holder:
        hold_lock(holder)

        def work() -> tuple[Step, ...]:
            with engine.begin() as connection:
                return migrations.apply(connection)

        waiting = pool.submit(work)
        wait_until_locked_out(holder)
        holder.commit()
        with pytest.raises(MigrationError, match="run this again"):
            waiting.result(30)
    assert work() == ()


def test_a_killed_holder_blocks_nobody(empty_engine: Engine, empty_database: str) -> None:
    program = (
        "import sys, time; from sqlalchemy import create_engine; from sa_jobs import migrations\n"
        "with create_engine(sys.argv[1]).begin() as connection:\n"
        "    migrations.apply(connection); print('done', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, empty_database], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "done\n"
        os.kill(process.pid, signal.SIGKILL)

    with empty_engine.begin() as connection:
        assert migrations.apply(connection) == migrations.revisions()


def test_an_event_loop_goes_on_while_one_waits(empty_database: str) -> None:
    """Two migrations in one event loop: the one that waits lets the other one end."""
    pytest.importorskip("greenlet")
    from sqlalchemy.ext.asyncio import create_async_engine

    async def run() -> list[int]:
        engine = create_async_engine(empty_database)

        async def work() -> int:
            async with engine.begin() as connection:
                steps = await connection.run_sync(migrations.apply)
                await asyncio.sleep(0.3)
                return len(steps)

        results = await asyncio.gather(work(), work())
        await engine.dispose()
        return list(results)

    assert sorted(asyncio.run(run())) == [0, len(migrations.revisions())]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000", "asyncpg"])
def test_apply_works_on_every_driver(
    driver: str, empty_database: str, another_database: str
) -> None:
    create_all(another_database)
    url = empty_database.replace("+psycopg:", f"+{driver}:")

    if driver == "asyncpg":
        asyncio.run(_apply_async(url))
    else:
        with create_engine(url, poolclass=NullPool).begin() as connection:
            migrations.apply(connection)
            assert migrations.check(connection).usable

    assert pg_dump(empty_database) == pg_dump(another_database)


async def _apply_async(url: str) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(url)
    async with engine.begin() as connection:
        await connection.run_sync(migrations.apply)
        assert (await connection.run_sync(migrations.check)).usable
    await engine.dispose()


def wait_until_locked_out(holder: Connection) -> None:
    """Wait until another session has found the lock taken."""
    for _ in range(1000):
        waiting = holder.scalar(
            text(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND query LIKE '%pg_try_advisory%' AND pid <> pg_backend_pid()"
            )
        )
        if waiting:
            return
        holder.execute(text("SELECT pg_stat_clear_snapshot(), pg_sleep(0.01)"))
    raise AssertionError("nobody waits for the lock")
