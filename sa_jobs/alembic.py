"""Alembic's autogenerate for the tables: it writes the host's revisions, and leaves them alone.

`attach()` registers a comparator. In a host that has attached tables, `alembic revision
--autogenerate` and `flask db migrate` then write a call of `sa_jobs.migrations.upgrade()` when the
database lacks a step of the installed package, and nothing about the tables otherwise; `alembic
check` fails until that revision exists. No edit of env.py is needed. `include_name()` and
`include_object()` are for hosts that do not attach.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from alembic.autogenerate import comparators, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import Operations
from alembic.operations.ops import MigrateOperation, OpContainer, UpgradeOps
from alembic.util import CommandError
from sqlalchemy import MetaData

import sa_jobs
from sa_jobs import migrations
from sa_jobs.migrations._ddl import find
from sa_jobs.migrations._steps import position
from sa_jobs.models import DEFAULT_TABLES, Tables

__all__ = ["DowngradeOp", "UpgradeOp", "include_name", "include_object", "register"]

_log = logging.getLogger(__name__)

IncludeName = Callable[[str | None, Any, Mapping[str, Any]], bool]
IncludeObject = Callable[[Any, str | None, Any, bool, Any], bool]


class _StepsOp(MigrateOperation):
    """From one step to another, on the tables of one name and schema."""

    def __init__(self, to: str | None, from_: str | None, *, schema: str | None, name: str) -> None:
        self.to = to
        self.from_ = from_
        self.schema = schema
        self.name = name


class UpgradeOp(_StepsOp):
    """A call of `sa_jobs.migrations.upgrade()` in a revision."""

    def reverse(self) -> DowngradeOp:
        """Return the way back."""
        return DowngradeOp(self.from_, self.to, schema=self.schema, name=self.name)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return what `alembic check` shows: schema, name, and the steps from and to."""
        return ("sa_jobs_upgrade", self.schema, self.name, self.from_, self.to)


class DowngradeOp(_StepsOp):
    """A call of `sa_jobs.migrations.downgrade()` in a revision."""

    def reverse(self) -> UpgradeOp:
        """Return the way back."""
        return UpgradeOp(self.from_, self.to, schema=self.schema, name=self.name)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return schema, name, and the steps from and to."""
        return ("sa_jobs_downgrade", self.schema, self.name, self.from_, self.to)


def call_of(op: UpgradeOp | DowngradeOp) -> str:
    """Return the line of a revision, with all that it depends on spelled out."""
    function = "upgrade" if isinstance(op, UpgradeOp) else "downgrade"
    return (
        f"sa_jobs.migrations.{function}({op.to!r}, from_={op.from_!r}, "
        f"schema={op.schema!r}, name={op.name!r})"
    )


IMPORT = "import sa_jobs.migrations"

_registered = False


def register() -> None:
    """Let autogenerate of this process see the tables that are attached; again does nothing.

    `attach()` does it. An env.py calls it where the models were attached with `register=False`,
    or where it lists `sa_jobs.models.metadata` as a target.
    """
    global _registered  # noqa: PLW0603
    if _registered:
        return
    _registered = True
    # Not for the dialect "postgresql": before Alembic 1.18 that would replace its own comparators.
    options: dict[str, Any] = {}
    if "priority" in inspect.signature(comparators.dispatch_for).parameters:
        from alembic.util import DispatchPriority

        # Since Alembic 1.18, others would run after us otherwise, Alembic's own included.
        options["priority"] = DispatchPriority.LAST
    comparators.dispatch_for("schema", **options)(_compare)
    for op in (UpgradeOp, DowngradeOp):
        renderers.dispatch_for(op)(_render)
        Operations.implementation_for(op)(_run)


def include_name(
    *tables: Tables, also: IncludeName | None = None
) -> Callable[[str | None, Any, Mapping[str, Any]], bool]:
    """Return an `include_name` for `context.configure()` that hides the tables from autogenerate.

    Without arguments, the tables of the default name. `also` is the host's own function, which
    decides about everything else. For hosts that do not `attach()`: there, nothing is needed.
    """
    owned = _OwnedNames(tables or (DEFAULT_TABLES,))

    def include(name: str | None, kind: Any, parents: Mapping[str, Any]) -> bool:
        if kind == "table" and owned.has_table(parents.get("schema_name"), name):
            return False
        return also is None or also(name, kind, parents)

    return include


def include_object(
    *tables: Tables, also: IncludeObject | None = None
) -> Callable[[Any, str | None, Any, bool, Any], bool]:
    """Return an `include_object` for `context.configure()` that hides the tables.

    As include_name(), and it hides the tables in the host's metadata too.
    """
    owned = _OwnedNames(tables or (DEFAULT_TABLES,))

    def include(found: Any, name: str | None, kind: Any, reflected: bool, compare_to: Any) -> bool:
        table = found if kind == "table" else getattr(found, "table", None)
        if table is not None and owned.has_table(table.schema, table.name):
            return False
        return also is None or also(found, name, kind, reflected, compare_to)

    return include


class _OwnedNames:
    """The tables, and what else the steps make, by schema and name."""

    def __init__(self, attached: Iterable[Tables], default_schema: str | None = None) -> None:
        self._default_schema = default_schema
        self._tables: set[tuple[str | None, str]] = set()
        self._functions: set[tuple[str | None, str]] = set()
        for tables in attached:
            schema = self._known(tables.schema)
            self._tables |= {(schema, table.name) for table in tables.all}
            # The version table of the steps' own chain, where the host ran that before.
            self._tables.add((schema, f"{tables.name}_alembic_version"))
            self._functions.add((schema, f"{tables.name}_notify"))

    def _known(self, schema: str | None) -> str | None:
        # Alembic calls the default schema None, the models may spell it out.
        return None if schema == self._default_schema else schema

    def has_table(self, schema: str | None, name: str | None) -> bool:
        return (self._known(schema), name) in self._tables

    def has_target_of(self, op: MigrateOperation) -> bool:
        """Return whether an operation is about something of ours; duck-typed, to know others'."""
        if isinstance(op, _StepsOp):
            return False
        table = getattr(op, "table_name", None) or getattr(op, "source_table", None)
        if isinstance(table, str):
            return self.has_table(_schema_of(op), table)
        # An operation of alembic-utils, on a function or trigger.
        entity = getattr(op, "target", None)
        signature = getattr(entity, "signature", None)
        if isinstance(signature, str):
            name = signature.partition("(")[0].strip().strip('"')
            schema = self._known(getattr(entity, "schema", None))
            return (schema, name) in self._functions
        return False


def _schema_of(op: Any) -> str | None:
    schema: str | None = getattr(op, "schema", None) or getattr(op, "source_schema", None)
    return schema


def _compare(
    autogen_context: AutogenContext, upgrade_ops: UpgradeOps, schemas: Collection[str | None]
) -> None:
    connection, dialect = autogen_context.connection, autogen_context.dialect
    attached = tuple(_attached(autogen_context.metadata))
    # The steps' own environment compares the tables themselves.
    own_chain = "sa_jobs" in autogen_context.opts
    if not attached or own_chain or connection is None or dialect is None:
        return
    if dialect.name != "postgresql":
        return
    _run_again_at_the_end()
    owned = _OwnedNames(attached, dialect.default_schema_name)
    _remove(upgrade_ops, owned)
    # First, so that foreign keys of the host's find their table; last on the way back.
    upgrade_ops.ops[:0] = [
        op
        for tables in attached
        for op in _missing_steps(autogen_context, tables)
        if not any(_same(op, other) for other in upgrade_ops.ops)
    ]


def _attached(metadata: Any) -> Iterator[Tables]:
    targets = (metadata,) if isinstance(metadata, MetaData) else metadata or ()
    for target in targets:
        yield from target.info.get("sa_jobs", ())


def _run_again_at_the_end() -> None:
    """Before Alembic 1.18, run after the comparators that were registered after ours."""
    registry = getattr(comparators, "_registry", {}).get(("schema", "default"))
    # The list is what Alembic is iterating over.
    if registry and registry[-1] is not _compare:
        registry.append(_compare)


def _remove(container: OpContainer, owned: _OwnedNames) -> None:
    container.ops[:] = [op for op in container.ops if not owned.has_target_of(op)]
    for op in container.ops:
        if isinstance(op, OpContainer):
            _remove(op, owned)


def _missing_steps(autogen_context: AutogenContext, tables: Tables) -> Iterator[UpgradeOp]:
    connection = autogen_context.connection
    assert connection is not None
    found = find(connection, name=tables.name, schema=tables.schema)
    now = found.revision if found else None
    steps = migrations.revisions()
    if now is not None and now not in {step.revision for step in steps}:
        raise CommandError(
            f"the tables of {tables.schema + '.' if tables.schema else ''}{tables.name} are at "
            f"{now}, which is newer than sa-jobs {sa_jobs.__version__} knows: "
            "run `pip install --upgrade sa-jobs`"
        )
    if position(now) < len(steps) - 1:
        latest = steps[-1].revision
        _log.info("Detected steps of sa-jobs for %s: %s -> %s", tables.jobs, now, latest)
        yield UpgradeOp(latest, now, schema=tables.schema, name=tables.name)


def _same(op: UpgradeOp, other: MigrateOperation) -> bool:
    return isinstance(other, UpgradeOp) and other.to_diff_tuple() == op.to_diff_tuple()


def _render(autogen_context: AutogenContext, op: UpgradeOp | DowngradeOp) -> str:
    autogen_context.imports.add(IMPORT)
    return call_of(op)


def _run(operations: Operations, op: UpgradeOp | DowngradeOp) -> None:
    """Run the operation at once, where a program makes and invokes them itself."""
    if isinstance(op, UpgradeOp):
        migrations.upgrade(op.to or "head", from_=op.from_, schema=op.schema, name=op.name)
    else:
        migrations.downgrade(op.to, from_=op.from_ or "", schema=op.schema, name=op.name)
