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
from typing import Any, NamedTuple

from alembic.autogenerate import comparators, renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations import Operations
from alembic.operations.ops import MigrateOperation, OpContainer, UpgradeOps
from alembic.util import CommandError
from sqlalchemy import Connection, MetaData, Table, text

import sa_jobs
from sa_jobs import ddl, migrations
from sa_jobs.errors import MigrationError
from sa_jobs.migrations._ddl import Target, empty_marker, errors_of_alembic
from sa_jobs.migrations._place import check_place, find_in, mapped, place_text, visible
from sa_jobs.migrations._steps import position
from sa_jobs.migrations._walk import down, up
from sa_jobs.models import DEFAULT_TABLES, Tables

__all__ = ["DowngradeOp", "UpgradeOp", "include_name", "include_object", "register"]

# A child of Alembic's, which the logging section of alembic.ini leaves enabled.
_log = logging.getLogger("alembic.sa_jobs")

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

    Without arguments, the tables of the default name; in whatever schema they are. `also` is the
    host's own function, which decides about everything else. For hosts that do not `attach()`:
    there, nothing is needed.

    Raises MigrationError for arguments that are something else.
    """
    owned = _Owned(_places_of("include_name", tables, also))

    def include(name: str | None, kind: Any, parents: Mapping[str, Any]) -> bool:
        if kind == "table" and owned.has_name(name):
            return False
        return also is None or also(name, kind, parents)

    return include


def include_object(
    *tables: Tables, also: IncludeObject | None = None
) -> Callable[[Any, str | None, Any, bool, Any], bool]:
    """Return an `include_object` for `context.configure()` that hides the tables.

    As include_name(), and it hides the tables in the host's metadata too: those of the same schema.
    A table of the host's that has such a name in another schema stays to be seen.
    """
    owned = _Owned(_places_of("include_object", tables, also))

    def include(found: Any, name: str | None, kind: Any, reflected: bool, compare_to: Any) -> bool:
        table = found if kind == "table" else getattr(found, "table", None)
        if table is not None and owned.has_name(table.name):
            is_removal = reflected and compare_to is None
            if is_removal or owned.has_table(table.schema, table.name):
                return False
        return also is None or also(found, name, kind, reflected, compare_to)

    return include


class _Place(NamedTuple):
    """Where tables are, as their metadata says it."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return place_text(*self)

    @property
    def tables(self) -> Iterator[str]:
        """The tables' names, the version table of the steps' own chain included."""
        for suffix in (*ddl.TABLE_SUFFIXES, "_alembic_version"):
            yield self.name + suffix


def _places_of(function: str, given: tuple[Any, ...], also: Any) -> tuple[_Place, ...]:
    with errors_of_alembic():
        for tables in given:
            if not isinstance(tables, Tables):
                hint = (
                    "pass a filter of your own as also="
                    if callable(tables)
                    else (
                        "for tables of another name or schema, pass "
                        'attach(MetaData(), name="...", register=False)'
                    )
                )
                raise MigrationError(
                    f"{function}() takes what attach() has returned, not {tables!r}: {hint}"
                )
        if also is not None and not callable(also):
            raise MigrationError(f"also={also!r} must be a function, as {function}= takes it")
    return tuple(_Place(tables.schema, tables.name) for tables in given or (DEFAULT_TABLES,))


class _Owned:
    """The tables, and what else the steps make.

    Known by their names alone: in whatever schema something of such a name is, autogenerate must
    not drop it. All but `claimed`, the tables that the host's metadata has itself, as
    (schema, name).
    """

    def __init__(
        self,
        places: Iterable[_Place],
        claimed: Iterable[tuple[str | None, str]] = (),
        default_schema: str | None = None,
    ) -> None:
        self._default_schema = default_schema
        self._claimed = {(self._known(schema), table) for schema, table in claimed}
        self._tables = {(place.schema, table) for place in places for table in place.tables}
        self._names = {table for _, table in self._tables}
        self._functions = {f"{place.name}_notify" for place in places}

    def _known(self, schema: str | None) -> str | None:
        # Alembic calls the default schema None, the models may spell it out.
        return None if schema == self._default_schema else schema

    def has_name(self, name: str | None) -> bool:
        return name in self._names

    def has_table(self, schema: str | None, name: str | None) -> bool:
        return (schema, name) in self._tables

    def has_target_of(self, op: MigrateOperation) -> bool:
        """Return whether an operation is about something of ours; duck-typed, to know others'."""
        if isinstance(op, _StepsOp):
            return False
        table = getattr(op, "table_name", None) or getattr(op, "source_table", None)
        if isinstance(table, str):
            return (
                self.has_name(table) and (self._known(_schema_of(op)), table) not in self._claimed
            )
        # An operation of alembic-utils: on a function or trigger, or on a grant, which the host may
        # give on our tables, and which others may have been given by hand.
        entity = getattr(op, "target", None)
        signature = getattr(entity, "signature", None)
        granted_on = getattr(entity, "table", None)
        if isinstance(granted_on, str):
            return self.has_name(granted_on) and type(op).__name__ == "DropOp"
        if isinstance(signature, str):
            return signature.partition("(")[0].strip().strip('"') in self._functions
        return False


def _schema_of(op: Any) -> str | None:
    schema: str | None = getattr(op, "schema", None) or getattr(op, "source_schema", None)
    return schema


def _compare(
    autogen_context: AutogenContext, upgrade_ops: UpgradeOps, schemas: Collection[str | None]
) -> None:
    connection, dialect = autogen_context.connection, autogen_context.dialect
    targets = _targets(autogen_context.metadata)
    places = tuple(dict.fromkeys(_attached(targets)))
    # The steps' own environment compares the tables themselves.
    own_chain = "sa_jobs" in autogen_context.opts
    if not places or own_chain or connection is None or dialect is None:
        return
    _run_again_at_the_end()
    claimed = (
        (table.schema, table.name) for table in _tables(targets) if "sa_jobs" not in table.info
    )
    found_something = _remove(upgrade_ops, _Owned(places, claimed, dialect.default_schema_name))
    if dialect.name != "postgresql":
        if found_something:
            _log.warning(
                "The tables of %s are left out, since their migrations run on PostgreSQL, and this "
                "database is %s: generate the revision that makes them on PostgreSQL",
                ", ".join(map(str, places)),
                dialect.name,
            )
        return
    # First, so that foreign keys of the host's find their table; last on the way back.
    upgrade_ops.ops[:0] = [
        op
        for place in places
        for op in _missing_steps(connection, place)
        if not any(_same(op, other) for other in upgrade_ops.ops)
    ]


def _targets(metadata: Any) -> tuple[MetaData, ...]:
    return (metadata,) if isinstance(metadata, MetaData) else tuple(metadata or ())


def _tables(targets: Iterable[MetaData]) -> Iterator[Table]:
    for target in targets:
        yield from target.tables.values()


def _attached(targets: Iterable[MetaData]) -> Iterator[_Place]:
    """Yield the places of tables of ours, which know it themselves, wherever they were copied."""
    for table in _tables(targets):
        name = table.info.get("sa_jobs")
        if name is not None:
            yield _Place(table.schema, name)


def _run_again_at_the_end() -> None:
    """Before Alembic 1.18, run after the comparators that were registered after ours."""
    registry = getattr(comparators, "_registry", {}).get(("schema", "default"))
    # The list is what Alembic is iterating over.
    if registry and registry[-1] is not _compare:
        registry.append(_compare)


def _remove(container: OpContainer, owned: _Owned) -> bool:
    """Take out the operations on what is ours, and return whether there were any."""
    kept = [op for op in container.ops if not owned.has_target_of(op)]
    removed = len(kept) < len(container.ops)
    container.ops[:] = kept
    for op in kept:
        if isinstance(op, OpContainer):
            removed = _remove(op, owned) or removed
    return removed


def _missing_steps(connection: Connection, place: _Place) -> Iterator[UpgradeOp]:
    now = _step_of(connection, place)
    steps = migrations.revisions()
    if now is not None and now not in {step.revision for step in steps}:
        raise CommandError(
            f"the tables of {place} are at "
            f"{now}, which is newer than sa-jobs {sa_jobs.__version__} knows: "
            "run `pip install --upgrade sa-jobs`"
        )
    if position(now) < len(steps) - 1:
        latest = steps[-1].revision
        _log.info("Detected steps of sa-jobs for %s: %s -> %s", place, now, latest)
        yield UpgradeOp(latest, now, schema=place.schema, name=place.name)


def _step_of(connection: Connection, place: _Place) -> str | None:
    """Return the newest step of the tables where the revision will look for them."""
    with errors_of_alembic():
        name, given = check_place(connection.dialect.name, place.name, place.schema)
        schema = mapped(connection, given)
        here = schema or connection.scalar(text("SELECT current_schema()"))
        found = find_in(connection, name, here)
        if found is not None and found.revision is None:
            raise MigrationError(empty_marker(connection, name, found.schema))
        there = visible(connection, name) if found is None and schema is None else None
    if there is not None:
        _log.warning(
            'The tables of %s in the schema "%s" are left alone: without a schema=, those of this '
            'chain are in "%s", where the search_path creates tables',
            name,
            there,
            here,
        )
    return found.revision if found else None


def _same(op: UpgradeOp, other: MigrateOperation) -> bool:
    return isinstance(other, UpgradeOp) and other.to_diff_tuple() == op.to_diff_tuple()


def _render(autogen_context: AutogenContext, op: UpgradeOp | DowngradeOp) -> str:
    autogen_context.imports.add(IMPORT)
    return call_of(op)


def _run(operations: Operations, op: UpgradeOp | DowngradeOp) -> None:
    """Run the operation at once, where a program makes and invokes them itself."""
    is_upgrade = isinstance(op, UpgradeOp)
    with errors_of_alembic():
        target = Target.open(operations, name=op.name, schema=op.schema, alone=is_upgrade)
        if is_upgrade:
            up(target, op.to or "head", op.from_)
        else:
            down(target, op.to, op.from_)
