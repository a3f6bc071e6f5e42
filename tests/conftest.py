"""The fixtures of the whole suite: a real PostgreSQL, and a database of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine
from sqlalchemy.orm import Session

from tests.support.postgres import (
    Cluster,
    Server,
    create_database,
    drop_database,
    end_sessions,
    open_server,
)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server that the environment asks for; one for each pytest-xdist worker."""
    with open_server() as opened:
        yield opened


@pytest.fixture(scope="session")
def server_url(server: Server) -> str:
    """The URL of a database of the server's, with a role that may create databases."""
    return server.url


@pytest.fixture(scope="session")
def cluster(server: Server) -> Cluster:
    """The server as one that the test may stop, restart and read the log of."""
    if server.cluster is None:
        pytest.skip("the server is not ours to stop")
    return server.cluster


@pytest.fixture(scope="session")
def template_database(server_url: str) -> Iterator[str]:
    """The name of a database with the default tables, made once, to be copied."""
    from sa_jobs.models import metadata

    name = _new_name()
    engine = create_engine(create_database(server_url, name), poolclass=NullPool)
    try:
        metadata.create_all(engine)
        yield name
    finally:
        drop_database(server_url, name)


@pytest.fixture
def empty_database(server_url: str) -> Iterator[str]:
    """The URL of a new and empty database."""
    name = _new_name()
    try:
        yield create_database(server_url, name)
    finally:
        drop_database(server_url, name)


@pytest.fixture
def database_url(
    server_url: str, template_database: str, request: pytest.FixtureRequest
) -> Iterator[str]:
    """The URL of a new database with the default tables.

    The test must leave no transaction open in it, and must not run into a deadlock.
    """
    name = _new_name()
    try:
        yield create_database(server_url, name, template=template_database)
        leftovers = end_sessions(server_url, name)
    finally:
        drop_database(server_url, name)
    if leftovers.open_transactions:
        pytest.fail("left idle in transaction: " + "; ".join(leftovers.open_transactions))
    if leftovers.deadlocks and request.node.get_closest_marker("deadlock_ok") is None:
        pytest.fail(f"{leftovers.deadlocks} deadlocks")


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """A psycopg engine on a new database with the default tables."""
    engine = create_engine(database_url)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine: Engine) -> Iterator[Connection]:
    """A connection that rolls back what the test did not commit."""
    with engine.connect() as connection:
        yield connection


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    """A session that rolls back what the test did not commit."""
    with Session(engine) as session:
        yield session


def _new_name() -> str:
    return f"sa_jobs_test_{uuid4().hex}"
