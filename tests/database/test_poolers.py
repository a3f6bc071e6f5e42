"""What a worker and the commands notice of PgBouncer, and what they leave alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker, WorkerError
from sa_jobs.cli import main
from sa_jobs.poolers import is_pooled, is_shared
from tests.support import pgbouncer
from tests.support.jobs import all_jobs
from tests.support.pgbouncer import PgBouncer
from tests.support.running import SHORT

pytestmark = pytest.mark.skipif(pgbouncer.PROGRAM is None, reason=pgbouncer.MISSING)

# As docs/wakeups.md tells hosts to do it.
NEVER = {"prepare_threshold": None}


@pytest.fixture
def pool(database_url: str) -> Iterator[PgBouncer]:
    """PgBouncer in transaction mode, with two connections to the server."""
    with PgBouncer(database_url, "transaction", pool_size=2) as pool:
        yield pool


def autocommit(url: str) -> Engine:
    return create_engine(url, isolation_level="AUTOCOMMIT", connect_args=NEVER)


@pytest.mark.parametrize(
    ("mode", "pooled", "shared"),
    [(None, False, False), ("session", True, False), ("transaction", True, True)],
)
def test_a_pooler_is_noticed_and_whether_it_shares_connections(
    database_url: str, mode: Any, pooled: bool, shared: bool
) -> None:
    def look(url: str) -> tuple[bool, bool]:
        engine = autocommit(url)
        with engine.connect() as one, engine.connect() as other:
            found = is_pooled(one), is_shared(one, other)
            assert is_shared(other, one) == found[1]
        engine.dispose()
        return found

    if mode is None:
        assert look(database_url) == (pooled, shared)
    else:
        with PgBouncer(database_url, mode) as pool:
            assert look(pool.url) == (pooled, shared)
            direct, through = autocommit(database_url), autocommit(pool.url)
            with direct.connect() as one, through.connect() as other:
                assert not is_shared(one, other)
            direct.dispose()
            through.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "psycopg_async", "asyncpg"])
def test_a_worker_of_a_host_on_any_driver_prepares_nothing_through_a_pooler(
    pool: PgBouncer, engine: Engine, driver: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The finish of a transactional handler goes through the sessions that the worker makes."""
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    jobs = Jobs()

    @jobs.handler("plain")
    def plain(session: Session) -> None:
        session.execute(text("SELECT count(*) FROM sa_jobs"))

    @jobs.handler("coroutine")
    async def coroutine(session: AsyncSession) -> None:
        await session.execute(text("SELECT count(*) FROM sa_jobs"))

    with Session(engine) as session, session.begin():
        for handler in ("plain", "coroutine"):
            jobs.enqueue_many(session, handler, [{}] * 20)
    url = make_url(pool.url).set(drivername=f"postgresql+{driver}")
    host: Any
    if driver == "asyncpg":
        host = create_async_engine(
            url,
            poolclass=NullPool,
            connect_args={
                "statement_cache_size": 0,
                "prepared_statement_cache_size": 0,
                "prepared_statement_name_func": lambda: "",
            },
        )
    elif driver == "psycopg_async":
        host = create_async_engine(url, poolclass=NullPool, connect_args=NEVER)
    else:
        host = create_engine(url, connect_args=NEVER if driver == "psycopg" else {})
    try:
        assert Worker(host, jobs, **{**SHORT, "concurrency": 2}).run_until_empty() == 0
    finally:
        getattr(host, "sync_engine", host).dispose()

    with engine.connect() as connection:
        ended = {(job.handler, job.status, job.attempts) for job in all_jobs(connection)}
        assert ended == {("plain", "done", 1), ("coroutine", "done", 1)}
    assert [line for line in caplog.records if line.levelno >= logging.WARNING] == []


def test_a_host_that_prepares_statements_through_a_pooler_is_warned(
    pool: PgBouncer, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs()

    @jobs.handler("works")
    def works(session: Session) -> None: ...

    host = create_engine(pool.url)
    Worker(host, jobs, **SHORT).run_until_empty()
    host.dispose()

    (warning,) = [line.message for line in caplog.records if "prepare statements" in line.message]
    assert "create_engine(connect_args={'prepare_threshold': None})" in warning


@pytest.mark.xfail(
    psycopg.pq.version() < 170000,
    reason="with an older libpq the worker tries again instead",
    run=False,
)
def test_a_pooler_in_statement_mode_is_refused_in_one_line(
    database_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    with PgBouncer(database_url, "statement") as pool:
        host = create_engine(pool.url, poolclass=NullPool)
        with pytest.raises(WorkerError, match="behind a connection pooler in statement mode"):
            Worker(host, jobs, **SHORT).run()
        for command in (["status"], ["db", "check"], ["enqueue", "noop"]):
            assert main([*command, "--database-url", pool.url]) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert "behind a connection pooler in statement mode" in line


def test_an_isolation_level_that_cannot_be_set_through_a_pooler_is_refused(
    database_url: str, engine: Engine
) -> None:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    name = make_url(database_url).database
    with engine.begin() as connection:
        connection.execute(
            text(f"ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'")
        )
    with PgBouncer(database_url) as pool:
        pooled = create_engine(pool.url, poolclass=NullPool)
        with pytest.raises(WorkerError, match="are serializable by default"):
            Worker(pooled, jobs, **SHORT).run()
        direct = create_engine(database_url, poolclass=NullPool)
        assert Worker(pooled, jobs, control_engine=direct, **SHORT).run_until_empty() == 0


def test_the_commands_work_through_a_transaction_pooler(
    empty_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*command: str, url: str, code: int = 0) -> str:
        assert main([*command, "--database-url", url]) == code, command
        out, error = capsys.readouterr()
        return out or error

    with PgBouncer(empty_database) as pool:
        run("db", "upgrade", "--to", "sa_jobs_0002", url=pool.url)
        first = run("enqueue", "quick", url=pool.url).strip()
        # A build of an index needs a session to itself.
        concurrently = ("db", "upgrade", "--concurrently", "always")
        assert "URL of the server itself" in run(*concurrently, url=pool.url, code=1)
        run(*concurrently, url=empty_database)
        run("db", "check", url=pool.url)
        assert "quick" in run("list", url=pool.url)
        assert "quick" in run("show", first, url=pool.url)
        run("cancel", first, url=pool.url)
        run("retry", first, url=pool.url)
        assert "default" in run("status", url=pool.url)
