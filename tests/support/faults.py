"""What goes wrong with a database, on demand: lost sessions, a snapshot that is held."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.engine import make_url


def kill_backends(database_url: str, application_name: str) -> int:
    """End the sessions of this name (a LIKE pattern) in the URL's database; return how many."""
    engine = create_engine(database_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        ended = connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE :name"
                " AND pid <> pg_backend_pid()"
            ),
            {"name": application_name},
        )
        return len(ended.fetchall())


@contextmanager
def hold_snapshot(database_url: str) -> Iterator[None]:
    """Hold a snapshot open for the block, which keeps dead rows from being cleaned up."""
    url = make_url(database_url).set(drivername="postgresql")
    with psycopg.connect(url.render_as_string(hide_password=False)) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        connection.execute("SELECT 1")
        yield
