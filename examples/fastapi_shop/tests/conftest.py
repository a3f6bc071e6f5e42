"""The tests' database is made by the shop's own chain, and each test's work is rolled back."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from httpx import ASGITransport, AsyncClient
from shop.app import create_app, get_session
from sqlalchemy import URL, Engine, NullPool
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def sa_jobs_metadata() -> None:
    """Leave the database of `sa_jobs_engine` empty: the migrations make the tables."""


@pytest.fixture(scope="session")
def chain(sa_jobs_engine: Engine) -> Config:
    config = Config(ROOT / "alembic.ini")
    with sa_jobs_engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return config


@pytest.fixture(scope="session")
def database_url(sa_jobs_engine: Engine, chain: Config) -> URL:
    return sa_jobs_engine.url


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def session(database_url: URL) -> AsyncIterator[AsyncSession]:
    """A session in a transaction that is rolled back, whatever is committed in it."""
    engine = create_async_engine(database_url, poolclass=NullPool)
    async with engine.connect() as connection:
        transaction = await connection.begin()
        async with AsyncSession(
            connection, join_transaction_mode="create_savepoint", expire_on_commit=False
        ) as session:
            yield session
        await transaction.rollback()
    await engine.dispose()


@pytest.fixture
async def client(session: AsyncSession) -> AsyncIterator[AsyncClient]:
    """A client of the application, which works in the test's own session."""
    app = create_app()
    app.dependency_overrides[get_session] = lambda: session
    async with AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client:
        yield client
