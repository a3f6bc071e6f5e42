"""How a command was called: by which command line, and inside of which application, if any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import click
from click.core import ParameterSource
from sqlalchemy import Engine

from sa_jobs.handlers import Jobs
from sa_jobs.worker import Worker


class Application(Protocol):
    """An application that carries a Jobs, as an integration shows it to the commands."""

    @property
    def jobs(self) -> Jobs:
        """Its handlers."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What its configuration says of the options of its workers."""

    def engine(self) -> Engine:
        """Return the engine on the database that has the tables of its jobs."""

    def worker(self, **options: Any) -> Worker:
        """Return a worker of its jobs, with its settings where no option is given."""


@dataclass(frozen=True)
class Invocation:
    """The object of click's context: the command line that starts the program again."""

    command: list[str]
    application: Application | None = None


def current_application() -> Application | None:
    """Return the application that the current command runs inside of."""
    invocation = click.get_current_context().find_object(Invocation)
    return None if invocation is None else invocation.application


def was_given(option: str) -> bool:
    """Return whether something of the current command was given, and has not its default."""
    source = click.get_current_context().get_parameter_source(option)
    return source is not ParameterSource.DEFAULT


def meant_tables(schema: str | None, name: str) -> tuple[str | None, str]:
    """Return the schema and name of the tables: those of the options, else the application's."""
    application = current_application()
    if application is None or was_given("name"):
        return schema, name
    tables = application.jobs.tables
    return tables.schema if schema is None else schema, tables.name
