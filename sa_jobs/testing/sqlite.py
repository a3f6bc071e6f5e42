"""What the worker's statements do to one job, in the SQL that SQLite has.

A test's connection is alone with its rows, so that nothing is locked or skipped.
"""

from __future__ import annotations

import datetime as dt
from typing import Any

from sqlalchemy import (
    Connection,
    DateTime,
    Text,
    Update,
    case,
    func,
    insert,
    literal,
    literal_column,
    null,
    update,
)

from sa_jobs.claims import Settled
from sa_jobs.context import ClaimedJob
from sa_jobs.expressions import json_value
from sa_jobs.models import Tables
from sa_jobs.outcome import Failed, Finished, Snoozed
from sa_jobs.statements import CANCELLED, DEAD, DONE, READY

CLOCK: Any = literal_column("strftime('%Y-%m-%d %H:%M:%f000', 'now')", DateTime(timezone=True))


def heartbeat(
    tables: Tables, job: ClaimedJob, worker: str, progress: str, now: dt.datetime
) -> Update:
    """Store a handler's progress (JSON text)."""
    text = literal(progress, Text())
    meta = func.json_set(tables.jobs.c.meta, "$.progress", func.json(text), type_=Text())
    return _own(tables, job, worker).values(meta=json_value(meta), updated_at=now)


def settle(
    connection: Connection, tables: Tables, settled: Settled, *, worker: str, now: dt.datetime
) -> bool:
    """Write how a job ended, and return whether it was still this worker's."""
    job, outcome = settled
    jobs = tables.jobs
    asked = jobs.c.cancel_requested_at.is_not(None)
    updating = _own(tables, job, worker)
    if isinstance(outcome, Finished):
        result = literal(outcome.result, Text())
        updating = updating.values(status=DONE, result=json_value(result), finished_at=now)
    elif isinstance(outcome, Failed):
        updating = updating.values(
            status=case((asked, CANCELLED), else_=DEAD if outcome.final else READY),
            run_at=jobs.c.run_at if outcome.final else _later(jobs, asked, now, outcome.delay),
            finished_at=now if outcome.final else case((asked, literal(now)), else_=null()),
            last_error=outcome.error,
        )
    elif isinstance(outcome, Snoozed):
        updating = updating.values(
            status=case((asked, CANCELLED), else_=READY),
            attempts=jobs.c.attempts - 1,
            run_at=literal(now + dt.timedelta(seconds=outcome.delay)),
            finished_at=case((asked, literal(now)), else_=null()),
        )
    else:
        raise AssertionError(f"a test never ends a job by {outcome!r}")
    landed = bool(connection.execute(updating.values(leased_until=null(), updated_at=now)).rowcount)
    if landed and isinstance(outcome, Failed):
        _add_history(connection, tables, job, worker, outcome, now)
    return landed


def _own(tables: Tables, job: ClaimedJob, worker: str) -> Update:
    jobs = tables.jobs
    return update(jobs).where(
        jobs.c.id == job.id,
        jobs.c.claim_no == job.claim_no,
        jobs.c.locked_by == worker,
        jobs.c.leased_until.is_not(None),
    )


def _later(jobs: Any, asked: Any, now: dt.datetime, delay: float) -> Any:
    return case((asked, jobs.c.run_at), else_=literal(now + dt.timedelta(seconds=delay)))


def _add_history(
    connection: Connection,
    tables: Tables,
    job: ClaimedJob,
    worker: str,
    outcome: Failed,
    now: dt.datetime,
) -> None:
    connection.execute(
        insert(tables.failures).values(
            job_id=job.id,
            queue=job.queue,
            handler=job.handler,
            attempt=job.attempts,
            claim_no=job.claim_no,
            worker=worker,
            error=outcome.error,
            claimed_at=job.claimed_at,
            failed_at=now,
        )
    )
