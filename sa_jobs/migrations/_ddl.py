"""What step files are written with: the tables to work on, and the frame around each step.

A step's SQL is text, frozen when it is released: it names every object itself, so that neither a
host's naming convention nor a later change of the models reaches it. It holds no percent sign and
no colon before a word, which Alembic and the drivers would read as parameters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol

from sqlalchemy import Connection, text

import sa_jobs
from sa_jobs.errors import MigrationError, SchemaVersionError
from sa_jobs.migrations._steps import Step, position, revisions

if TYPE_CHECKING:
    from alembic.operations import Operations

WAIT_SECONDS = 60.0
"""How long a migration waits for another one in the same database."""

# One lock for each database; the number is the bytes of "sa_jobs".
LOCK_KEY = int.from_bytes(b"sa_jobs", "big")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")


def find(connection: Connection, *, name: str, schema: str | None) -> tuple[str, str | None] | None:
    """Return the schema that holds the tables and their newest step, None if there are no tables.

    Without a schema, the first one on the search path that has a step marker counts.
    """
    check_place(connection.dialect.name, name, schema)
    found = connection.scalar(
        text(
            "SELECT space.nspname FROM pg_catalog.pg_class AS marker"
            " JOIN pg_catalog.pg_namespace AS space ON space.oid = marker.relnamespace"
            " WHERE marker.oid = pg_catalog.to_regclass(CAST(:marker AS text))"
        ),
        {"marker": qualified(f"{name}_step", schema)},
    )
    if found is None:
        return None
    marker = qualified(f"{name}_step", found)
    revision = connection.scalar(text(f"SELECT max(revision) FROM {marker}"))
    return found, revision


def check_place(dialect: str, name: str, schema: str | None) -> None:
    """Raise MigrationError unless there can be tables of this name and schema."""
    if dialect != "postgresql":
        raise MigrationError(
            f"the migrations of sa-jobs run on PostgreSQL, not on {dialect}; "
            "for unit tests on SQLite, call create_all() on the metadata that was attached"
        )
    for what, value in (("name", name), ("schema", schema)):
        if value is not None and not _IDENTIFIER.fullmatch(value):
            raise MigrationError(
                f"{what}={value!r} must be a plain identifier: letters, digits and underscores, "
                "not starting with a digit, at most 63 characters"
            )


def qualified(table: str, schema: str | None) -> str:
    """Return the quoted name of a table, for use in SQL."""
    return f'"{schema}"."{table}"' if schema else f'"{table}"'


@dataclass(frozen=True)
class Target:
    """The tables under one name and schema, and the Alembic operations that reach them.

    `schema` is None only offline: online it is looked up, so that an object of the same name
    earlier on the search path is never touched.
    """

    operations: Operations
    name: str
    schema: str | None
    create_schema: bool

    @classmethod
    def open(
        cls,
        operations: Operations,
        *,
        name: str = "sa_jobs",
        schema: str | None = None,
        create_schema: bool = True,
        wait_seconds: float = WAIT_SECONDS,
    ) -> Target:
        """Wait for other migrations of this database, then look up where the tables are."""
        context = operations.get_context()
        check_place(context.dialect.name, name, schema)
        if context.as_sql:
            return cls(operations, name, schema, create_schema)
        connection = operations.get_bind()
        _lock(connection, wait_seconds)
        if schema is None:
            found = find(connection, name=name, schema=None)
            schema = found[0] if found else connection.scalar(text("SELECT current_schema()"))
            if schema is None:
                raise MigrationError(
                    "no schema on the connection's search_path exists: create one, or say schema="
                )
        return cls(operations, name, schema, create_schema)

    @classmethod
    def of_alembic(cls) -> Target:
        """Return the target of the Alembic command that is running a step file itself."""
        return cls.open(running_operations(), **_options(running_operations()))

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}" if self.schema else self.name

    @property
    def online(self) -> bool:
        """Whether statements reach a database, and are not written out as a script."""
        return not self.operations.get_context().as_sql

    def table(self, suffix: str = "") -> str:
        """Return the quoted name of one of the tables (or of the function), for use in SQL."""
        return qualified(self.name + suffix, self.schema)

    def run(self, sql: str) -> None:
        """Run one statement, or write it out."""
        self.operations.execute(sql)

    def position(self) -> int:
        """Return the place in the chain of the newest step that the tables have, -1 for none."""
        found = find(self.operations.get_bind(), name=self.name, schema=self.schema)
        if found is None:
            return -1
        revision = found[1]
        if revision is None:
            raise MigrationError(
                f"the table {self.table('_step')} is empty: it must hold the newest step that "
                f"the tables of {self} have"
            )
        if revision not in {step.revision for step in revisions()}:
            raise SchemaVersionError(
                f"the tables of {self} are at {revision}, which sa-jobs {sa_jobs.__version__} "
                f"does not know (its newest is {revisions()[-1].revision}): "
                "install the release of sa-jobs that made them, or a newer one"
            )
        return position(revision)

    def ensure_schema(self) -> None:
        """Create the schema if it is missing and `create_schema` allows it."""
        if self.schema is None:
            return
        if self.online:
            self._check_schema()
        if self.create_schema:
            # IF NOT EXISTS would ask for CREATE on the database even where the schema exists.
            self.run(
                f"DO $do$ BEGIN IF to_regnamespace('\"{self.schema}\"') IS NULL THEN "
                f'CREATE SCHEMA "{self.schema}"; END IF; END $do$'
            )

    def _check_schema(self) -> None:
        exists, database, role, allowed = (
            self.operations.get_bind()
            .execute(
                text(
                    "SELECT to_regnamespace(CAST(:schema AS text)) IS NOT NULL,"
                    " current_database(), current_user,"
                    " has_database_privilege(current_database(), 'CREATE')"
                ),
                {"schema": f'"{self.schema}"'},
            )
            .one()
        )
        if exists:
            return
        if not self.create_schema:
            raise MigrationError(
                f'there is no schema "{self.schema}" in the database "{database}": '
                "create it, or leave out create_schema=False"
            )
        if not allowed:
            raise MigrationError(
                f'the role "{role}" may not create the schema "{self.schema}" in the database '
                f'"{database}"; let its owner run: '
                f'CREATE SCHEMA "{self.schema}" AUTHORIZATION "{role}"'
            )


class _StepFunction(Protocol):
    def __call__(self, target: Target | None = None) -> None: ...


def applies(step: Step) -> Callable[[Callable[[Target], None]], _StepFunction]:
    """Make a step file's upgrade() of a function that changes the tables.

    It does nothing where the marker has the step already, and writes the marker. Alembic calls it
    without a target.
    """

    def decorate(change: Callable[[Target], None]) -> _StepFunction:
        @wraps(change)
        def upgrade(target: Target | None = None) -> None:
            target = target or Target.of_alembic()
            if target.online and not _lacks(target, step):
                return
            change(target)
            marker = target.table("_step")
            if step.down_revision is None:
                target.run(f"INSERT INTO {marker} (revision) VALUES ('{step.revision}')")
            else:
                target.run(f"UPDATE {marker} SET revision = '{step.revision}'")

        return upgrade

    return decorate


def undoes(step: Step) -> Callable[[Callable[[Target], None]], _StepFunction]:
    """Make a step file's downgrade() of a function that takes the step's changes back.

    It does nothing where the marker does not have the step, and writes the marker, which goes
    with the tables of the first step. Alembic calls it without a target.
    """

    def decorate(change: Callable[[Target], None]) -> _StepFunction:
        @wraps(change)
        def downgrade(target: Target | None = None) -> None:
            target = target or Target.of_alembic()
            if target.online and not _is_newest(target, step):
                return
            change(target)
            if step.down_revision is not None:
                marker = target.table("_step")
                target.run(f"UPDATE {marker} SET revision = '{step.down_revision}'")

        return downgrade

    return decorate


def running_operations() -> Operations:
    """Return the operations of the Alembic command that is running; raise if there is none."""
    from alembic import op
    from alembic.operations import Operations

    try:
        context = op.get_context()
    except (NameError, AttributeError):  # before the first command, and after one
        context = None
    # A command that failed stays behind in alembic.op, with its connection closed.
    if context is None or not (context.as_sql or _is_open(context.connection)):
        raise MigrationError(
            "this must be called inside an Alembic revision; elsewhere use "
            "sa_jobs.migrations.apply(connection) or the command `sa-jobs db upgrade`"
        )
    return Operations(context)


def _is_open(connection: Connection | None) -> bool:
    return connection is not None and not connection.closed


def _options(operations: Operations) -> dict[str, Any]:
    # Set by run_env(); in a host's own environment, the step files work on the default tables.
    options: dict[str, Any] = operations.get_context().opts.get("sa_jobs", {})
    return options


def _lacks(target: Target, step: Step) -> bool:
    newest = target.position()
    if newest >= position(step.revision):
        return False
    if newest < position(step.down_revision):
        raise MigrationError(
            f"the step {step.revision} needs {step.down_revision}, which the tables of {target} "
            "do not have: run the steps in order"
        )
    if step.down_revision is None:
        _refuse_foreign_table(target)
    return True


def _is_newest(target: Target, step: Step) -> bool:
    newest = target.position()
    if newest > position(step.revision):
        raise MigrationError(
            f"the step {step.revision} cannot be undone before {revisions()[newest].revision}, "
            f"which the tables of {target} have: undo the steps in reverse order"
        )
    return newest == position(step.revision)


def _refuse_foreign_table(target: Target) -> None:
    table = target.table()
    if target.operations.get_bind().scalar(
        text("SELECT pg_catalog.to_regclass(CAST(:table AS text)) IS NOT NULL"), {"table": table}
    ):
        raise MigrationError(
            f"there is a table {table} already, but no step marker {target.table('_step')} "
            "beside it: choose another name= or schema=, or move that table away"
        )


def _lock(connection: Connection, wait_seconds: float) -> None:
    # Bound to the transaction: a process that is killed lets go of it. Tried again and again,
    # since a lock_timeout that strikes would leave the host's transaction aborted; the server
    # does the sleeping, so that an event loop under us goes on.
    deadline = time.monotonic() + wait_seconds
    waited = False
    while not connection.scalar(text(f"SELECT pg_try_advisory_xact_lock({LOCK_KEY})")):
        if time.monotonic() >= deadline:
            holder = connection.scalar(text(f"SELECT max(pid) FROM pg_locks WHERE {_OURS}"))
            raise MigrationError(
                f"another migration of sa-jobs has been running in this database for "
                f"{wait_seconds:g} seconds (server process {holder}): let it end, then run "
                "this again"
            )
        connection.execute(text("SELECT pg_sleep(0.1)"))
        waited = True
    if waited and connection.scalar(
        text(
            "SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"
        )
    ):
        raise MigrationError(
            "another migration of sa-jobs has ended meanwhile, and this transaction cannot see "
            "what it did, since its snapshot is older: run this again"
        )


_OURS = (
    "locktype = 'advisory' AND granted AND objsubid = 1"
    f" AND classid = {LOCK_KEY >> 32} AND objid = {LOCK_KEY & 0xFFFFFFFF}"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def holds_lock(connection: Connection) -> bool:
    """Return whether this connection holds the lock: in autocommit it is gone at once."""
    return bool(
        connection.scalar(
            text(f"SELECT count(*) > 0 FROM pg_locks WHERE {_OURS} AND pid = pg_backend_pid()")
        )
    )
