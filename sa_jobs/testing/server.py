"""A database for the time of a test run: new, empty, and gone at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import uuid4

import psycopg
from psycopg import sql
from sqlalchemy import URL

from sa_jobs.demo.interrupts import Interrupts
from sa_jobs.demo.postgres import embedded_server, is_installed
from sa_jobs.errors import SaJobsError
from sa_jobs.urls import parsed


class NoTestServerError(SaJobsError):
    """There is no PostgreSQL server to test on; the text says what to set or install."""


@contextmanager
def new_database(server: str | None, source: str = "the given URL") -> Iterator[URL]:
    """Create a database on a server, or on an embedded one of its own; drop it after the block.

    The URL's role must be allowed to create databases. `source` is what an error calls the URL.
    """
    with ExitStack() as stack:
        if server:
            url = parsed(source, server)
        elif is_installed():
            url = stack.enter_context(embedded_server(Interrupts()))
        else:
            raise NoTestServerError(
                "sa_jobs has no PostgreSQL to test on: name a server by --sa-jobs-url, the ini "
                "option sa_jobs_url or SA_JOBS_TEST_DATABASE_URL (its role must be allowed to "
                'create databases), or pip install "sa-jobs[embedded]"'
            )
        name = f"sa_jobs_test_{uuid4().hex}"
        try:
            _administer(url, sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        except psycopg.Error as error:
            raise NoTestServerError(
                f"sa_jobs cannot create a database to test in on the server of {source}: "
                f"{str(error).strip()}"
            ) from None
        stack.callback(
            _administer,
            url,
            sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name)),
        )
        yield url.set(database=name)


def _administer(url: URL, statement: sql.Composed) -> None:
    plain = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(statement)
