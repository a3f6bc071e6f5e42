"""What step files are written with: the tables to work on, and the frame around each step.

A step's SQL is text, frozen when it is released: it names every object itself, so that neither a
host's naming convention nor a later change of the models reaches it. It holds no percent sign and
no colon before a word, which Alembic and the drivers would read as parameters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

import sa_jobs
from sa_jobs.errors import (
    MigrationError,
    NeedsOwnTransactionError,
    SaJobsError,
    SchemaVersionError,
)
from sa_jobs.migrations._steps import Step, position, revisions

if TYPE_CHECKING:
    from alembic.operations import Operations

WAIT_SECONDS = 60.0
"""How long a migration waits for another one in the same database."""

LOCK_TIMEOUT = "100ms"
"""How long a statement waits for the lock on a table: so long, everybody behind it waits too."""

LOCK_ATTEMPTS = 60
"""How often such a statement is tried, with pauses in between; in all, about a minute."""

LARGE_TABLE_ROWS = 10_000
"""Up to that many rows, building an index takes milliseconds, and writes may wait for it."""

Concurrently = bool | Literal["auto"]

# One lock for each database; the number is the bytes of "sa_jobs".
LOCK_KEY = int.from_bytes(b"sa_jobs", "big")

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_TIMEOUT = re.compile(r"\d+ ?(ms|s|min)?")

# lock_not_available and deadlock_detected: another try may get the lock.
_LOCK_STATES = ("55P03", "40P01")


class Found(NamedTuple):
    """Where tables are, and what their step marker says."""

    schema: str
    revision: str | None
    min_client: str | None


def find(connection: Connection, *, name: str, schema: str | None) -> Found | None:
    """Return where the tables are and what their marker says, None if there are no tables.

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
    row = connection.execute(
        text(f"SELECT revision, min_client FROM {marker} ORDER BY revision DESC LIMIT 1")
    ).one_or_none()
    return Found(found, *(row or (None, None)))


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


def place_options(schema: str | None, name: str) -> str:
    """Return the options that name these tables on the command line."""
    return (f" --schema {schema}" if schema else "") + (
        f" --name {name}" if name != "sa_jobs" else ""
    )


def _check_policy(concurrently: Any, lock_timeout: Any, lock_attempts: Any) -> None:
    if concurrently not in (True, False, "auto"):
        raise MigrationError(f'concurrently={concurrently!r} must be True, False or "auto"')
    if not isinstance(lock_timeout, str) or not _TIMEOUT.fullmatch(lock_timeout):
        raise MigrationError(
            f'lock_timeout={lock_timeout!r} must be a time as PostgreSQL spells it, such as "100ms"'
        )
    if not isinstance(lock_attempts, int) or lock_attempts < 1:
        raise MigrationError(f"lock_attempts={lock_attempts!r} must be 1 or more")


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
    create_schema: bool = True
    concurrently: Concurrently = "auto"
    lock_timeout: str = LOCK_TIMEOUT
    lock_attempts: int = LOCK_ATTEMPTS
    # Whether the tables are made by the same run, so that nobody waits for them.
    fresh: bool = False

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
    ) -> Target:
        """Wait for other migrations of this database, then look up where the tables are."""
        context = operations.get_context()
        check_place(context.dialect.name, name, schema)
        _check_policy(concurrently, lock_timeout, lock_attempts)
        policy = (concurrently, lock_timeout, lock_attempts)
        if context.as_sql:
            return cls(operations, name, schema, create_schema, *policy)
        connection = operations.get_bind()
        _lock(connection, wait_seconds)
        if schema is None:
            found = find(connection, name=name, schema=None)
            schema = found.schema if found else connection.scalar(text("SELECT current_schema()"))
            if schema is None:
                raise MigrationError(
                    "no schema on the connection's search_path exists: create one, or say schema="
                )
        return cls(operations, name, schema, create_schema, *policy)

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

    def alter(self, sql: str, *, on: str = "") -> None:
        """Run one statement that takes a strong lock on a table that may be in use.

        Whoever waits for such a lock makes all others wait behind it. So it waits a short while
        only, goes back to a savepoint, and tries again after a pause.
        """
        if self.fresh:
            self.run(sql)
        elif not self.online:
            self.run(f"SET LOCAL lock_timeout = '{self.lock_timeout}'")
            self.run(sql)
            self.run("SET LOCAL lock_timeout TO DEFAULT")
        else:
            self._alter_online(sql, on)

    def _alter_online(self, sql: str, on: str) -> None:
        connection = self.operations.get_bind()
        for attempt in range(1, self.lock_attempts + 1):
            try:
                with connection.begin_nested():
                    before = _setting(connection, "lock_timeout")
                    _set(connection, "lock_timeout", self.lock_timeout, local=True)
                    self.run(sql)
                    # DDL of the host may follow in this transaction.
                    _set(connection, "lock_timeout", before, local=True)
                return
            except DBAPIError as error:
                if _sqlstate(error) not in _LOCK_STATES:
                    raise
                if attempt == self.lock_attempts:
                    raise MigrationError(
                        f"the table {self.table(on)} was locked by others at each of "
                        f"{attempt} attempts (server processes {self._lock_holders(on)}): "
                        "let them end, then run this again"
                    ) from error
            pause(connection, min(0.1 * attempt, 1.0))

    def _lock_holders(self, on: str) -> str:
        holders = self.operations.get_bind().scalars(
            text(
                "SELECT DISTINCT pid FROM pg_catalog.pg_locks"
                " WHERE relation = pg_catalog.to_regclass(CAST(:table AS text)) AND granted"
                " AND database = (SELECT oid FROM pg_catalog.pg_database"
                " WHERE datname = current_database()) AND pid <> pg_backend_pid() ORDER BY pid"
            ),
            {"table": self.table(on)},
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
                self.alter(create + rest, on=on)
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
                    self.run(f"DROP INDEX CONCURRENTLY {index}")
                self.run(f"{create}CONCURRENTLY {rest}")
        else:
            if valid is False:
                self.alter(f"DROP INDEX {index}", on=on)
            self.alter(create + rest, on=on)

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
        # The lock of the transaction ends with it, so one of the session takes over.
        connection.execute(text(f"SELECT pg_advisory_lock({LOCK_KEY})"))
        try:
            with context.autocommit_block(), _unlimited(connection):
                yield
            _lock(connection, WAIT_SECONDS)
        finally:
            if not connection.invalidated:
                connection.execute(text(f"SELECT pg_advisory_unlock({LOCK_KEY})"))

    def position(self) -> int:
        """Return the place in the chain of the newest step that the tables have, -1 for none."""
        found = find(self.operations.get_bind(), name=self.name, schema=self.schema)
        if found is None:
            return -1
        revision = found.revision
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
            if target is None:
                with errors_of_alembic():
                    upgrade(Target.of_alembic())
                return
            if target.online and not _lacks(target, step):
                return
            change(target)
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
                    downgrade(Target.of_alembic())
                return
            if target.online and not _is_newest(target, step):
                return
            change(target)
            if step.down_revision is not None:
                _set_marker(target, revisions()[position(step.down_revision)])

        return downgrade

    return decorate


def _set_marker(target: Target, step: Step) -> None:
    target.run(
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
    # since a lock_timeout that strikes would leave the host's transaction aborted. Not asleep in
    # the server, where a statement holds a snapshot: an index that the other one builds
    # concurrently would wait for the end of this transaction, and so both for each other.
    deadline = time.monotonic() + wait_seconds
    tries = 0
    while not try_lock(connection):
        tries += 1
        if time.monotonic() >= deadline:
            raise still_locked(connection, wait_seconds)
        # A try that was under way when the build looked for snapshots is waited for all the same,
        # until this transaction ends.
        if tries % 10 == 0 and _holds_up_the_other(connection):
            raise MigrationError(
                "another migration of sa-jobs is building an index in this database, and must "
                "wait for the end of this transaction: run this again"
            )
        pause(connection, 0.1)
    if tries and connection.scalar(
        text(
            "SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"
        )
    ):
        raise MigrationError(
            "another migration of sa-jobs has ended meanwhile, and this transaction cannot see "
            "what it did, since its snapshot is older: run this again"
        )


def try_lock(connection: Connection) -> bool:
    """Return whether this transaction has the lock now; it does not wait."""
    return bool(connection.scalar(text(f"SELECT pg_try_advisory_xact_lock({LOCK_KEY})")))


def still_locked(connection: Connection, wait_seconds: float) -> MigrationError:
    """Return the error that another migration has had the lock for too long."""
    holder = connection.scalar(text(f"SELECT max(pid) FROM pg_locks WHERE {_OURS}"))
    return MigrationError(
        f"another migration of sa-jobs has been running in this database for {wait_seconds:g} "
        f"seconds (server process {holder}): let it end, then run this again"
    )


def _holds_up_the_other(connection: Connection) -> bool:
    return bool(
        connection.scalar(
            text(
                "SELECT bool_or(pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
                f" FROM pg_locks WHERE {_OURS}"
            )
        )
    )


def pause(connection: Connection, seconds: float) -> None:
    """Wait without a statement in the server, and let an event loop under us go on."""
    if connection.dialect.is_async:
        import asyncio

        from sqlalchemy.util import await_only

        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def _sqlstate(error: DBAPIError) -> str | None:
    original: Any = error.orig
    for attribute in ("sqlstate", "pgcode"):
        state: str | None = getattr(original, attribute, None)
        if state is not None:
            return state
    # pg8000 gives the fields of the server's message.
    fields = original.args[0] if original is not None and original.args else None
    return fields.get("C") if isinstance(fields, dict) else None


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
