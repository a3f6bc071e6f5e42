"""Fixtures of the tests that look at single operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, select, text
from sqlalchemy.exc import DBAPIError

from sa_jobs.models import DEFAULT_TABLES
from tests.database.callers import (
    ALL_CALLERS,
    CALLERS,
    Application,
    Caller,
    open_application,
    open_caller,
)
from tests.support.postgres import Server, create_database, drop_database, end_sessions

# What a test can leave in a database besides rows.
_LEFT = text("""
    SELECT 'relation', relname::text, reloptions::text, relacl::text
    FROM pg_class WHERE oid >= 16384
    UNION ALL SELECT 'function', proname::text, proconfig::text, proacl::text
    FROM pg_proc WHERE oid >= 16384
    UNION ALL SELECT 'schema', nspname::text, nspacl::text, NULL
    FROM pg_namespace WHERE nspname NOT LIKE 'pg_%'
    UNION ALL SELECT 'setting', setdatabase::text, setrole::text, setconfig::text
    FROM pg_db_role_setting
    UNION ALL SELECT 'step', revision, NULL, NULL FROM sa_jobs_step
    ORDER BY 1, 2, 3
""")
_EMPTY = text("""
    TRUNCATE sa_jobs, sa_jobs_failures, sa_jobs_workers, sa_jobs_queues, sa_jobs_schedules,
        sa_jobs_archive RESTART IDENTITY
""")


class _Databases:
    """Hands out the same database again, emptied, for as long as tests leave only rows in it.

    Most tests here take milliseconds, far less than making a database for each of them.
    """

    def __init__(self, server_url: str, template: str) -> None:
        self._server_url = server_url
        self._template = template
        self._name: str | None = None
        self._url = ""
        self._as_new: list[Any] = []

    def take(self) -> tuple[str, str]:
        """Return the name and URL of a database with the default tables, all empty."""
        if self._name is None or not self._empty():
            self.drop()
            self._name = f"sa_jobs_test_{uuid4().hex}"
            self._url = create_database(self._server_url, self._name, template=self._template)
            with self._connect() as connection:
                self._as_new = _left_in(connection)
        return self._name, self._url

    def drop(self) -> None:
        """Drop the database, if there is one."""
        if self._name is not None:
            drop_database(self._server_url, self._name)
            self._name = None

    def _empty(self) -> bool:
        try:
            with self._connect() as connection:
                if _left_in(connection) != self._as_new:
                    return False
                connection.execute(_EMPTY)
                connection.commit()
        except DBAPIError:
            return False
        return True

    @contextmanager
    def _connect(self) -> Iterator[Connection]:
        engine = create_engine(self._url, poolclass=NullPool)
        with engine.connect() as connection:
            yield connection


def _left_in(connection: Connection) -> list[Any]:
    return [tuple(row) for row in connection.execute(_LEFT)]


@pytest.fixture(scope="session")
def _databases(server_url: str, template_database: str) -> Iterator[_Databases]:
    databases = _Databases(server_url, template_database)
    yield databases
    databases.drop()


@pytest.fixture
def database_url(server_url: str, _databases: _Databases) -> Iterator[str]:
    """The URL of a database with the default tables, all empty.

    The test must leave no transaction open in it, and must not run into a deadlock.
    """
    name, url = _databases.take()
    yield url
    leftovers = end_sessions(server_url, name)
    assert leftovers.open_transactions == []
    assert leftovers.deadlocks == 0


@pytest.fixture(params=CALLERS)
def caller(request: pytest.FixtureRequest, database_url: str) -> Iterator[Caller]:
    """Each kind of session and connection in turn, on every driver."""
    with open_caller(request.param, database_url) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_url(server_url: str, template_database: str) -> Iterator[str]:
    """The URL of a database that is not emptied: each test has handlers and keys of its own."""
    name = f"sa_jobs_test_{uuid4().hex}"
    yield create_database(server_url, name, template=template_database)
    leftovers = end_sessions(server_url, name)
    drop_database(server_url, name)
    assert leftovers.open_transactions == []
    assert leftovers.deadlocks == 0


@pytest.fixture(scope="module", params=ALL_CALLERS)
def application(request: pytest.FixtureRequest, shared_url: str) -> Iterator[Application]:
    """An application on the shared database with each kind of caller in turn."""
    with open_application(request.param, shared_url) as opened:
        yield opened


@pytest.fixture(scope="session")
def looker(shared_url: str) -> Iterator[Engine]:
    """An engine that sees what others have committed in the shared database."""
    # Another module's test may restart the server.
    engine = create_engine(shared_url, isolation_level="AUTOCOMMIT", pool_pre_ping=True)
    yield engine
    engine.dispose()


@pytest.fixture
def name() -> str:
    """The handler of a test's jobs in the shared database, and the beginning of their keys."""
    return f"send-{uuid4().hex}"


Look = Callable[[], list[Any]]


@pytest.fixture
def committed(looker: Engine, name: str) -> Look:
    """Return a test's jobs in the shared database as others see them."""

    def look() -> list[Any]:
        jobs = DEFAULT_TABLES.jobs
        with looker.connect() as connection:
            query = select(jobs).where(jobs.c.handler == name).order_by(jobs.c.id)
            return list(connection.execute(query))

    return look


class ServerLog:
    """What the server has logged since the test began; nothing where the server is not ours."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._start = len(self._text())

    def _text(self) -> str:
        return self._server.cluster.log() if self._server.cluster else ""

    def errors(self) -> list[str]:
        lines = self._text()[self._start :].splitlines()
        return [line for line in lines if " ERROR: " in line or " FATAL: " in line]


@pytest.fixture
def server_log(server: Server, database_url: str) -> ServerLog:
    """What the server logs from here on."""
    return ServerLog(server)
