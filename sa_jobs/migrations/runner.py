"""Alembic's environment for the chain of steps alone, in a checkout or from the package."""

from __future__ import annotations

from typing import Any

from alembic import context
from alembic.operations import Operations
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, NullPool, create_engine

from sa_jobs.errors import SaJobsError
from sa_jobs.migrations._ddl import Target
from sa_jobs.models import attach
from sa_jobs.urls import database_url


# A function: what an env.py imports as a module's body would run only once in a process.
def run_env() -> None:
    """Run the Alembic command at hand on the tables of one name and schema.

    `-x url=`, `-x schema=` and `-x name=` say where; so may a program, with the keys of the same
    names, or `connection`, in `Config.attributes["sa_jobs"]`. Without a URL the environment is
    asked, as `database_url()` says. Offline no database is needed.

    The chain keeps an Alembic version table of its own beside the tables. Errors of ours become
    Alembic's CommandError, which its command line shows as one line.
    """
    try:
        _run_env()
    except SaJobsError as error:
        raise CommandError(str(error)) from error


def _run_env() -> None:
    given = context.config.attributes.get("sa_jobs", {})
    arguments = {**context.get_x_argument(as_dictionary=True), **given}
    schema: str | None = arguments.get("schema") or None
    name: str = arguments.get("name") or "sa_jobs"
    if context.is_offline_mode():
        _migrate(name, schema, dialect_name="postgresql", literal_binds=True)
        return
    connection = arguments.get("connection")
    if connection is not None:
        _migrate_online(connection, name, schema)
        return
    engine = create_engine(database_url(arguments.get("url")), poolclass=NullPool)
    with engine.connect() as connection:
        _migrate_online(connection, name, schema)


def _migrate_online(connection: Connection, name: str, schema: str | None) -> None:
    # Alembic reflects the default schema under the name None, and the models must agree with it.
    default = connection.dialect.default_schema_name
    metadata = MetaData()
    place = None if schema == default else schema
    tables = attach(metadata, name=name, schema=place, register=False)
    own = {table.name for table in tables.all}

    def include_name(found: str | None, kind: str, parents: Any) -> bool:
        if kind == "schema":
            return found == tables.schema
        return kind != "table" or found in own

    _migrate(
        name,
        schema,
        connection=connection,
        target_metadata=metadata,
        include_schemas=True,
        include_name=include_name,
        compare_server_default=True,
    )


def _migrate(name: str, schema: str | None, **options: Any) -> None:
    context.configure(
        version_table=f"{name}_alembic_version",
        version_table_schema=schema,
        transaction_per_migration=True,
        # What step files read, when Alembic calls them.
        sa_jobs={"name": name, "schema": schema},
        **options,
    )
    with context.begin_transaction():
        running = context.get_context()
        # Alembic makes its version table before the first step, so the schema must come first.
        # `alembic current` sets this option, and makes neither.
        if not running.opts.get("dont_mutate"):
            Target.open(Operations(running), name=name, schema=schema).ensure_schema()
        context.run_migrations()
