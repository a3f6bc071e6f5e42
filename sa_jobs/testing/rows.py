"""A job's row as a test looks at it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from sqlalchemy import ColumnElement, Connection, Text, cast, select

from sa_jobs import jsontext
from sa_jobs.models import Tables

_JSON = ("payload", "result", "meta")


@dataclass(frozen=True)
class EnqueuedJob:
    """A job as it stood when it was read; all times are aware."""

    id: int
    handler: str
    queue: str
    payload: Any
    status: str
    priority: int
    tenant: str | None
    run_at: dt.datetime
    scheduled_for: dt.datetime | None
    attempts: int
    max_attempts: int
    idempotency_key: str | None
    unique_key: str | None
    result: Any
    last_error: str | None
    meta: Any
    created_at: dt.datetime
    cancel_requested_at: dt.datetime | None
    finished_at: dt.datetime | None

    @property
    def delay(self) -> dt.timedelta:
        """The time from the job's creation to when it is due."""
        return self.run_at - self.created_at


def read(
    connection: Connection,
    tables: Tables,
    *conditions: ColumnElement[bool],
    newest: int | None = None,
) -> list[EnqueuedJob]:
    """Return the jobs that meet the conditions, or the `newest` of them, by their ids."""
    jobs = tables.jobs
    query = select(
        *(
            cast(jobs.c[field.name], Text).label(field.name)
            if field.name in _JSON
            else jobs.c[field.name]
            for field in fields(EnqueuedJob)
        )
    ).where(*conditions)
    if newest is None:
        rows: Sequence[Any] = connection.execute(query.order_by(jobs.c.id)).all()
    else:
        rows = connection.execute(query.order_by(jobs.c.id.desc()).limit(newest)).all()[::-1]
    return [EnqueuedJob(**_values(row)) for row in rows]


def aware(value: Any) -> Any:
    """Return a time that SQLite gave without its zone, which is UTC, with it; else the value."""
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return value.replace(tzinfo=dt.timezone.utc)
    return value


def _values(row: Any) -> dict[str, Any]:
    values = {name: aware(value) for name, value in row._mapping.items()}
    for name in _JSON:
        if values[name] is not None:
            values[name] = jsontext.loads(values[name])
    return values
