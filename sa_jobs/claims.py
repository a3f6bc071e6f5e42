"""What workers call: claim, heartbeat, settle, release and reclaim, each on a given connection.

The protocol. A claim takes a job for one worker until its lease ends, and counts the attempt. A
heartbeat pushes the lease out. An outcome ends the claim. If the lease runs out first, any worker's
reclaim takes the job back. Every write after the claim is fenced (see `statements`): what it names
is no longer the worker's claim, it changes nothing, and the caller is told which writes landed.

The time is the database's, unless it is given as `now`, by which tests let time pass.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
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


class Place(NamedTuple):
    """Where a claim begins to read a lane, the jobs of one queue at one priority.

    After the job with this `since_at` and `since_id`, or from the start where `since_at` is None.
    Priorities between the lane's and `above` are looked for first. None stands for no priority at
    all, and for no bound above.
    """

    queue: str
    priority: int | None
    above: int | None = None
    since_at: dt.datetime | None = None
    since_id: int = 0


class Lanes(NamedTuple):
    """The lanes that have ready jobs, in the order in which a claim reads them, and the time."""

    lanes: list[tuple[str, int]]
    now: dt.datetime | None


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
    places: Sequence[Place] | None = None,
    now: dt.datetime | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> list[ClaimedJob]:
    """Take up to `limit` due jobs for `worker` for `lease` seconds, in the order they should run.

    Queues are served in the order given; within a queue: priority (high first), run_at, id. Never
    returns a job whose handler is not among `handlers`, nor one that another claim holds. With
    `places`, only what lies beyond them is looked at, in their order.
    """
    rows = connection.execute(
        _at(now, statements.claim, tables, from_places=places is not None),
        _claiming(worker, queues, handlers, limit, lease, places) | _given(now),
    )
    return _in_order(map(ClaimedJob._make, rows), queues)


def finish_and_claim(
    connection: Connection,
    finished: Sequence[Settled],
    *,
    worker: str,
    queues: Sequence[str],
    handlers: Sequence[str],
    limit: int,
    lease: float,
    places: Sequence[Place] | None = None,
    tables: Tables = DEFAULT_TABLES,
) -> tuple[set[int], list[ClaimedJob]]:
    """Write outcomes that are all `Finished`, and claim, in one statement.

    Returns the ids of the claims that were written, as `settle` does, and the jobs of `claim`.
    """
    results = [entry.outcome.result for entry in finished if isinstance(entry.outcome, Finished)]
    has_results = any(result is not None for result in results)
    parameters = _claiming(worker, queues, handlers, limit, lease, places) | _named(finished)
    if has_results:
        parameters["results"] = results
    rows = connection.execute(
        statements.finish_and_claim(tables, results=has_results, from_places=places is not None),
        parameters,
    ).all()
    landed = set(parameters["ids"]).difference(rows[0].unfinished or ())
    taken = [] if rows[0].id is None else [ClaimedJob._make(row[1:]) for row in rows]
    return landed, _in_order(taken, queues)


def lanes(
    connection: Connection, *, queues: Sequence[str], tables: Tables = DEFAULT_TABLES
) -> Lanes:
    """Return which lanes have ready jobs, due or not, and the database's time if there is one."""
    rows = connection.execute(statements.lanes(tables), {"queues": list(queues)}).all()
    return Lanes([(row.queue, row.priority) for row in rows], rows[0].now if rows else None)


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
    if all(type(entry.outcome) is Finished for entry in settled):
        rows = _finish(connection, settled, worker, tables, now)
    else:
        rows = connection.execute(
            _at(now, statements.settle, tables),
            {"worker": worker, **_named(settled), **_ends(settled), **_given(now)},
        ).all()
    landed = {row.id for row in rows}
    released = {entry.job.id for entry in settled if type(entry.outcome) is Released}
    if released:
        _wake(connection, [row for row in rows if row.id in released], tables)
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
    return bool(_finish(connection, [settled], worker, tables, now, wait=True))


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


def _claiming(
    worker: str,
    queues: Sequence[str],
    handlers: Sequence[str],
    limit: int,
    lease: float,
    places: Sequence[Place] | None,
) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "worker": worker,
        "queues": list(queues),
        "handlers": list(handlers),
        "limit": limit,
        "lease": lease,
    }
    if places is not None:
        parameters |= {
            "queues": [place.queue for place in places],
            "priorities": [place.priority for place in places],
            "aboves": [place.above for place in places],
            "since_at": [place.since_at for place in places],
            "since_id": [place.since_id for place in places],
        }
    return parameters


_EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.timezone.utc)
_BY_PRIORITY = attrgetter("priority")


def _place(job: ClaimedJob) -> tuple[dt.timedelta, int]:
    # Two times in a zone of the session's are compared by the wall clock, which shows one hour of
    # the year twice.
    return job.run_at - _EPOCH, job.id


def _in_order(taken: Iterable[ClaimedJob], queues: Sequence[str]) -> list[ClaimedJob]:
    jobs = sorted(taken, key=_place)
    if len(queues) > 1:
        turn = {queue: position for position, queue in enumerate(queues)}
        jobs.sort(key=lambda job: turn[job.queue])
    # Each sort leaves the order of equals as it was.
    jobs.sort(key=_BY_PRIORITY, reverse=True)
    return jobs


def _named(settled: Sequence[Settled]) -> dict[str, Any]:
    return {
        "ids": [job.id for job, _ in settled],
        "claim_nos": [job.claim_no for job, _ in settled],
    }


def _ends(settled: Sequence[Settled]) -> dict[str, Any]:
    columns: dict[str, list[Any]] = {"ends": [], "results": [], "errors": [], "delays": []}
    for _, outcome in settled:
        end, result, error, delay = _end(outcome)
        columns["ends"].append(end)
        columns["results"].append(result)
        columns["errors"].append(error)
        columns["delays"].append(delay)
    return columns


def _end(outcome: Outcome) -> tuple[str, str | None, str | None, float | None]:
    if isinstance(outcome, Finished):
        return "done", outcome.result, None, None
    if isinstance(outcome, Failed):
        return "dead" if outcome.final else "failed", None, outcome.error, outcome.delay
    if isinstance(outcome, Snoozed):
        return "snoozed", None, None, outcome.delay
    return "released", None, None, None


def _finish(
    connection: Connection,
    settled: Sequence[Settled],
    worker: str,
    tables: Tables,
    now: dt.datetime | None,
    *,
    wait: bool = False,
) -> Sequence[Any]:
    results = [entry.outcome.result for entry in settled if isinstance(entry.outcome, Finished)]
    parameters: dict[str, Any] = {"worker": worker, **_named(settled), **_given(now)}
    if has_results := any(result is not None for result in results):
        parameters["results"] = results
    statement = _at(now, statements.finish, tables, results=has_results, wait=wait)
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
