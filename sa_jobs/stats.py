"""What to watch, as rows: depths, ages, dead jobs, lapsed leases, live workers, unserved jobs.

Every look is bounded, however large the tables are: each walks a partial index, and stops counting
at a cap. Nothing counts finished jobs. Ages are measured by the database's clock alone; times that
no datetime can hold count as the first or the last one. A look sets planner settings in the
caller's transaction, and sets them back.
"""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    ColumnElement,
    Connection,
    Float,
    FromClause,
    Select,
    Text,
    bindparam,
    cast,
    func,
    literal_column,
    select,
    true,
)

from sa_jobs import jsontext
from sa_jobs.connections import Caller, connection_of, operation
from sa_jobs.expressions import readable
from sa_jobs.limits import check_limit
from sa_jobs.lookup import read
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.statements import DEAD, NOW, READY, RUNNING, Moment, built

CAP = 10_000
MAX_QUEUES = 1_000
MAX_WORKERS = 1_000


@dataclass(frozen=True)
class Count:
    """A number of rows; `capped` means that there are at least as many, and counting stopped."""

    value: int
    capped: bool = False

    def __str__(self) -> str:
        return f"{self.value}+" if self.capped else str(self.value)

    @classmethod
    def up_to(cls, cap: int, counted: int) -> Count:
        """Return the count of a look that stopped one row after `cap`."""
        return cls(min(counted, cap), counted > cap)


@dataclass(frozen=True)
class QueueDepth:
    """A queue's jobs: due now, scheduled for later, and running.

    `oldest_ready_seconds` is how long the oldest due job has been waiting, None without one.
    """

    queue: str
    ready: Count
    scheduled: Count
    running: Count
    oldest_ready_seconds: float | None


@dataclass(frozen=True)
class LiveWorker:
    """A worker whose heartbeat was seen within its own time."""

    id: str
    host: str
    pid: int
    version: str
    queues: tuple[str, ...]
    handlers: tuple[str, ...]
    concurrency: int
    running: int
    started_at: dt.datetime
    heartbeat_at: dt.datetime
    heartbeat_age_seconds: float


@dataclass(frozen=True)
class DueJobs:
    """How many due jobs a queue holds for a handler."""

    queue: str
    handler: str
    count: Count


@dataclass(frozen=True)
class Unserved:
    """Due jobs that no live worker takes.

    `handler` alone: no worker knows it. `queue` alone: no worker serves it. Both: there is a worker
    for each, but none for both.
    """

    count: Count
    queue: str | None
    handler: str | None

    def __str__(self) -> str:
        noun = "ready job" if self.count == Count(1) else "ready jobs"
        if self.handler is None:
            missing = f"queue {self.queue}"
        elif self.queue is None:
            missing = f"handler {self.handler}"
        else:
            missing = f"handler {self.handler} on queue {self.queue}"
        return f"{self.count} {noun}, no live worker for {missing}"


@operation
def queue_depths(
    session: Caller, *, cap: int = CAP, tables: Tables = DEFAULT_TABLES
) -> list[QueueDepth]:
    """Return the depth of every queue that holds ready or running jobs, by name.

    At most MAX_QUEUES queues are looked at.
    """
    enough = {"enough": check_limit("cap", cap) + 1}
    with _by_index(connection_of(session, tables)) as connection:
        waiting = {row.queue: row for row in connection.execute(_waiting(tables), enough)}
        held = connection.execute(_running(tables), enough).all()
    stopped = sum(row.running for row in held) > cap
    running = {row.queue: Count(min(row.running, cap), stopped) for row in held}
    depths = []
    for queue in sorted(waiting.keys() | running.keys()):
        row = waiting.get(queue)
        depths.append(
            QueueDepth(
                queue,
                ready=Count.up_to(cap, int(row.ready)) if row else Count(0),
                scheduled=Count.up_to(cap, int(row.scheduled)) if row else Count(0),
                running=running.get(queue, Count(0)),
                oldest_ready_seconds=row.oldest_ready_seconds if row else None,
            )
        )
    return depths


@operation
def dead_jobs(session: Caller, *, cap: int = CAP, tables: Tables = DEFAULT_TABLES) -> Count:
    """Return how many jobs are dead."""
    enough = {"enough": check_limit("cap", cap) + 1}
    with _by_index(connection_of(session, tables)) as connection:
        counted: int = connection.execute(_dead(tables), enough).scalar_one()
    return Count.up_to(cap, counted)


@operation
def expired_leases(session: Caller, *, cap: int = CAP, tables: Tables = DEFAULT_TABLES) -> Count:
    """Return how many running jobs have outlived their lease and wait for a worker's sweep."""
    enough = {"enough": check_limit("cap", cap) + 1}
    with _by_index(connection_of(session, tables)) as connection:
        counted: int = connection.execute(_expired(tables), enough).scalar_one()
    return Count.up_to(cap, counted)


@operation
def live_workers(session: Caller, *, tables: Tables = DEFAULT_TABLES) -> list[LiveWorker]:
    """Return the workers that are alive, by host and process id; at most MAX_WORKERS."""
    rows = connection_of(session, tables).execute(_workers(tables))
    return [
        LiveWorker(
            id=row.id,
            host=row.host,
            pid=row.pid,
            version=row.version,
            queues=_names(row.queues),
            handlers=_names(row.handlers),
            concurrency=row.concurrency,
            running=row.running,
            started_at=row.started_at,
            heartbeat_at=row.heartbeat_at,
            heartbeat_age_seconds=row.heartbeat_age_seconds,
        )
        for row in rows
    ]


@operation
def due_jobs(session: Caller, *, cap: int = CAP, tables: Tables = DEFAULT_TABLES) -> list[DueJobs]:
    """Return how many due jobs each queue holds for each handler.

    Of each queue's priority the first `cap` due jobs are looked at, in the order they should run;
    where there may be more, the counts are marked as capped.
    """
    enough = {"enough": check_limit("cap", cap)}
    with _by_index(connection_of(session, tables)) as connection:
        rows = connection.execute(_due_by_handler(tables), enough).all()
    looked_at: Counter[str] = Counter()
    for row in rows:
        looked_at[row.queue] += row.due
    return [
        DueJobs(row.queue, row.handler, Count(row.due, capped=looked_at[row.queue] >= cap))
        for row in rows
    ]


def unserved(due: Iterable[DueJobs], workers: Sequence[LiveWorker]) -> list[Unserved]:
    """Return which of the due jobs none of the workers takes, the largest first."""
    handlers = {handler for worker in workers for handler in worker.handlers}
    queues = {queue for worker in workers for queue in worker.queues}
    pairs = {
        (queue, handler)
        for worker in workers
        for queue in worker.queues
        for handler in worker.handlers
    }
    missing: dict[tuple[str | None, str | None], list[Count]] = {}
    for jobs in due:
        if (jobs.queue, jobs.handler) in pairs:
            continue
        what: tuple[str | None, str | None]
        if jobs.handler not in handlers:
            what = (None, jobs.handler)
        elif jobs.queue not in queues:
            what = (jobs.queue, None)
        else:
            what = (jobs.queue, jobs.handler)
        missing.setdefault(what, []).append(jobs.count)
    found = [
        Unserved(
            Count(sum(count.value for count in counts), any(count.capped for count in counts)),
            queue,
            handler,
        )
        for (queue, handler), counts in missing.items()
    ]
    return sorted(found, key=lambda entry: (-entry.count.value, str(entry)))


# A bitmap scan reads every entry before the first row, so no LIMIT would bound it; the planner
# takes it, or a sequential scan, where its statistics mislead it. And it takes the caps for the
# number of rows, and would compile the statement for longer than that runs.
_SETTINGS = ("enable_bitmapscan", "enable_seqscan", "jit")


@contextmanager
def _by_index(connection: Connection) -> Iterator[Connection]:
    """Let the planner walk indexes alone, for the block."""
    before = connection.execute(
        select(
            *(func.current_setting(name).label(name) for name in _SETTINGS),
            *(func.set_config(name, "off", True) for name in _SETTINGS),
        )
    ).one()
    yield connection
    connection.execute(
        select(*(func.set_config(name, getattr(before, name), True) for name in _SETTINGS))
    )


def _names(text: str) -> tuple[str, ...]:
    # Text that is decoded here: an engine's own json_deserializer changes nothing.
    try:
        names = jsontext.loads(text)
    except (ValueError, RecursionError):  # numbers or a depth that only plain SQL writes
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


# --- statements ---------------------------------------------------------------------------------


def _enough() -> ColumnElement[int]:
    return bindparam("enough", type_=BigInteger())


def _age(since: ColumnElement[dt.datetime], now: Moment) -> ColumnElement[float]:
    return cast(func.extract("epoch", now - readable(since)), Float(53))


def _counted(rows: Select[Any]) -> Select[Any]:
    return select(func.count()).select_from(rows.limit(_enough()).subquery("counted"))


def _lanes(tables: Tables) -> CTE:
    """Return (queue, priority) of all ready jobs, by index look-ups from one to the next.

    A DISTINCT would read every ready row. The last row of each queue has no priority.
    """
    jobs = tables.jobs

    def first_queue(*after: ColumnElement[bool]) -> ColumnElement[str]:
        return (
            select(func.min(jobs.c.queue)).where(jobs.c.status == READY, *after).scalar_subquery()
        )

    def highest(queue: ColumnElement[str], *below: ColumnElement[bool]) -> ColumnElement[int]:
        return (
            select(jobs.c.priority)
            .where(jobs.c.queue == queue, jobs.c.status == READY, *below)
            .order_by(jobs.c.priority.desc())
            .limit(literal_column("1"))
            .scalar_subquery()
        )

    queue = select(first_queue().label("queue")).cte("ready_queue", recursive=True)
    queue = queue.union_all(
        select(first_queue(jobs.c.queue > queue.c.queue)).where(queue.c.queue.is_not(None))
    )
    # A recursive query is evaluated no further than its reader asks.
    some = (
        select(queue.c.queue)
        .where(queue.c.queue.is_not(None))
        .limit(literal_column(str(MAX_QUEUES)))
        .cte("some_ready_queue")
    )
    lane = select(some.c.queue, highest(some.c.queue).label("priority")).cte(
        "ready_lane", recursive=True
    )
    return lane.union_all(
        select(lane.c.queue, highest(lane.c.queue, jobs.c.priority < lane.c.priority)).where(
            lane.c.priority.is_not(None)
        )
    )


def _ready_in(lane: FromClause, tables: Tables, *conditions: ColumnElement[bool]) -> Any:
    jobs = tables.jobs
    return [
        jobs.c.queue == lane.c.queue,
        jobs.c.priority == lane.c.priority,
        jobs.c.status == READY,
        *conditions,
    ]


@built
def _waiting(tables: Tables, *, now: Moment = NOW) -> Select[Any]:
    """Select (queue, ready, scheduled, oldest_ready_seconds). Parameter: `enough`."""
    jobs = tables.jobs
    lane = _lanes(tables)

    def count(condition: ColumnElement[bool]) -> ColumnElement[int]:
        rows: Select[Any] = select(literal_column("1")).where(*_ready_in(lane, tables, condition))
        # The statement's own lane is meant, not another look at all of them.
        return _counted(rows.correlate(lane)).correlate(lane).scalar_subquery()

    oldest = (
        select(jobs.c.run_at)
        .where(*_ready_in(lane, tables, jobs.c.run_at <= now))
        .order_by(jobs.c.run_at)
        .limit(literal_column("1"))
        .correlate(lane)
        .scalar_subquery()
    )
    counted = (
        select(
            lane.c.queue,
            count(jobs.c.run_at <= now).label("ready"),
            count(jobs.c.run_at > now).label("scheduled"),
            oldest.label("oldest"),
        )
        .where(lane.c.priority.is_not(None))
        .subquery("by_lane")
    )
    return select(
        counted.c.queue,
        func.sum(counted.c.ready).label("ready"),
        func.sum(counted.c.scheduled).label("scheduled"),
        _age(func.min(counted.c.oldest), now).label("oldest_ready_seconds"),
    ).group_by(counted.c.queue)


@built
def _due_by_handler(tables: Tables, *, now: Moment = NOW) -> Select[Any]:
    """Select (queue, handler, due). Parameter: `enough`, rows to look at for each lane."""
    jobs = tables.jobs
    lane = _lanes(tables)
    due = (
        select(jobs.c.handler)
        .where(*_ready_in(lane, tables, jobs.c.run_at <= now))
        .order_by(jobs.c.run_at, jobs.c.id)
        .limit(_enough())
        .lateral("due")
    )
    return (
        select(lane.c.queue, due.c.handler, func.count().label("due"))
        .select_from(lane.join(due, true()))
        .group_by(lane.c.queue, due.c.handler)
        .order_by(lane.c.queue, due.c.handler)
    )


@built
def _running(tables: Tables) -> Select[Any]:
    """Select (queue, running). Parameter: `enough`."""
    jobs = tables.jobs
    held = select(jobs.c.queue).where(jobs.c.status == RUNNING).limit(_enough()).subquery("held")
    return select(held.c.queue, func.count().label("running")).group_by(held.c.queue)


@built
def _dead(tables: Tables) -> Select[Any]:
    return _counted(select(literal_column("1")).where(tables.jobs.c.status == DEAD))


@built
def _expired(tables: Tables, *, now: Moment = NOW) -> Select[Any]:
    jobs = tables.jobs
    return _counted(
        select(literal_column("1")).where(jobs.c.status == RUNNING, jobs.c.leased_until < now)
    )


@built
def _workers(tables: Tables, *, now: Moment = NOW) -> Select[Any]:
    workers = tables.workers
    return (
        select(
            workers.c.id,
            workers.c.host,
            workers.c.pid,
            workers.c.version,
            cast(workers.c.queues, Text).label("queues"),
            cast(workers.c.handlers, Text).label("handlers"),
            workers.c.concurrency,
            workers.c.running,
            read(workers.c.started_at),
            read(workers.c.heartbeat_at),
            _age(workers.c.heartbeat_at, now).label("heartbeat_age_seconds"),
        )
        .where(workers.c.alive_until >= now)
        .order_by(workers.c.host, workers.c.pid, workers.c.id)
        .limit(literal_column(str(MAX_WORKERS)))
    )
