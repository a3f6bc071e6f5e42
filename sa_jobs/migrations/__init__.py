"""Create and upgrade the tables: from the host's own Alembic chain, or without Alembic.

A host revision calls `upgrade()` and `downgrade()`; hosts without Alembic call `apply()` and
`revert()`, or the command `sa-jobs db upgrade`. All run the same steps and keep the same step
marker, a row in the database (table `sa_jobs_step`), so that one may take over from the other,
and from `create_all()`.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session

import sa_jobs
from sa_jobs.errors import MigrationError
from sa_jobs.migrations._ddl import (
    LOCK_ATTEMPTS,
    LOCK_TIMEOUT,
    Concurrently,
    Target,
    check_wait,
    empty_marker,
    errors_of_alembic,
    running_operations,
)
from sa_jobs.migrations._lock import WAIT_SECONDS, pause, still_locked, try_lock
from sa_jobs.migrations._place import Found, check_place, find, place_options, place_text
from sa_jobs.migrations._steps import Step, is_at_least, is_version, position, revisions
from sa_jobs.migrations._walk import down, last_position, prepare, up

__all__ = [
    "LOCK_TIMEOUT",
    "SchemaStatus",
    "Step",
    "apply",
    "build_indexes",
    "check",
    "current",
    "downgrade",
    "revert",
    "revisions",
    "script",
    "upgrade",
]

_log = logging.getLogger("alembic.sa_jobs")

# The oldest step that this release's workers and enqueuers run on.
OLDEST_USABLE = "sa_jobs_0001"


@dataclass(frozen=True)
class SchemaStatus:
    """How far the tables are: their newest step, the package's, and what to do.

    `usable` says whether this release works on them; `command` is one sentence with the command
    to run, None when there is nothing to do.
    """

    current: str | None
    latest: str
    usable: bool
    command: str | None


def upgrade(
    to: str = "head",
    *,
    from_: str | None = None,
    schema: str | None = None,
    name: str = "sa_jobs",
    concurrently: Concurrently = "auto",
    lock_timeout: str = LOCK_TIMEOUT,
    lock_attempts: int = LOCK_ATTEMPTS,
    create_schema: bool = True,
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """Run the steps after `from_` up to `to`, inside a revision of the host's Alembic chain.

    Online, the step marker says what is there already: such steps are skipped, and tables older
    than `from_` are refused. Offline (`--sql`), the steps between the two are written out. All of
    it belongs to the transaction of the revision, but for an index on a table of more than 10 000
    rows: it is built CONCURRENTLY, after a commit, and a run that failed is resumed by the next.
    `concurrently=True` builds so on any table with rows (and is what a script needs to say),
    `False` on none.

    A change to a table that others use waits `lock_timeout` (as PostgreSQL spells it) for its
    lock, and is tried `lock_attempts` times, with pauses of up to a second.

    Without a schema, the tables are those in the first schema on the connection's search path,
    where CREATE puts new ones, whatever is farther down it; a `schema_translate_map` of the
    connection counts too. A missing schema is created if `create_schema`.

    Migrations in one database wait for each other, up to `wait_seconds`.

    Raises MigrationError for a lock that does not come free, a name that is taken, a schema that
    may not be created; StepNotFoundError for a step that this package does not have;
    NeedsOwnTransactionError for an index on a large table within a transaction that is not
    Alembic's; SchemaVersionError for tables newer than this package. Alembic's command line shows
    each as one line.
    """
    with errors_of_alembic():
        target = Target.open(
            running_operations(),
            name=name,
            schema=schema,
            create_schema=create_schema,
            wait_seconds=wait_seconds,
            concurrently=concurrently,
            lock_timeout=lock_timeout,
            lock_attempts=lock_attempts,
            alone=True,
        )
        steps = up(target, to, from_)
    if target.online and from_ is None and not steps:
        _log.warning(
            "The tables of %s were there already, and this revision adopts them: its downgrade() "
            "will drop them with all jobs",
            target,
        )


def downgrade(
    to: str | None,
    *,
    from_: str,
    schema: str | None = None,
    name: str = "sa_jobs",
    lock_timeout: str = LOCK_TIMEOUT,
    lock_attempts: int = LOCK_ATTEMPTS,
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """Undo the steps after `to` (None or "base": all), inside a revision of the host's chain.

    Online, all steps that the marker has are undone, newer ones than `from_` too: `to` is what
    the host's chain asks for. Offline, the steps from `from_` down are written out. Undoing the
    first step drops the tables and the jobs in them, whoever made them; the schema stays. Tables of
    the host that refer to ours must be gone before.

    Without a schema, tables farther down the search path than where upgrade() makes them are
    refused, and not touched. Raises as upgrade() does otherwise.
    """
    with errors_of_alembic():
        if from_ is None:
            raise MigrationError("from_=None: say the step that the revision's upgrade() leads to")
        target = Target.open(
            running_operations(),
            name=name,
            schema=schema,
            wait_seconds=wait_seconds,
            lock_timeout=lock_timeout,
            lock_attempts=lock_attempts,
        )
        down(target, to, from_)


def apply(
    bind: Engine | Connection,
    to: str = "head",
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    concurrently: Concurrently = "auto",
    lock_timeout: str = LOCK_TIMEOUT,
    lock_attempts: int = LOCK_ATTEMPTS,
    create_schema: bool = True,
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Step, ...]:
    """Run the steps up to `to` that the tables lack, and return them; for hosts without Alembic.

    On an engine it runs in a transaction of its own, left only to build an index on a large table.
    On a connection it runs in the caller's transaction and never commits. Of several at once, one
    works and the others wait, up to `wait_seconds`, to find nothing left to do; give them READ
    COMMITTED, or the waiting ones must be run again.

    Takes the options of upgrade(), and raises as it does.
    """
    options: dict[str, Any] = {
        "create_schema": create_schema,
        "concurrently": concurrently,
        "lock_timeout": lock_timeout,
        "lock_attempts": lock_attempts,
    }
    with _standalone(bind, name, schema, wait_seconds, **options) as target:
        return up(target, to, None)


def revert(
    bind: Engine | Connection,
    to: str | None,
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    lock_timeout: str = LOCK_TIMEOUT,
    lock_attempts: int = LOCK_ATTEMPTS,
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Step, ...]:
    """Undo the steps after `to` (None or "base": all), newest first, and return them.

    The counterpart of apply(), in the same transaction. Undoing the first step drops the tables
    and the jobs in them; the schema stays.

    Raises as upgrade() does.
    """
    options: dict[str, Any] = {"lock_timeout": lock_timeout, "lock_attempts": lock_attempts}
    with _standalone(bind, name, schema, wait_seconds, **options) as target:
        return down(target, to, None)


def build_indexes(
    engine: Engine,
    to: str = "head",
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Step, ...]:
    """Build CONCURRENTLY what indexes the steps up to `to` need, and return these steps.

    For tables so large that upgrade() must build outside a transaction, where a host cannot leave
    its own: the steps find the indexes and are quick. They stay pending until they are run. May be
    repeated, also after it was killed.

    Raises MigrationError where there are no tables yet, and as upgrade() does.
    """
    if not isinstance(engine, Engine):
        raise MigrationError(
            f"build_indexes() takes an Engine, to leave its transaction, not {_kind(engine)}"
        )
    with _standalone(engine, name, schema, wait_seconds, concurrently=True) as target:
        return prepare(target, to)


def script(
    to: str | None = "head",
    *,
    from_: str | None = None,
    schema: str | None = None,
    name: str = "sa_jobs",
    concurrently: Concurrently = "auto",
    lock_timeout: str = LOCK_TIMEOUT,
) -> str:
    """Return the SQL that takes the tables from one step to another, forwards or backwards.

    For an administrator who runs it by hand, with `psql -v ON_ERROR_STOP=1`; no database is
    needed. None and "base" mean no tables. It ends with the step marker, so that every other way
    goes on from there. With `concurrently=True` the indexes on tables that exist already are built
    outside the transaction.

    Raises StepNotFoundError for a step that this package does not have.
    """
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    output = io.StringIO()
    context = MigrationContext.configure(
        dialect_name="postgresql",
        opts={"as_sql": True, "output_buffer": output, "literal_binds": True},
    )
    target = Target.open(
        Operations(context),
        name=name,
        schema=schema,
        concurrently=concurrently,
        lock_timeout=lock_timeout,
    )
    first = None if from_ == "base" else from_
    last = -1 if to in (None, "base") else last_position(to)
    with context.begin_transaction():
        if last > position(first):
            up(target, to or "head", first)
        else:
            down(target, revisions()[last].revision if last >= 0 else None, first)
    return output.getvalue()


def current(
    connection: Connection, *, schema: str | None = None, name: str = "sa_jobs"
) -> str | None:
    """Return the newest step that the tables have, None where there are none.

    Without a schema, the first tables on the connection's search path count, or those that a
    `schema_translate_map` names.
    """
    _check_connection("current", connection)
    found = find(connection, name=name, schema=schema)
    return found.revision if found else None


def check(
    connection: Connection, *, schema: str | None = None, name: str = "sa_jobs"
) -> SchemaStatus:
    """Compare the tables with the steps of this package; change nothing.

    Tables with a step that this package does not know are usable if their marker says that its
    release may still work on them: so workers of both releases go on while a new one is rolled
    out.
    """
    _check_connection("check", connection)
    found = find(connection, name=name, schema=schema)
    now = found.revision if found else None
    latest = revisions()[-1].revision
    where = place_text(schema, name)
    if found is None:
        command = f"There are no tables of {where} here: {_run(schema, name)}."
        return SchemaStatus(None, latest, usable=False, command=command)
    if now is None:
        command = empty_marker(connection, name, found.schema)
        return SchemaStatus(None, latest, usable=False, command=command)
    if now not in {step.revision for step in revisions()}:
        return _check_newer(found, latest, where)
    if now == latest:
        return SchemaStatus(now, latest, usable=True, command=None)
    return SchemaStatus(
        now,
        latest,
        usable=position(now) >= position(OLDEST_USABLE),
        command=(
            f"The tables of {where} are at {now}, and sa-jobs "
            f"{sa_jobs.__version__} is at {latest}: {_run(schema, name)}."
        ),
    )


def _check_newer(found: Found, latest: str, where: str) -> SchemaStatus:
    oldest = found.min_client or ""
    if not is_version(oldest):
        command = (
            f"The step marker of {where} is at {found.revision}, which sa-jobs "
            f"{sa_jobs.__version__} does not know, and names {oldest!r} as the oldest release that "
            "may work on it, which is no version: put back what was changed by hand, or run "
            "`pip install --upgrade sa-jobs`."
        )
        return SchemaStatus(found.revision, latest, usable=False, command=command)
    if is_at_least(sa_jobs.__version__, oldest):
        return SchemaStatus(found.revision, latest, usable=True, command=None)
    return SchemaStatus(
        found.revision,
        latest,
        usable=False,
        command=(
            f"The tables of {where} are at {found.revision}, which is for sa-jobs {oldest} or "
            f"newer, and this is {sa_jobs.__version__}: run `pip install --upgrade sa-jobs`."
        ),
    )


def _run(schema: str | None, name: str) -> str:
    return (
        f"run `sa-jobs db upgrade{place_options(schema, name)}`; where your own Alembic chain "
        "makes the tables, run `alembic revision --autogenerate`, unless it has the revision "
        "already, and `alembic upgrade head` "
        "(Flask-Migrate: `flask db migrate` and `flask db upgrade`)"
    )


def _check_connection(function: str, connection: Any) -> None:
    if not isinstance(connection, Connection):
        raise MigrationError(
            f"{function}() takes a Connection, not {_kind(connection)}: "
            f"{_how_to_connect(function, connection)}"
        )


def _kind(value: Any) -> str:
    # Not the value itself: a URL may hold a password.
    return "None" if value is None else f"the {type(value).__name__} given"


def _how_to_connect(function: str, value: Any) -> str:
    call = f"sa_jobs.migrations.{function}"
    if type(value).__module__.startswith("sqlalchemy.ext.asyncio"):
        return (
            f"with `async with engine.connect() as connection`, await connection.run_sync({call})"
        )
    if isinstance(value, Session):
        return f"{call}(session.connection())"
    return f"`with create_engine(url).connect() as connection`, {call}(connection)"


@contextmanager
def _standalone(
    bind: Engine | Connection,
    name: str,
    schema: str | None,
    wait_seconds: float,
    **options: Any,
) -> Iterator[Target]:
    if not isinstance(bind, (Engine, Connection)):
        raise MigrationError(
            f"the steps need an Engine or a Connection, not {_kind(bind)}: "
            f"{_how_to_connect('apply', bind)}"
        )
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    # Operations of its own, not the module alembic.op, which is one for the whole process.
    def target_on(context: MigrationContext) -> Target:
        return Target.open(
            Operations(context), name=name, schema=schema, wait_seconds=wait_seconds, **options
        )

    if isinstance(bind, Connection):
        yield target_on(MigrationContext.configure(bind))
        return
    check_place(bind.dialect.name, name, schema)
    check_wait(wait_seconds)
    deadline = time.monotonic() + wait_seconds
    with bind.connect() as connection:
        context = MigrationContext.configure(connection)
        while True:
            # Alembic must know the transaction as its own to be able to leave it. Each try is one
            # of its own, since an index that is built meanwhile may wait for its end.
            with context.begin_transaction():
                if try_lock(connection):
                    yield target_on(context)
                    return
                if time.monotonic() >= deadline:
                    raise still_locked(connection, wait_seconds)
            pause(connection, 0.1)
