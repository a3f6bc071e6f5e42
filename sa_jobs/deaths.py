"""Jobs that have died, as the hooks of `on_dead` are told of them."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    DateTime,
    Select,
    Text,
    bindparam,
    cast,
    select,
)

from sa_jobs.context import ClaimedJob
from sa_jobs.expressions import readable
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.statements import DEAD, built


class Death(NamedTuple):
    """A job that is dead, as it was claimed for the last time, and its last error."""

    job: ClaimedJob
    error: str


def dead_with(
    connection: Connection, job_id: int, *, tables: Tables = DEFAULT_TABLES
) -> Death | None:
    """Return what a job has died of, or None if it is not dead: cancelled, or retried by now."""
    row = connection.execute(_dead(tables), {"job_id": job_id}).first()
    return None if row is None else Death(ClaimedJob(*row[:-1]), row.last_error or "")


@built
def _dead(tables: Tables) -> Select[Any]:
    """Select the job `job_id`, if it is dead, as a claim returns it, with its last error."""
    jobs = tables.jobs
    columns = [_read(jobs.c[_column(one.name)], one.name) for one in dataclasses.fields(ClaimedJob)]
    return select(*columns, jobs.c.last_error).where(
        jobs.c.id == bindparam("job_id", type_=BigInteger()), jobs.c.status == DEAD
    )


def _column(name: str) -> str:
    return name.removesuffix("_text")


def _read(column: ColumnElement[Any], name: str) -> ColumnElement[Any]:
    if name.endswith("_text"):
        return cast(column, Text).label(name)
    return readable(column).label(name) if isinstance(column.type, DateTime) else column
