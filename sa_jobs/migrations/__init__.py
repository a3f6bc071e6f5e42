"""Create and upgrade the tables: from the host's own Alembic chain, or without Alembic.

A host revision calls `upgrade()` and `downgrade()`; hosts without Alembic call `apply()` and
`revert()`, or the command `sa-jobs db upgrade`. All run the same steps and keep the same step
marker, a row in the database (table `sa_jobs_step`), so that one may take over from the other,
and from `create_all()`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Engine

import sa_jobs
from sa_jobs.errors import MigrationError
from sa_jobs.migrations._ddl import (
    LOCK_ATTEMPTS,
    LOCK_TIMEOUT,
    WAIT_SECONDS,
    Concurrently,
    Target,
    check_place,
    errors_of_alembic,
    find,
    holds_lock,
    pause,
    place_options,
    running_operations,
    still_locked,
    try_lock,
)
from sa_jobs.migrations._steps import Step, is_at_least, module_of, position, revisions

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
    lock, and is tried `lock_attempts` times, with pauses of up to a second. Without a schema, the
    tables are looked for, or made, on the connection's search path; a missing schema is created if
    `create_schema`.

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
        )
        _up(target, to, from_)


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
    first step drops the tables and the jobs in them; the schema stays. Tables of the host that
    refer to ours must be gone before.

    Raises as upgrade() does.
    """
    with errors_of_alembic():
        target = Target.open(
            running_operations(),
            name=name,
            schema=schema,
            wait_seconds=wait_seconds,
            lock_timeout=lock_timeout,
            lock_attempts=lock_attempts,
        )
        _down(target, to, from_)


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
        return _up(target, to, None)


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
        return _down(target, to, None)


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
    steps = revisions()
    last = len(steps) - 1 if to == "head" else position(to)
    with _standalone(engine, name, schema, wait_seconds, concurrently=True) as target:
        newest = target.position()
        if newest < 0:
            raise MigrationError(
                f"there are no tables of {target} here: the steps that make them make the "
                "indexes too"
            )
        pending = [
            step for step in steps[newest + 1 : last + 1] if hasattr(module_of(step), "prepare")
        ]
        for step in pending:
            module_of(step).prepare(target)
    return tuple(pending)


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
    last = None if to == "base" else revisions()[-1].revision if to == "head" else to
    with context.begin_transaction():
        if position(last) > position(first):
            _up(target, last or "head", first)
        else:
            _down(target, last, first)
    return output.getvalue()


def current(
    connection: Connection, *, schema: str | None = None, name: str = "sa_jobs"
) -> str | None:
    """Return the newest step that the tables have, None where there are none.

    Without a schema, the first tables on the connection's search path count.
    """
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
    found = find(connection, name=name, schema=schema)
    now = found.revision if found else None
    latest = revisions()[-1].revision
    if found is None or now is None:
        return SchemaStatus(
            now,
            latest,
            usable=False,
            command=f"There are no tables of {_place(schema, name)} here: {_run(schema, name)}.",
        )
    if now not in {step.revision for step in revisions()}:
        return _check_newer(now, latest, found.min_client or "", _place(schema, name))
    if now == latest:
        return SchemaStatus(now, latest, usable=True, command=None)
    return SchemaStatus(
        now,
        latest,
        usable=position(now) >= position(OLDEST_USABLE),
        command=(
            f"The tables of {_place(schema, name)} are at {now}, and sa-jobs "
            f"{sa_jobs.__version__} is at {latest}: {_run(schema, name)}."
        ),
    )


def _check_newer(now: str, latest: str, min_client: str, where: str) -> SchemaStatus:
    if min_client and is_at_least(sa_jobs.__version__, min_client):
        return SchemaStatus(now, latest, usable=True, command=None)
    return SchemaStatus(
        now,
        latest,
        usable=False,
        command=(
            f"The tables of {where} are at {now}, which is for sa-jobs {min_client} or newer, and "
            f"this is {sa_jobs.__version__}: run `pip install --upgrade sa-jobs`."
        ),
    )


def _place(schema: str | None, name: str) -> str:
    return f"{schema}.{name}" if schema else name


def _run(schema: str | None, name: str) -> str:
    return (
        f"run `sa-jobs db upgrade{place_options(schema, name)}`; where your own Alembic chain "
        "makes the tables, run `alembic revision --autogenerate`, unless it has the revision "
        "already, and `alembic upgrade head` "
        "(Flask-Migrate: `flask db migrate` and `flask db upgrade`)"
    )


@contextmanager
def _standalone(
    bind: Engine | Connection,
    name: str,
    schema: str | None,
    wait_seconds: float,
    **options: Any,
) -> Iterator[Target]:
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    # Operations of its own, not the module alembic.op, which is one for the whole process.
    def target_on(context: MigrationContext) -> Target:
        target = Target.open(
            Operations(context), name=name, schema=schema, wait_seconds=wait_seconds, **options
        )
        if not holds_lock(target.operations.get_bind()):
            raise MigrationError(
                "the connection is in autocommit, where a failure would leave half of a step "
                "behind: use one with transactions"
            )
        return target

    if isinstance(bind, Connection):
        yield target_on(MigrationContext.configure(bind))
        return
    check_place(bind.dialect.name, name, schema)
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


def _up(target: Target, to: str, from_: str | None) -> tuple[Step, ...]:
    steps = revisions()
    last = len(steps) - 1 if to == "head" else position(to)
    start = position(from_)
    if target.online:
        newest = target.position()
        if newest < start:
            raise MigrationError(
                f"this revision expects the tables of {target} at {from_} or later, and they are "
                f"{'at ' + steps[newest].revision if newest >= 0 else 'absent'}: run the "
                "revision of your chain that brings them there"
            )
        start = newest
    target = replace(target, fresh=start < 0)
    pending = steps[start + 1 : last + 1]
    for step in pending:
        module_of(step).upgrade(target)
    return pending


def _down(target: Target, to: str | None, from_: str | None) -> tuple[Step, ...]:
    last = position(None if to == "base" else to)
    start = position(from_)
    if target.online:
        start = target.position()
        if start < last and to is not None:
            raise MigrationError(
                f"the tables of {target} are not at {to} or later, so there is nothing to go "
                "back from"
            )
    undone = revisions()[last + 1 : start + 1][::-1]
    for step in undone:
        module_of(step).downgrade(target)
    return undone
