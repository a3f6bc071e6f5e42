"""The fixtures of sa-jobs for pytest, which finds this file by itself once sa-jobs is installed.

It stands beside the package, and imports nothing before a fixture is used: so a test run that uses
none pays nothing, and coverage of code that is imported early misses nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.orm import Session

ENVIRONMENT = "SA_JOBS_TEST_DATABASE_URL"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option and the ini setting that name the server to test on."""
    about = f"URL of a PostgreSQL server for sa_jobs_engine (else {ENVIRONMENT}, else embedded)"
    parser.getgroup("sa-jobs").addoption("--sa-jobs-url", metavar="URL", help=about)
    parser.addini("sa_jobs_url", about)


@pytest.fixture(scope="session")
def sa_jobs_metadata() -> Any:
    """The MetaData whose tables `sa_jobs_engine` has: override it to return that of your models.

    None leaves the database empty, for tests that run the migrations.
    """
    from sa_jobs.models import metadata

    return metadata


@pytest.fixture(scope="session")
def sa_jobs_engine(pytestconfig: pytest.Config, sa_jobs_metadata: Any) -> Iterator[Engine]:
    """An engine on a new PostgreSQL database with the tables of `sa_jobs_metadata`.

    The server is named by --sa-jobs-url, the ini setting `sa_jobs_url` or the environment's
    SA_JOBS_TEST_DATABASE_URL; without one, the extra `embedded` starts a server for the test run.
    Each process of pytest-xdist has a database, or an embedded server, of its own.
    """
    from sqlalchemy import create_engine

    from sa_jobs import SaJobsError
    from sa_jobs.testing.server import new_database

    source, server = _server(pytestconfig)
    with ExitStack() as stack:
        try:
            url = stack.enter_context(new_database(server, source))
        except SaJobsError as error:
            pytest.fail(str(error), pytrace=False)
        engine = create_engine(url)
        stack.callback(engine.dispose)
        if sa_jobs_metadata is not None:
            sa_jobs_metadata.create_all(engine)
        yield engine


@pytest.fixture
def sa_jobs_session(sa_jobs_engine: Engine) -> Iterator[Session]:
    """A session in a transaction that is rolled back after the test, whatever the test commits."""
    from sa_jobs.testing import rolled_back

    with rolled_back(sa_jobs_engine) as session:
        yield session


def _server(config: pytest.Config) -> tuple[str, str | None]:
    """Return what names the server, and its URL, if anything does."""
    named = {
        "--sa-jobs-url": config.getoption("--sa-jobs-url"),
        "the ini setting sa_jobs_url": config.getini("sa_jobs_url"),
        ENVIRONMENT: os.environ.get(ENVIRONMENT),
    }
    return next(((source, url) for source, url in named.items() if url), ("nothing", None))
