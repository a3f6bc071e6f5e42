"""The claim cursor: where the next claim begins to read, so that it need not walk what is past.

The ready index keeps an entry for each job that was claimed until vacuum may remove it, which a
long transaction anywhere in the cluster puts off; and it has the due jobs of handlers that this
worker does not know. A claim that reads from the start walks all of them each time. So once that is
dear, the worker remembers for each lane, the jobs of one queue at one priority, a place before
which there is nothing for it.

A place trails the database's clock by a slack, since `run_at` is the start of the transaction that
enqueued, which commits later. Jobs can still appear before it: transactions that took longer than
the slack, a `run_at` in the past, what was released, reclaimed or retried, handlers that the worker
has learnt, a clock that was set back. So the worker reads from the start again and again, as
`Cursor.wants_scan` says; a notification makes it do so at once. That is all that correctness rests
on.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sa_jobs.claims import Lanes, Place
from sa_jobs.context import ClaimedJob

SLACK_SECONDS = 1.0
# Reading from the start costs less than this: there is no use for a cursor.
CHEAP_SECONDS = 0.001
# About what one more job adds to a claim, which is no cost of reading.
JOB_SECONDS = 15e-6
# A worker with jobs reads from the start when its claims have taken so many times as long as that
# takes, and once in so many seconds at the latest.
TIMES_AS_LONG = 20
LONGEST_SECONDS = 1.0
# One without jobs spends no more than this share of its time on it.
IDLE_SHARE = 0.001
LONGEST_IDLE_SECONDS = 30.0
# With more lanes than these the places cost more than they save.
MOST_LANES = 2_000


@dataclass
class _Lane:
    priority: int
    since_at: dt.datetime | None = None
    since_id: int = 0

    def pass_by(self, at: dt.datetime, job_id: int) -> None:
        """Move the place on, never back."""
        if self.since_at is None or (at, job_id) > (self.since_at, self.since_id):
            self.since_at, self.since_id = at, job_id


class Cursor:
    """Says where claims begin. Times are monotonic seconds, those in places the database's."""

    def __init__(self) -> None:
        self._lanes: dict[str, list[_Lane]] = {}
        self._on = False
        self._wanted = False
        # Whether to look for priorities between those that are known.
        self._looks_between = True
        self._cost = 0.0
        self._used = 0.0
        self._idle = False
        self._scanned_at = 0.0
        # The database's time, and the latest monotonic time at which it can have been that.
        self._clock: tuple[dt.datetime, float] | None = None

    def renew(self) -> None:
        """Have the next claim read from the start: something has happened that may be there."""
        self._wanted = True

    def drop(self) -> None:
        """Forget all places, as with a connection that is lost: the next server may be another."""
        self.__init__()  # type: ignore[misc]

    def wants_scan(self, now: float) -> bool:
        """Return whether the next claim is to read from the start, after `begin`."""
        if not self._on:
            return False
        since = now - self._scanned_at
        if self._wanted:
            return True
        if self._idle:
            dear = self._cost / IDLE_SHARE
            return since >= max(LONGEST_SECONDS, min(dear, LONGEST_IDLE_SECONDS))
        return since >= LONGEST_SECONDS or self._used >= TIMES_AS_LONG * self._cost

    def begin(self, found: Lanes, now: float) -> None:
        """Begin at the start again, with the lanes that were found; `now` is when the answer came.

        A lane that has no job any more is kept: what is past in it would be walked to find others.
        """
        self._wanted = self._idle = False
        self._looks_between = True
        self._used = 0.0
        self._scanned_at = now
        if found.now is not None:
            self._clock = _exact(found.now), now
        known = {(queue, lane.priority) for queue, lanes in self._lanes.items() for lane in lanes}
        self._lanes = {}
        for queue, priority in sorted(known.union(found.lanes), key=lambda lane: -lane[1]):
            self._lanes.setdefault(queue, []).append(_Lane(priority))
        if sum(map(len, self._lanes.values())) > MOST_LANES:
            self.drop()

    def places(self, queues: Sequence[str]) -> list[Place] | None:
        """Return where the next claim begins, in the order in which it reads; None for the start.

        That is as without places: each queue's highest priority, then each one's next lower.
        """
        if not self._on:
            return None
        return [place for rank in self._ranks(queues) for place in rank]

    def _ranks(self, queues: Sequence[str]) -> Iterator[Iterator[Place]]:
        lanes = [(queue, self._lanes.get(queue, [])) for queue in queues]
        for rank in range(1 + max((len(known) for _, known in lanes), default=0)):
            yield (self._place(queue, known, rank) for queue, known in lanes if rank <= len(known))

    def _place(self, queue: str, known: list[_Lane], rank: int) -> Place:
        above = known[rank - 1].priority if rank else None
        if rank == len(known):
            # What is lower than all that is known.
            return Place(queue, None, above)
        lane = known[rank]
        if not self._looks_between:
            above = lane.priority + 1
        return Place(queue, lane.priority, above, lane.since_at, lane.since_id)

    def claimed(
        self,
        jobs: Sequence[ClaimedJob],
        *,
        places: Sequence[Place] | None,
        limit: int,
        asked_at: float,
        answered_at: float,
        seconds: float,
        scan: bool,
    ) -> None:
        """Take note of a claim: what it took, and how long, what was written with it left out.

        With `scan` it has read from the start, and the time includes that for the lanes.
        """
        cost = max(0.0, seconds - len(jobs) * JOB_SECONDS)
        if places is None or scan:
            self._cost = cost
            if cost <= CHEAP_SECONDS:
                self._on = False
                return
            if not self._on:
                self._on = self._wanted = True
                return
        else:
            self._used += seconds
            if not jobs:
                # The next scan may be far off, and what becomes due by then notifies nobody.
                self._looks_between = True
            elif cost > CHEAP_SECONDS:
                # Perhaps many jobs were claimed at a priority that this worker has not seen.
                self._looks_between = False
        self._idle = not jobs
        self._pass_by(jobs, places or (), len(jobs) < limit, asked_at, answered_at)

    def _pass_by(
        self,
        jobs: Sequence[ClaimedJob],
        places: Sequence[Place],
        dry: bool,
        asked_at: float,
        answered_at: float,
    ) -> None:
        lanes = {
            (queue, lane.priority): lane for queue, known in self._lanes.items() for lane in known
        }
        last: dict[tuple[str, int], ClaimedJob] = {}
        for job in jobs:
            last[job.queue, job.priority] = job
        if jobs:
            self._clock = _exact(jobs[0].claimed_at), answered_at
        if not last.keys() <= lanes.keys():
            # A priority that is new: the next claim learns of it.
            self._wanted = True
        if self._clock is None:
            return
        then, known_at = self._clock
        bound = then + dt.timedelta(seconds=max(0.0, asked_at - known_at) - SLACK_SECONDS)
        # A claim that took all it was to take has read no lane beyond that of its last job.
        read = [(place.queue, place.priority) for place in places if place.priority is not None]
        if not dry:
            ends = [position for position, lane in enumerate(read) if lane in last]
            read = read[: ends[-1]] if ends else []
        for queue, priority in read:
            assert priority is not None
            if (queue, priority) not in last or dry:
                lanes[queue, priority].pass_by(bound, 0)
        if not dry:
            for key, job in last.items():
                if key in lanes:
                    lanes[key].pass_by(*min((_exact(job.run_at), job.id), (bound, 0)))


def _exact(moment: dt.datetime) -> dt.datetime:
    """Return a moment by which to reckon and compare.

    In a zone of the session's Python goes by the wall clock, which shows one hour of the year
    twice.
    """
    return moment.astimezone(dt.timezone.utc)
