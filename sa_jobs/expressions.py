"""The SQL expressions that statements share.

Some are spelled otherwise on SQLite, so that a statement itself is written once. SQLite is for
hosts' unit tests: tables can be created and jobs enqueued there, and `sa_jobs.testing` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    ColumnElement,
    DateTime,
    Interval,
    Table,
    TableValuedAlias,
    Text,
    TypeDecorator,
    any_,
    bindparam,
    case,
    cast,
    column,
    func,
    literal_column,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.engine import Dialect
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


class _Numbers(TypeDecorator[Sequence[int | None]]):
    """A list of integers, sent as one text: drivers take a microsecond for each element."""

    impl = Text
    cache_ok = True

    def process_bind_param(
        self, value: Sequence[int | None] | None, dialect: Dialect
    ) -> str | None:
        if value is None:
            return None
        return f"{{{','.join(map(str, value)).replace('None', 'NULL')}}}"


def array(name: str, kind: Any) -> ColumnElement[Any]:
    """Return an array parameter of this name, cast so that every driver sends its type."""
    sent = _Numbers() if isinstance(kind, BigInteger) else ARRAY(kind)
    return cast(bindparam(name, type_=sent), ARRAY(kind))


def json_array(name: str, kind: Any) -> ColumnElement[Any]:
    """Return a parameter of JSON text, an array, as an array of this type.

    Drivers write long lists slowly, each in a way of its own; of one text they make nothing.
    """
    document = json_value(bindparam(name, type_=Text()))
    elements = (
        func.jsonb_array_elements if isinstance(kind, JSONB) else func.jsonb_array_elements_text
    )
    # Labelled, since the name that SQLAlchemy would give depends on its release.
    element = elements(document).label("element")
    return cast(func.array(select(element).scalar_subquery()), ARRAY(kind))


def unnest(
    name: str,
    kinds: dict[str, Any],
    *,
    ordinality: str | None = None,
    parameter: Callable[[str, Any], ColumnElement[Any]] = array,
) -> TableValuedAlias:
    """Return parallel array parameters as a table, each column named as its parameter."""
    return (
        func.unnest(*(parameter(column_name, kind) for column_name, kind in kinds.items()))
        .table_valued(
            *(column(column_name, kind) for column_name, kind in kinds.items()),
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
    """`(run_at, delay, now)`: the given time, or where it is NULL the delay in seconds from now.

    `(now)` alone is now.
    """

    inherit_cache = True
    type = DateTime(timezone=True)


class one_of(FunctionElement[bool]):  # noqa: N801
    """`(value, parameter)`: whether the value is in a parameter of JSON text, an array of texts."""

    inherit_cache = True
    type = Boolean()


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
    *given, now = element.clauses
    if not given:
        return compiler.process(now, **kw)  # type: ignore[no-any-return]
    run_at, delay = given
    return compiler.process(func.coalesce(run_at, now + seconds(delay)), **kw)  # type: ignore[no-any-return]


@compiles(due_at, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    *given, _now = element.clauses
    now = "strftime('%Y-%m-%d %H:%M:%f000', 'now'"
    if not given:
        return f"{now})"
    run_at, delay = (compiler.process(part, **kw) for part in given)
    return f"coalesce({run_at}, {now}, {delay} || ' seconds'))"


@compiles(one_of)
def _(element: Any, compiler: Any, **kw: Any) -> str:
    value, name = element.clauses
    return compiler.process(value == any_(json_array(name.key, Text())), **kw)  # type: ignore[no-any-return]


@compiles(one_of, "sqlite")
def _(element: Any, compiler: Any, **kw: Any) -> str:
    value, name = (compiler.process(part, **kw) for part in element.clauses)
    return f"{value} IN (SELECT value FROM json_each({name}))"
