"""Create and upgrade the tables: from the host's own Alembic chain, or without Alembic.

A host revision calls `upgrade()` and `downgrade()`; hosts without Alembic call `apply()` and
`revert()`, or the command `sa-jobs db upgrade`. All run the same steps and keep the same step
marker, a row in the database (table `sa_jobs_step`), so that one may take over from the other,
and from `create_all()`.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection

import sa_jobs
from sa_jobs.errors import MigrationError
from sa_jobs.migrations._ddl import (
    WAIT_SECONDS,
    Target,
    find,
    holds_lock,
    running_operations,
)
from sa_jobs.migrations._steps import Step, module_of, position, revisions

__all__ = [
    "SchemaStatus",
    "Step",
    "apply",
    "check",
    "current",
    "downgrade",
    "revert",
    "revisions",
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
    create_schema: bool = True,
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """Run the steps after `from_` up to `to`, inside a revision of the host's Alembic chain.

    Online, the step marker says what is there already: such steps are skipped, and tables older
    than `from_` are refused. Offline (`--sql`), the steps between the two are written out. All of
    it belongs to the transaction of the revision. Without a schema, the tables are looked for, or
    made, on the connection's search path; a missing schema is created if `create_schema`.

    Migrations in one database wait for each other, up to `wait_seconds`.

    Raises MigrationError for a step that this package does not have, a lock that does not come
    free, a name that is taken, a schema that may not be created; SchemaVersionError for tables
    newer than this package.
    """
    target = Target.open(
        running_operations(),
        name=name,
        schema=schema,
        create_schema=create_schema,
        wait_seconds=wait_seconds,
    )
    _up(target, to, from_)


def downgrade(
    to: str | None,
    *,
    from_: str,
    schema: str | None = None,
    name: str = "sa_jobs",
    wait_seconds: float = WAIT_SECONDS,
) -> None:
    """Undo the steps after `to` (None or "base": all), inside a revision of the host's chain.

    Online, all steps that the marker has are undone, newer ones than `from_` too: `to` is what
    the host's chain asks for. Offline, the steps from `from_` down are written out. Undoing the
    first step drops the tables and the jobs in them; the schema stays. Tables of the host that
    refer to ours must be gone before.

    Raises as upgrade() does.
    """
    target = Target.open(running_operations(), name=name, schema=schema, wait_seconds=wait_seconds)
    _down(target, to, from_)


def apply(
    connection: Connection,
    to: str = "head",
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    create_schema: bool = True,
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Step, ...]:
    """Run the steps up to `to` that the tables lack, and return them; for hosts without Alembic.

    Runs in the caller's transaction and never commits: `with engine.begin() as connection`. Of
    several at once, one works and the others wait, up to `wait_seconds`, to find nothing left to
    do; give them READ COMMITTED, or the waiting ones must be run again.

    Raises as upgrade() does.
    """
    target = _standalone(connection, name, schema, create_schema, wait_seconds)
    return _up(target, to, None)


def revert(
    connection: Connection,
    to: str | None,
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    wait_seconds: float = WAIT_SECONDS,
) -> tuple[Step, ...]:
    """Undo the steps after `to` (None or "base": all), newest first, and return them.

    The counterpart of apply(), in the caller's transaction too. Undoing the first step drops the
    tables and the jobs in them; the schema stays.

    Raises as upgrade() does.
    """
    target = _standalone(connection, name, schema, False, wait_seconds)
    return _down(target, to, None)


def current(
    connection: Connection, *, schema: str | None = None, name: str = "sa_jobs"
) -> str | None:
    """Return the newest step that the tables have, None where there are none.

    Without a schema, the first tables on the connection's search path count.
    """
    found = find(connection, name=name, schema=schema)
    return found[1] if found else None


def check(
    connection: Connection, *, schema: str | None = None, name: str = "sa_jobs"
) -> SchemaStatus:
    """Compare the tables with the steps of this package; change nothing."""
    now = current(connection, schema=schema, name=name)
    latest = revisions()[-1].revision
    if now == latest:
        return SchemaStatus(now, latest, usable=True, command=None)
    where = f"{schema}.{name}" if schema else name
    options = (f" --schema {schema}" if schema else "") + (
        f" --name {name}" if name != "sa_jobs" else ""
    )
    run = (
        f"run `sa-jobs db upgrade{options}`, or `alembic upgrade head` where your own Alembic "
        "chain makes the tables"
    )
    if now is None:
        return SchemaStatus(
            now, latest, usable=False, command=f"There are no tables of {where} here: {run}."
        )
    if now not in {step.revision for step in revisions()}:
        return SchemaStatus(
            now,
            latest,
            usable=False,
            command=(
                f"The tables of {where} are at {now}, which is newer than sa-jobs "
                f"{sa_jobs.__version__} knows: run `pip install --upgrade sa-jobs`."
            ),
        )
    return SchemaStatus(
        now,
        latest,
        usable=position(now) >= position(OLDEST_USABLE),
        command=(
            f"The tables of {where} are at {now}, and sa-jobs {sa_jobs.__version__} is at "
            f"{latest}: {run}."
        ),
    )


def _standalone(
    connection: Connection,
    name: str,
    schema: str | None,
    create_schema: bool,
    wait_seconds: float,
) -> Target:
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    # Operations of its own, not the module alembic.op, which is one for the whole process.
    target = Target.open(
        Operations(MigrationContext.configure(connection)),
        name=name,
        schema=schema,
        create_schema=create_schema,
        wait_seconds=wait_seconds,
    )
    if not holds_lock(connection):
        raise MigrationError(
            "the connection is in autocommit, where a failure would leave half of a step behind: "
            "use one with transactions"
        )
    return target


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
