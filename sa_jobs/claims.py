"""What workers call: claim, heartbeat, settle, release and reclaim, each on a given connection.

The protocol. A claim takes a job for one worker until its lease ends, and counts the attempt. A
heartbeat pushes the lease out. An outcome ends the claim. If the lease runs out first, any worker's
reclaim takes the job back. Every write after the claim is fenced (see `statements`): what it names
is no longer the worker's claim, it changes nothing, and the caller is told which writes landed.

The time is the database's, unless it is given as `now`, by which tests let time pass.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection

from sa_jobs import presence, statements
from sa_jobs.context import ClaimedJob
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.outcome import Failed, Finished, Outcome, Released, Snoozed

RECLAIM_BATCH = 500


class Settled(NamedTuple):
    """A job and the outcome that is to be written for its claim."""

    job: ClaimedJob
    outcome: Outcome


@dataclass(frozen=True)
class Heartbeat:
    """What a heartbeat found, as ids.

    `renewed`: the lease was pushed out; `cancel_requested`: of those, the ones asked to cancel;
    `locked`: still the worker's, but the row is locked, so beat again soon; `lost`: no longer the
    worker's. A claim that the worker has ended meanwhile is in none of them.
    """

    renewed: set[int]
    cancel_requested: set[int]
    locked: set[int]
    lost: set[int]


class Reclaimed(NamedTuple):
    """A job that was taken back: from which worker, at which attempt, and its status now."""

    id: int
    queue: str
    handler: str
    attempt: int
    worker: str | None
    status: str


def claim(
    connection: Connection,
    *,
    worker: str,
    queues: Sequence[str],
    handlers: Sequence[str],
    limit: int,
    lease: float,
    now: dt.datetime | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> list[ClaimedJob]:
    """Take up to `limit` due jobs for `worker` for `lease` seconds, in the order they should run.

    Queues are served in the order given; within a queue: priority (high first), run_at, id. Never
    returns a job whose handler is not among `handlers`, nor one that another claim holds.
    """
    rows = connection.execute(
        _at(now, statements.claim, tables),
        {
            "worker": worker,
            "queues": list(queues),
            "handlers": list(handlers),
            "limit": limit,
            "lease": lease,
            **_given(now),
        },
    )
    jobs = [ClaimedJob(*row) for row in rows]
    if len(jobs) > 1:
        turn = {queue: position for position, queue in enumerate(queues)}
        jobs.sort(key=lambda job: (-job.priority, turn[job.queue], job.run_at, job.id))
    return jobs


def heartbeat(
    connection: Connection,
    claims: Sequence[tuple[ClaimedJob, str | None]],
    *,
    worker: str,
    lease: float,
    now: dt.datetime | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> Heartbeat:
    """Renew the leases of claims, each given with its progress (JSON text or None)."""
    rows = connection.execute(
        _at(now, statements.heartbeat, tables),
        {
            "ids": [job.id for job, _ in claims],
            "claim_nos": [job.claim_no for job, _ in claims],
            "progress": [progress for _, progress in claims],
            "worker": worker,
            "lease": lease,
            **_given(now),
        },
    ).all()
    renewed = {row.id for row in rows}
    missing = [job for job, _ in claims if job.id not in renewed]
    stand = standing(connection, missing, worker=worker, tables=tables)
    return Heartbeat(
        renewed=renewed,
        cancel_requested={row.id for row in rows if row.cancel_requested},
        locked={job_id for job_id, state in stand.items() if state == "held"},
        lost={job.id for job in missing} - set(stand),
    )


def settle(
    connection: Connection,
    settled: Sequence[Settled],
    *,
    worker: str,
    now: dt.datetime | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> set[int]:
    """Write outcomes of any kinds, and return the ids of the claims that were written.

    Left out are claims that are no longer the worker's, and rows that somebody else has locked:
    `standing()` tells them apart. Jobs that became ready wake sleeping workers. A failed attempt
    gets its row of history.
    """
    kinds: dict[type[Any], list[Settled]] = {}
    for entry in settled:
        kinds.setdefault(type(entry.outcome), []).append(entry)
    landed: set[int] = set()
    for kind, entries in kinds.items():
        statement, columns = _WRITES[kind]
        rows = _write(connection, _at(now, statement, tables), columns, entries, worker, now)
        landed.update(row.id for row in rows)
        if kind is Released:
            _wake(connection, rows, tables)
    return landed


def finish_in_transaction(
    connection: Connection,
    settled: Settled,
    *,
    worker: str,
    now: dt.datetime | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> bool:
    """Write a job's finish in the caller's transaction; return whether it was still the worker's.

    Waits for a heartbeat or a host's transaction that has the row locked.
    """
    statement = _at(now, statements.finish, tables, wait=True)
    return bool(_write(connection, statement, _WRITES[Finished][1], [settled], worker, now))


def standing(
    connection: Connection,
    jobs: Sequence[ClaimedJob],
    *,
    worker: str,
    tables: Tables = DEFAULT_TABLES,
) -> dict[int, str]:
    """Return by id what became of the claims that still stand in their rows under this worker.

    "held": the claim is the worker's, and its row may be locked by somebody else. Any other value
    is the job's status: the worker has ended the claim already, though no answer may have said so,
    since a commit can land while its answer is lost with the connection.
    """
    if not jobs:
        return {}
    claim_nos = {job.id: job.claim_no for job in jobs}
    rows = connection.execute(statements.claims_now(tables), {"ids": list(claim_nos)})
    return {
        row.id: "held" if row.leased else row.status
        for row in rows
        if row.claim_no == claim_nos[row.id] and row.locked_by == worker
    }


def disown(
    connection: Connection,
    *,
    worker: str,
    known: Sequence[int],
    tables: Tables = DEFAULT_TABLES,
) -> list[int]:
    """Give back the worker's claims of jobs that are not among `known`, and return their ids.

    For a claim whose answer was lost: nobody runs it, so it costs no attempt.
    """
    rows = connection.execute(
        statements.disown(tables), {"worker": worker, "ids": list(known)}
    ).all()
    _wake(connection, rows, tables)
    return [row.id for row in rows]


def reclaim(
    connection: Connection,
    *,
    limit: int = RECLAIM_BATCH,
    worker: str = "",
    held: Sequence[int] = (),
    alone: bool = False,
    tables: Tables = DEFAULT_TABLES,
) -> list[Reclaimed]:
    """Take back jobs whose lease ran out, whoever held them, and return them.

    Each is ready again while attempts remain, else dead. One statement; any number of workers may
    call it at once, and with `alone` all but one of them take nothing. A worker that calls it
    leaves out the jobs that it runs itself: `worker` and `held`. Jobs that became ready wake
    sleeping workers.
    """
    rows = connection.execute(
        statements.reclaim(tables, alone=alone),
        {"limit": limit, "worker": worker, "held": list(held)},
    ).all()
    _wake(connection, rows, tables)
    return [Reclaimed(*row) for row in rows]


_WRITES: dict[type[Any], tuple[Any, dict[str, str]]] = {
    Finished: (statements.finish, {"results": "result"}),
    Failed: (statements.fail, {"final": "final", "delays": "delay", "errors": "error"}),
    Snoozed: (statements.snooze, {"delays": "delay"}),
    Released: (statements.release, {}),
}


def _write(
    connection: Connection,
    statement: Any,
    columns: dict[str, str],
    entries: Sequence[Settled],
    worker: str,
    now: dt.datetime | None,
) -> Sequence[Any]:
    parameters: dict[str, Any] = {
        **_given(now),
        "worker": worker,
        "ids": [entry.job.id for entry in entries],
        "claim_nos": [entry.job.claim_no for entry in entries],
    }
    for parameter, attribute in columns.items():
        parameters[parameter] = [getattr(entry.outcome, attribute) for entry in entries]
    return connection.execute(statement, parameters).all()


def _at(now: dt.datetime | None, builder: Any, tables: Tables, **options: Any) -> Any:
    """Return a statement by the database's time, or by the moment that `_given` gives it."""
    return builder(tables, **options, **({} if now is None else {"now": statements.GIVEN}))


def _given(now: dt.datetime | None) -> dict[str, Any]:
    return {} if now is None else {"now": now}


def _wake(connection: Connection, rows: Sequence[Any], tables: Tables) -> None:
    queues = sorted({row.queue for row in rows if row.status == "ready"})
    if queues:
        connection.execute(presence.wake(tables), {"queues": queues})
