"""What step files are written with: the tables to work on, and the frame around each step.

A step's SQL is text, frozen when it is released: it names every object itself, so that neither a
host's naming convention nor a later change of the models reaches it. It holds no percent sign and
no colon before a word, which Alembic and the drivers would read as parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Literal, Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

import sa_jobs
from sa_jobs import ddl
from sa_jobs.errors import (
    MigrationError,
    NeedsOwnTransactionError,
    SaJobsError,
    SchemaVersionError,
)
from sa_jobs.migrations._lock import (
    WAIT_SECONDS,
    holds_lock,
    keep_lock,
    pause,
    release_lock,
    take_lock,
)
from sa_jobs.migrations._place import (
    check_place,
    find_in,
    locate,
    place_options,
    place_text,
    qualified,
)
from sa_jobs.migrations._refusals import refusals, sqlstate
from sa_jobs.migrations._steps import Step, position, revisions
from sa_jobs.poolers import is_pooled

if TYPE_CHECKING:
    from alembic.operations import Operations

LOCK_TIMEOUT = "100ms"
"""How long a statement waits for the lock on a table: so long, everybody behind it waits too."""

LOCK_ATTEMPTS = 60
"""How often such a statement is tried, with pauses in between; in all, about a minute."""

LARGE_TABLE_ROWS = 10_000
"""Up to that many rows, building an index takes milliseconds, and writes may wait for it."""

Concurrently = bool | Literal["auto"]

_TIMEOUT = re.compile(r"([0-9]+) ?(ms|s|min)?")
_MILLISECONDS = {None: 1, "ms": 1, "s": 1000, "min": 60_000}

# lock_not_available and deadlock_detected: another try may get the lock.
_LOCK_STATES = ("55P03", "40P01")


def _check_policy(concurrently: Any, lock_timeout: Any, lock_attempts: Any) -> None:
    if not (isinstance(concurrently, bool) or concurrently == "auto"):
        raise MigrationError(f'concurrently={concurrently!r} must be True, False or "auto"')
    time = _TIMEOUT.fullmatch(lock_timeout) if isinstance(lock_timeout, str) else None
    # To the server, 0 means to wait for ever.
    if time is None or not 0 < int(time[1]) * _MILLISECONDS[time[2]] < 2**31:
        raise MigrationError(
            f"lock_timeout={lock_timeout!r} must be a time above 0 as PostgreSQL spells it, "
            'such as "100ms"'
        )
    if isinstance(lock_attempts, bool) or not isinstance(lock_attempts, int) or lock_attempts < 1:
        raise MigrationError(f"lock_attempts={lock_attempts!r} must be an int of 1 or more")


def check_wait(wait_seconds: Any) -> None:
    """Raise MigrationError unless this is a time to wait."""
    is_number = isinstance(wait_seconds, (int, float)) and not isinstance(wait_seconds, bool)
    if not is_number or not 0 <= wait_seconds < float("inf"):
        raise MigrationError(
            f"wait_seconds={wait_seconds!r} must be a number of seconds, 0 or more"
        )


@dataclass(frozen=True)
class Target:
    """The tables under one name and schema, and the Alembic operations that reach them.

    `schema` is None only offline: online it is looked up, so that no object of the same name
    elsewhere on the search path is touched.
    """

    operations: Operations
    name: str
    schema: str | None
    create_schema: bool = True
    concurrently: Concurrently = "auto"
    lock_timeout: str = LOCK_TIMEOUT
    lock_attempts: int = LOCK_ATTEMPTS
    # Whether the tables are made by the same run, so that nobody waits for them.
    fresh: bool = False
    # Whether the whole step is in a savepoint, so that its statements need none.
    in_savepoint: bool = False

    @classmethod
    def open(
        cls,
        operations: Operations,
        *,
        name: str = "sa_jobs",
        schema: str | None = None,
        create_schema: bool = True,
        wait_seconds: float = WAIT_SECONDS,
        concurrently: Concurrently = "auto",
        lock_timeout: str = LOCK_TIMEOUT,
        lock_attempts: int = LOCK_ATTEMPTS,
        alone: bool = False,
    ) -> Target:
        """Wait for other migrations of this database, then look up where the tables are.

        With `alone`, the tables may be made here though there are others on the search path.
        """
        context = operations.get_context()
        name, schema = check_place(context.dialect.name, name, schema)
        _check_policy(concurrently, lock_timeout, lock_attempts)
        check_wait(wait_seconds)
        policy = (concurrently, lock_timeout, lock_attempts)
        if context.as_sql:
            return cls(operations, name, schema, create_schema, *policy)
        connection = operations.get_bind()
        take_lock(connection, wait_seconds)
        if not holds_lock(connection):
            raise MigrationError(
                "the connection is in autocommit, where a failure would leave half of a step "
                'behind: use one with transactions (no isolation_level="AUTOCOMMIT", and no '
                "autocommit_block() around the call)"
            )
        schema = locate(connection, name, schema, alone=alone)
        return cls(operations, name, schema, create_schema, *policy)

    @classmethod
    def of_alembic(cls, *, upgrading: bool) -> Target:
        """Return the target of the Alembic command that is running a step file itself."""
        operations = running_operations()
        # Set by run_env(); in a host's own environment, step files work on the default tables.
        options: dict[str, Any] | None = operations.get_context().opts.get("sa_jobs")
        return cls.open(operations, **(options or {}), alone=upgrading and options is None)

    def __str__(self) -> str:
        return place_text(self.schema, self.name)

    @property
    def online(self) -> bool:
        """Whether statements reach a database, and are not written out as a script."""
        return not self.operations.get_context().as_sql

    def table(self, suffix: str = "") -> str:
        """Return the quoted name of one of the tables (or of the function), for use in SQL."""
        return qualified(self.name + suffix, self.schema)

    def run(self, sql: str) -> None:
        """Run one statement, or write it out; where it fails, the transaction stays usable."""
        with self.savepoint():
            self.operations.execute(sql)

    @contextmanager
    def savepoint(self) -> Iterator[Target]:
        """Give a target whose statements are taken back together where one fails."""
        if self.in_savepoint or not self.online:
            yield self
        else:
            with self.operations.get_bind().begin_nested():
                yield replace(self, in_savepoint=True)

    def alter(self, sql: str, *, on: tuple[str, ...] = ("",)) -> None:
        """Run one statement that takes a strong lock on tables that may be in use.

        Whoever waits for such a lock makes all others wait behind it. So it waits a short while
        only, goes back to a savepoint, and tries again after a pause.
        """
        if self.fresh:
            self.run(sql)
        elif not self.online:
            self.run(_keep_setting("lock_timeout", "sa_jobs.lock_timeout"))
            self.run(f"SET LOCAL lock_timeout = '{self.lock_timeout}'")
            self.run(sql)
            self.run(_keep_setting("sa_jobs.lock_timeout", "lock_timeout"))
        else:
            self._alter_online(sql, on)

    def drop_tables(self, *suffixes: str) -> None:
        """Drop tables with all that is in them; without CASCADE, so that nothing else goes."""
        self.alter(f"DROP TABLE {', '.join(map(self.table, suffixes))}", on=suffixes)

    def _alter_online(self, sql: str, on: tuple[str, ...]) -> None:
        connection = self.operations.get_bind()
        for attempt in range(1, self.lock_attempts + 1):
            try:
                with connection.begin_nested():
                    before = _setting(connection, "lock_timeout")
                    _set(connection, "lock_timeout", self.lock_timeout, local=True)
                    self.operations.execute(sql)
                    # DDL of the host may follow in this transaction.
                    _set(connection, "lock_timeout", before, local=True)
                return
            except DBAPIError as error:
                if sqlstate(error) not in _LOCK_STATES:
                    raise
                if attempt == self.lock_attempts:
                    names = ", ".join(map(self.table, on))
                    subject = f"table {names} was" if len(on) == 1 else f"tables {names} were"
                    raise MigrationError(
                        f"the {subject} locked by others at each of "
                        f"{attempt} attempts (server processes {self._lock_holders(on)}): "
                        "let them end, then run this again"
                    ) from error
            pause(connection, min(0.1 * attempt, 1.0))

    def _lock_holders(self, on: tuple[str, ...]) -> str:
        tables = " UNION ALL ".join(
            f"SELECT pg_catalog.to_regclass('{self.table(suffix)}')" for suffix in on
        )
        holders = self.operations.get_bind().scalars(
            text(
                f"SELECT DISTINCT pid FROM pg_catalog.pg_locks WHERE relation IN ({tables})"
                " AND granted AND database = (SELECT oid FROM pg_catalog.pg_database"
                " WHERE datname = current_database()) AND pid <> pg_backend_pid() ORDER BY pid"
            )
        )
        return ", ".join(map(str, holders)) or "unknown"

    def create_index(
        self, suffix: str, definition: str, *, on: str = "", unique: bool = False
    ) -> None:
        """Build an index on a table that may hold many rows, unless it is there already.

        A large table gets it CONCURRENTLY, outside the transaction, which commits what went
        before. So a step does this first of all, and after it only what may be repeated.
        """
        create = f"CREATE {'UNIQUE ' if unique else ''}INDEX "
        rest = f'"{self.name}{suffix}" ON {self.table(on)} {definition}'
        if not self.online:
            if self.concurrently is True and not self.fresh:
                with self.operations.get_context().autocommit_block():
                    self.run(self._drop_if_invalid(suffix))
                    self.run(f"{create}CONCURRENTLY IF NOT EXISTS {rest}")
            else:
                self.alter(create + rest, on=(on,))
            return
        valid = self._is_valid_index(suffix, on)
        if valid:
            return
        index = self.table(suffix)
        if self._builds_concurrently(on):
            with self._outside_transaction(suffix, on):
                # Of a build that failed or was killed, an index is left that slows down writes
                # and serves no query.
                if valid is False:
                    self.operations.execute(f"DROP INDEX CONCURRENTLY {index}")
                self.operations.execute(f"{create}CONCURRENTLY {rest}")
        else:
            if valid is False:
                self.alter(f"DROP INDEX {index}", on=(on,))
            self.alter(create + rest, on=(on,))

    def drop_index(self, suffix: str, *, on: str = "") -> None:
        """Drop an index, if it is there."""
        if not self.online or self._is_valid_index(suffix, on) is not None:
            self.alter(f"DROP INDEX {self.table(suffix)}", on=(on,))

    def _drop_if_invalid(self, suffix: str) -> str:
        """Return the statement that makes room in a script that was stopped and is run again."""
        index = self.table(suffix)
        return (
            "DO $do$ BEGIN IF EXISTS (SELECT FROM pg_catalog.pg_index WHERE NOT indisvalid AND "
            f"indexrelid = pg_catalog.to_regclass('{index}')) THEN "
            f"PERFORM set_config('lock_timeout', '{self.lock_timeout}', true); "
            f"DROP INDEX {index}; END IF; END $do$"
        )

    def _is_valid_index(self, suffix: str, on: str) -> bool | None:
        """Return whether the index may be used; None if there is none."""
        valid: bool | None = self.operations.get_bind().scalar(
            text(
                "SELECT indisvalid FROM pg_catalog.pg_index"
                " WHERE indexrelid = pg_catalog.to_regclass(CAST(:index AS text))"
                " AND indrelid = pg_catalog.to_regclass(CAST(:table AS text))"
            ),
            {"index": self.table(suffix), "table": self.table(on)},
        )
        return valid

    def _builds_concurrently(self, on: str) -> bool:
        if self.fresh or self.concurrently is False:
            return False
        limit = 0 if self.concurrently is True else LARGE_TABLE_ROWS
        some = f"SELECT FROM {self.table(on)} LIMIT {limit + 1}"
        rows = self.operations.get_bind().scalar(text(f"SELECT count(*) FROM ({some}) AS counted"))
        return bool(rows is not None and rows > limit)

    @contextmanager
    def _outside_transaction(self, suffix: str, on: str) -> Iterator[None]:
        context = self.operations.get_context()
        connection = self.operations.get_bind()
        # Alembic has no public way to ask whether the transaction is its own; autocommit_block()
        # ends in an AssertionError where it is not.
        if getattr(context, "_transaction", None) is None or connection.in_nested_transaction():
            raise NeedsOwnTransactionError(
                f"the table {self.table(on)} is large, so its index {self.table(suffix)} must be "
                "built CONCURRENTLY, and that cannot be done inside the transaction that was "
                "begun before Alembic's. Either run "
                f"`sa-jobs db build-indexes{place_options(self.schema, self.name)}` first, which "
                "builds it while the application goes on; or let Alembic begin the transaction, "
                "best with context.configure(transaction_per_migration=True) in env.py; or say "
                "concurrently=False in the revision, and writes to the table wait meanwhile"
            )
        if is_pooled(connection):
            raise NeedsOwnTransactionError(
                f"the table {self.table(on)} is large, so its index {self.table(suffix)} must be "
                "built CONCURRENTLY, under a lock of the session, and this connection goes through "
                "a connection pooler, which may give each statement to another session. Run this "
                "with the URL of the server itself"
            )
        # The lock of the transaction ends with it, so one of the session takes over.
        keep_lock(connection)
        try:
            with context.autocommit_block(), _unlimited(connection):
                yield
            take_lock(connection, WAIT_SECONDS)
        finally:
            if not connection.invalidated:
                release_lock(connection)

    def position(self) -> int:
        """Return the place in the chain of the newest step that the tables have, -1 for none."""
        connection = self.operations.get_bind()
        found = find_in(connection, self.name, self.schema)
        if found is None:
            return -1
        revision = found.revision
        if revision is None:
            raise MigrationError(empty_marker(connection, self.name, found.schema))
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

    def refuse_forbidden_schema(self) -> None:
        """Raise MigrationError where the schema is there, and the role may not create in it."""
        role = self.operations.get_bind().scalar(
            text(
                "SELECT current_user FROM pg_catalog.pg_namespace"
                " WHERE nspname = CAST(:schema AS text)"
                " AND NOT (has_schema_privilege(oid, 'CREATE')"
                " AND has_schema_privilege(oid, 'USAGE'))"
            ),
            {"schema": self.schema},
        )
        if role is not None:
            raise MigrationError(
                f'the role "{role}" may not create tables in the schema "{self.schema}"; let its '
                f'owner run: GRANT CREATE, USAGE ON SCHEMA "{self.schema}" TO "{role}"'
            )

    def refuse_tables_elsewhere(self) -> None:
        """Let a script stop where its tables are not where the search path creates some."""
        if self.online or self.schema is not None:
            return
        marker = f'"{self.name}_step"'
        self.run(
            f"DO $do$ BEGIN IF to_regclass(quote_ident(current_schema()) || '.{marker}') IS NULL "
            f"THEN RAISE EXCEPTION USING MESSAGE = 'there are no tables of {self.name} in the "
            "schema ' || quote_ident(current_schema()), HINT = 'Set the search_path, or name the "
            "schema when the script is written.'; END IF; END $do$"
        )


def empty_marker(connection: Connection, name: str, schema: str) -> str:
    """Say what to do about a step marker without its row."""
    marker, function = (qualified(name + suffix, schema) for suffix in ("_step", "_notify"))
    problem = (
        f"the table {marker} is empty: it must hold the newest step that the tables of "
        f"{place_text(schema, name)} have; "
    )
    if connection.scalar(text(f"SELECT to_regproc('{function}') IS NULL")):
        tables = ", ".join(qualified(name + suffix, schema) for suffix in ddl.TABLE_SUFFIXES)
        return problem + (
            "they have no trigger either, so that something else than sa-jobs made them (a "
            "revision that was generated on SQLite, for example): drop them by "
            f"`DROP TABLE IF EXISTS {tables}`, and let sa_jobs.migrations.upgrade() or "
            "`sa-jobs db upgrade` make them"
        )
    newest = revisions()[-1]
    return problem + (
        "put back the row that was deleted, for the newest step by `INSERT INTO "
        f"{marker} (revision, min_client) VALUES ('{newest.revision}', '{newest.min_client}')`"
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
            if target is None:
                with errors_of_alembic():
                    upgrade(Target.of_alembic(upgrading=True))
                return
            if target.online and not _lacks(target, step):
                return
            if step.down_revision is None:
                target = replace(target, fresh=True)
            what = f"the step {step.revision} cannot be run on {target}"
            # Of tables in use, indexes may be built outside the transaction: no savepoint then.
            frame = target.savepoint() if target.fresh else nullcontext(target)
            with refusals(what, target.schema, fresh=target.fresh), frame as within:
                change(within)
            marker = target.table("_step")
            if step.down_revision is None:
                target.run(
                    f"INSERT INTO {marker} (revision, min_client)"
                    f" VALUES ('{step.revision}', '{step.min_client}')"
                )
            else:
                _set_marker(target, step)

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
            if target is None:
                with errors_of_alembic():
                    downgrade(Target.of_alembic(upgrading=False))
                return
            if target.online and not _is_newest(target, step):
                return
            what = f"the step {step.revision} cannot be undone on {target}"
            with refusals(what, target.schema, fresh=False), target.savepoint() as within:
                change(within)
            if step.down_revision is not None:
                _set_marker(target, revisions()[position(step.down_revision)])

        return downgrade

    return decorate


def _set_marker(target: Target, step: Step) -> None:
    # Without a savepoint: whoever has altered the tables may write this.
    target.operations.execute(
        f"UPDATE {target.table('_step')}"
        f" SET revision = '{step.revision}', min_client = '{step.min_client}'"
    )


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


@contextmanager
def errors_of_alembic() -> Iterator[None]:
    """Make an error of ours one of Alembic's as well, which its command line shows as one line."""
    from alembic.util import CommandError

    try:
        yield
    except SaJobsError as error:
        if isinstance(error, CommandError):
            raise
        kind: Any = type(error)
        raise _command_error(kind)(str(error)) from error.__cause__


@cache
def _command_error(kind: Any) -> Any:
    from alembic.util import CommandError

    return type(kind.__name__, (kind, CommandError), {"__doc__": kind.__doc__})


def _is_open(connection: Connection | None) -> bool:
    return connection is not None and not connection.closed


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
        target.refuse_forbidden_schema()
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


def _keep_setting(name: str, under: str) -> str:
    """Return a statement that copies a setting, for the rest of the transaction."""
    # A DO block, since a SELECT would print a row.
    return f"DO $do$ BEGIN PERFORM set_config('{under}', current_setting('{name}'), true); END $do$"


def _setting(connection: Connection, name: str) -> str:
    value = connection.scalar(text(f"SELECT current_setting('{name}')"))
    return str(value)


def _set(connection: Connection, name: str, value: str, *, local: bool) -> None:
    connection.execute(
        text(f"SELECT set_config('{name}', CAST(:value AS text), {'true' if local else 'false'})"),
        {"value": value},
    )


@contextmanager
def _unlimited(connection: Connection) -> Iterator[None]:
    """Let statements run as long as they need: a build that is cut off leaves an invalid index."""
    names = ("lock_timeout", "statement_timeout")
    before = {name: _setting(connection, name) for name in names}
    for name in names:
        _set(connection, name, "0", local=False)
    try:
        yield
    finally:
        if not connection.invalidated:
            for name, value in before.items():
                _set(connection, name, value, local=False)
