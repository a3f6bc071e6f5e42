"""Which database and tables a command works on, and its short transactions there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
from sqlalchemy import URL, Connection, Engine, MetaData, NullPool, create_engine, event

from sa_jobs.cli.invocation import Application, current_application, meant_tables
from sa_jobs.cli.output import check_output
from sa_jobs.errors import SaJobsError, SchemaVersionError
from sa_jobs.handlers import Jobs
from sa_jobs.models import DEFAULT_NAME, DEFAULT_TABLES, Tables, attach
from sa_jobs.poolers import avoid_prepared_statements
from sa_jobs.urls import database_url
from sa_jobs.worker.links import control_engine

CONNECT_SECONDS = 10
OLDEST_SERVER = 15

url_option = click.option(
    "--database-url",
    metavar="URL",
    help="The database. Default: SA_JOBS_DATABASE_URL, then DATABASE_URL.",
)


@dataclass(frozen=True)
class Place:
    """The database and the tables in it that the options of a command name.

    Inside of an application they are its own, where the options say nothing.
    """

    given_url: str | None
    schema: str | None
    name: str
    application: Application | None = None

    @property
    def tables(self) -> Tables:
        """The tables; raises AttachError if none can have this name and schema."""
        if self.schema is None and self.name == DEFAULT_NAME:
            return DEFAULT_TABLES
        return attach(MetaData(), name=self.name, schema=self.schema, register=False)

    @property
    def jobs(self) -> Jobs | None:
        """The handlers of the application that has these tables, if the command is inside of it."""
        jobs = None if self.application is None else self.application.jobs
        if jobs is None or (jobs.tables.schema, jobs.tables.name) != (self.schema, self.name):
            return None
        return jobs

    def engine(self) -> Engine:
        """Return an engine on the database; raises DatabaseUrlError if none is named."""
        if self.application is not None and self.given_url is None:
            # Apart from the application's pool, on which nothing of ours shall stay.
            engine = control_engine(self.application.engine())
            event.listen(engine, "connect", _speak_iso)
            click.get_current_context().call_on_close(engine.dispose)
            return engine
        return open_engine(database_url(self.given_url), poolclass=NullPool)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection in a read-only transaction, once the tables are known to fit."""
        engine = self.engine().execution_options(postgresql_readonly=True)
        with engine.connect() as connection:
            self._check(connection)
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection outside a transaction, once the tables are known to fit."""
        with self.engine().connect() as connection:
            self._check(connection)
            connection.rollback()
            yield connection

    def _check(self, connection: Connection) -> None:
        # Only then: the worker does not need it, and its start should be quick.
        from sa_jobs import migrations

        check_server(connection)
        status = migrations.check(connection, schema=self.schema, name=self.name)
        if not status.usable:
            raise SchemaVersionError(status.command or f"the tables are at {status.current}")


def place_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --database-url, --schema and --name, as one argument `place`.

    Such a command prints what came of it: it does nothing where it cannot.
    """

    @functools.wraps(command)
    def with_place(database_url: str | None, schema: str | None, name: str, **rest: Any) -> Any:
        place = Place(database_url, *meant_tables(schema, name), current_application())
        place.tables  # noqa: B018  Names that cannot be are wrong usage, before anything is asked.
        check_output()
        return command(place=place, **rest)

    for option in (
        click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the tables."),
        click.option("--schema", help="Schema of the tables. Default: the search path."),
        url_option,
    ):
        with_place = option(with_place)
    return with_place


def open_engine(url: URL, **options: Any) -> Engine:
    """Return an engine that gives up connecting in time, and never shows parameters in an error.

    It speaks UTF-8, whatever the database's encoding: then the server converts, and says what it
    cannot hold; psycopg would take the text of an SQL_ASCII database for bytes.
    """
    defaults = {
        "application_name": "sa-jobs",
        "client_encoding": "utf8",
        "connect_timeout": str(CONNECT_SECONDS),
    }
    given = {name: value for name, value in defaults.items() if name not in url.query}
    engine = create_engine(url.update_query_dict(given), hide_parameters=True, **options)
    avoid_prepared_statements(engine)
    event.listen(engine, "connect", _speak_iso)
    return engine


def _speak_iso(connection: Any, record: Any) -> None:
    # psycopg reads no other style; what role or database say of the order of days is kept.
    if not str(connection.info.parameter_status("DateStyle")).startswith("ISO"):
        connection.execute("SET DateStyle TO ISO")
        connection.commit()


def check_server(connection: Connection) -> None:
    """Raise an error if the server is older than what is supported."""
    version = connection.dialect.server_version_info or (0,)
    if int(version[0]) < OLDEST_SERVER:
        raise SaJobsError(
            f"sa-jobs needs PostgreSQL {OLDEST_SERVER} or newer, and this server is "
            f"{'.'.join(map(str, version))}"
        )
