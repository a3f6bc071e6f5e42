"""The SQL expressions that statements share.

Some are spelled otherwise on SQLite, so that a statement itself is written once. SQLite is for
hosts' unit tests: tables can be created and jobs enqueued there, and `sa_jobs.testing` runs them.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    ARRAY,
    ColumnElement,
    DateTime,
    Interval,
    Table,
    TableValuedAlias,
    Text,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.sql.visitors import InternalTraversal

# What `run_at` may be, too: a driver reads a time in the session's zone, which may be a day away.
EARLIEST, LATEST = (
    literal_column(f"timestamptz '{moment}'", DateTime(timezone=True))
    for moment in ("0001-01-02 00:00:00+00", "9999-12-30 23:59:59.999999+00")
)


def seconds(value: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return a number of seconds as an interval."""
    zero: ColumnElement[int] = literal_column("0")
    return func.make_interval(zero, zero, zero, zero, zero, zero, value, type_=Interval())


def array(name: str, kind: Any) -> ColumnElement[Any]:
    """Return an array parameter of this name, cast so that every driver sends its type."""
    return cast(bindparam(name, type_=ARRAY(kind)), ARRAY(kind))


def unnest(name: str, kinds: dict[str, Any], *, ordinality: str | None = None) -> TableValuedAlias:
    """Return parallel array parameters as a table, each column named as its parameter."""
    return (
        func.unnest(*(array(parameter, kind) for parameter, kind in kinds.items()))
        .table_valued(
            *(column(parameter, kind) for parameter, kind in kinds.items()),
            with_ordinality=ordinality,
        )
        .render_derived(name=name)
    )


def readable(moment: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return a time that drivers can read: plain SQL can write infinity, or the year 10000."""
    return case((moment < EARLIEST, EARLIEST), (moment > LATEST, LATEST), else_=moment)


class table_name(ColumnElement[str]):  # noqa: N801 - reads as a SQL function
    """A table's name as text, with the schema that a `schema_translate_map` gives it."""

    type = Text()
    # What the cache of compiled statements tells two of these apart by.
    _traverse_internals = [("table", InternalTraversal.dp_clauseelement)]  # noqa: RUF012

    def __init__(self, table: Table) -> None:
        self.table = table


class json_value(FunctionElement[Any]):  # noqa: N801 - reads as a SQL function
    """JSON text, as the value of a JSON column."""

    inherit_cache = True
    type = JSONB()


class json_object(FunctionElement[Any]):  # noqa: N801
    """Alternating keys and values, as a JSON object."""

    inherit_cache = True
    type = JSONB()


class due_at(FunctionElement[Any]):  # noqa: N801
    """`(run_at, delay, now)`: the given time, or where it is NULL the delay in seconds from now."""

    inherit_cache = True
    type = DateTime(timezone=True)


@compiles(table_name)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"'{compiler.preparer.format_table(element.table)}'"


@compiles(json_value)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    (value,) = element.clauses
    return compiler.process(cast(value, JSONB), **kw)  # type: ignore[no-any-return]


@compiles(json_value, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"json({compiler.process(element.clauses, **kw)})"


# PostgreSQL takes at most a hundred arguments.
_ARGUMENTS = 100


@compiles(json_object)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    arguments = list(element.clauses)
    parts = [
        compiler.process(func.jsonb_build_object(*arguments[start : start + _ARGUMENTS]), **kw)
        for start in range(0, len(arguments), _ARGUMENTS)
    ]
    return " || ".join(parts) or "jsonb_build_object()"


@compiles(json_object, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    return f"json_object({compiler.process(element.clauses, **kw)})"


@compiles(due_at)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    run_at, delay, now = element.clauses
    return compiler.process(func.coalesce(run_at, now + seconds(delay)), **kw)  # type: ignore[no-any-return]


@compiles(due_at, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    run_at, delay, _now = element.clauses
    now = f"strftime('%Y-%m-%d %H:%M:%f000', 'now', {compiler.process(delay, **kw)} || ' seconds')"
    return f"coalesce({compiler.process(run_at, **kw)}, {now})"
