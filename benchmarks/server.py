"""The private PostgreSQL of a measurement, and fresh databases with the queue's tables in it."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import ColumnElement, Engine, Integer, column, create_engine, func, select

from sa_jobs import enqueue_from_select, migrations, models
from tests.support.postgres import Cluster, embedded_bin, system_bin

# Those of every measurement; what is not named here is PostgreSQL's default. Commits are durable.
SETTINGS = {"shared_buffers": "1GB", "max_connections": "200", "jit": "off"}

# For rows that look at the server time of single statements.
TIMED_STATEMENTS = {
    "shared_preload_libraries": "pg_stat_statements",
    "pg_stat_statements.track_planning": "on",
}

_TEMPLATE = "sa_jobs_template"


@dataclass(frozen=True)
class Filled:
    """Jobs that were enqueued together: how many, and their first and last id."""

    jobs: int
    first_id: int
    last_id: int


@dataclass(frozen=True)
class Database:
    """A database of the private server."""

    name: str
    url: str

    @property
    def dsn(self) -> str:
        """The address for libpq."""
        return self.url.replace("+psycopg", "")

    def connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        """Return a connection in autocommit mode that prepares its statements at once."""
        return psycopg.connect(self.dsn, autocommit=True, prepare_threshold=0)

    def execute(self, query: str, parameters: list[Any] | None = None) -> None:
        """Run one statement in a transaction of its own."""
        with self.connect() as connection:
            # Only what is not prepared may be several statements.
            connection.execute(query, parameters, prepare=False)

    def row(self, query: str, parameters: list[Any] | None = None) -> tuple[Any, ...]:
        """Return the one row of a query."""
        with self.connect() as connection:
            found = connection.execute(query, parameters).fetchone()
        assert found is not None
        return found

    def engine(self) -> Engine:
        """Return an engine as an application would make it."""
        return create_engine(self.url)

    def fill(
        self,
        jobs: int,
        handler: str = "noop",
        *,
        first: int = 0,
        options: Callable[[ColumnElement[int]], Sequence[ColumnElement[Any]]] = lambda number: (),
        **common: Any,
    ) -> Filled:
        """Enqueue jobs with the payloads {"i": first}, {"i": first + 1}, ..., and commit.

        `options` makes columns like `sa_jobs_priority` from the job's number; `common` holds for
        all jobs.
        """
        number = numbers(first, jobs)
        engine = self.engine()
        with engine.begin() as connection:
            newest = func.coalesce(func.max(models.Job.id), 0)
            before = connection.execute(select(newest)).scalar_one()
            enqueue_from_select(connection, handler, select(number, *options(number)), **common)
            after = connection.execute(select(newest)).scalar_one()
        engine.dispose()
        if after - before != jobs:
            raise RuntimeError(f"{after - before} jobs were enqueued, not {jobs}")
        return Filled(jobs, before + 1, after)

    def settle(self) -> None:
        """Write out what changed, and renew the statistics, as after a load in earnest."""
        self.execute("VACUUM ANALYZE")
        self.execute("CHECKPOINT")

    def analyze(self) -> None:
        """Renew the statistics, leave dead rows alone, and write out what changed."""
        self.execute("ANALYZE")
        self.execute("CHECKPOINT")

    def wal_position(self) -> int:
        """Return how many bytes of WAL the server has written so far."""
        return int(self.row("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn")[0])

    def jobs_bytes(self) -> int:
        """Return the size of the jobs with their indexes."""
        return int(self.row("SELECT pg_total_relation_size('sa_jobs')")[0])


class Server:
    """The private server of one measurement."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._numbers = itertools.count(1)
        template = self._database(cluster.create_database(_TEMPLATE), _TEMPLATE)
        if "pg_stat_statements" in cluster.settings.get("shared_preload_libraries", ""):
            template.execute("CREATE EXTENSION pg_stat_statements")
        engine = template.engine()
        migrations.apply(engine)
        engine.dispose()

    @property
    def version(self) -> str:
        """The server's version."""
        database = self._database(self.cluster.url(), "postgres")
        return str(database.row("SELECT current_setting('server_version')")[0])

    def program(self, name: str) -> Path:
        """Return the path of one of PostgreSQL's own programs."""
        return self.cluster.bin_directory / name

    def fresh(self, *, like: Database | None = None) -> Database:
        """Make a database with the queue's tables, empty or as a copy of another one."""
        name = f"measured_{next(self._numbers)}"
        template = _TEMPLATE if like is None else like.name
        database = self._database(self.cluster.create_database(name, template=template), name)
        database.execute("CHECKPOINT")
        return database

    def empty(self, name: str) -> Database:
        """Make a database without any tables, in place of one of that name."""
        self.cluster.drop_database(name)
        return self._database(self.cluster.create_database(name), name)

    def drop(self, *databases: Database) -> None:
        """Drop databases, which may be large."""
        for database in databases:
            self.cluster.drop_database(database.name)

    def _database(self, url: str, name: str) -> Database:
        return Database(name, url)


def numbers(first: int, count: int) -> ColumnElement[int]:
    """Return the column `i`, which counts from `first`, to select."""
    series = func.generate_series(first, first + count - 1)
    given: ColumnElement[int] = series.table_valued(column("i", Integer)).render_derived().c.i
    return given


@contextmanager
def open_server(settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Bring up a server of its own, gone with its data at the end of the block.

    `SA_JOBS_TEST_SERVER` says which: `embedded` (the wheel's, the default) or `system`.
    """
    kind = os.environ.get("SA_JOBS_TEST_SERVER", "embedded")
    if kind not in ("embedded", "system"):
        sys.exit(f"SA_JOBS_TEST_SERVER is {kind!r}; it takes embedded or system")
    programs = embedded_bin() if kind == "embedded" else system_bin()
    if programs is None:
        sys.exit(f"there is no {kind} PostgreSQL: install it, or set SA_JOBS_TEST_SERVER")
    with Cluster(programs, settings={**SETTINGS, **(settings or {})}) as cluster:
        yield Server(cluster)


@contextmanager
def held_snapshot(database: Database, *, hold: bool = True) -> Iterator[None]:
    """Hold a snapshot open for the block, as a long report does; with `hold` false do nothing."""
    if not hold:
        yield
        return
    with psycopg.connect(database.dsn) as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        # With a transaction id too, as of a session that has written something.
        connection.execute("SELECT pg_current_xact_id()")
        yield
        connection.rollback()
