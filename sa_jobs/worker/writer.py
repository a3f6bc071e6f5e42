"""Writing outcomes: in batches, again after a lost connection, and one by one around a bad row."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sa_jobs import claims
from sa_jobs.claims import Settled
from sa_jobs.error_text import storable
from sa_jobs.models import Tables
from sa_jobs.outcome import Failed, Finished, Outcome
from sa_jobs.worker.faults import first_line, hopeless, is_transient
from sa_jobs.worker.running import Running

logger = logging.getLogger("sa_jobs.worker")

# How soon a row that somebody has locked is tried again.
LOCKED_SECONDS = 0.2


# Of results, in one statement: more would take several times its memory on both sides.
LARGEST_WRITE_CHARACTERS = 1_000_000


@dataclass
class Flushed:
    """What became of outcomes: written, ended before (with the status), or no longer ours."""

    written: list[tuple[Running, Outcome]]
    ended: list[tuple[Running, str]]
    lost: list[Running]


@dataclass
class Writer:
    """Holds the outcomes that are still to be written. For the control loop alone.

    A statement writes at most `batch` of them.
    """

    worker: str
    tables: Tables
    batch: int
    pending: list[tuple[Running, Outcome]] = field(default_factory=list)
    _not_before: float = 0.0

    def add(self, running: Running, outcome: Outcome) -> None:
        """Take over an outcome; the heartbeat leaves its claim alone from now on."""
        running.with_writer = True
        self.pending.append((running, outcome))
        self._not_before = 0.0

    def discard(self, running: Running) -> None:
        """Drop the outcome of a claim that turned out to be over already, if there is one."""
        self.pending = [entry for entry in self.pending if entry[0] is not running]

    def postpone(self, seconds: float) -> None:
        """Leave what is pending for later."""
        self._not_before = time.monotonic() + seconds

    def due_in(self) -> float | None:
        """Return the seconds until what is pending should be written, None if nothing is."""
        return max(0.0, self._not_before - time.monotonic()) if self.pending else None

    def finished(self) -> list[Settled] | None:
        """Return the first batch of what is pending, if all of it is finished jobs."""
        portion = next(_portions(self.pending, self.batch), [])
        if any(type(outcome) is not Finished for _, outcome in portion):
            return None
        return [Settled(entry.job, outcome) for entry, outcome in portion]

    def flush(self, connection: Connection) -> Flushed:
        """Write what is pending, and return what became of it.

        Rows that somebody else has locked stay pending for a while. On a transient error everything
        does: the leases live, and what was written though its answer was lost is recognised at the
        next try.
        """
        landed: set[int] = set()
        for portion in _portions(self.pending, self.batch):
            landed |= self._settle(connection, portion)
        return self.settled(connection, len(self.pending), landed)

    def settled(self, connection: Connection, written: int, landed: Collection[int]) -> Flushed:
        """Return what became of the first `written`, of which the jobs with these ids landed."""
        batch, self.pending = self.pending[:written], self.pending[written:]
        missing = [entry.job for entry, _ in batch if entry.job.id not in landed]
        if not missing:
            return Flushed(batch, [], [])
        try:
            now = claims.standing(connection, missing, worker=self.worker, tables=self.tables)
        except BaseException:
            self.pending = batch + self.pending
            raise
        flushed = Flushed([], [], [])
        held: list[tuple[Running, Outcome]] = []
        for entry, outcome in batch:
            state = now.get(entry.job.id)
            if entry.job.id in landed:
                flushed.written.append((entry, outcome))
            elif state == "held":
                held.append((entry, outcome))
            elif state is not None:
                flushed.ended.append((entry, state))
            else:
                flushed.lost.append(entry)
        if held:
            # After what has not been tried yet.
            self.pending += held
            if len(self.pending) == len(held):
                self.postpone(LOCKED_SECONDS)
        return flushed

    def _settle(self, connection: Connection, batch: list[tuple[Running, Outcome]]) -> set[int]:
        try:
            return claims.settle(
                connection,
                [Settled(entry.job, outcome) for entry, outcome in batch],
                worker=self.worker,
                tables=self.tables,
            )
        except DBAPIError as error:
            if is_transient(error) or hopeless(error) is not None:
                raise
            if len(batch) > 1:
                # One row that the database refuses must not keep the others from being written.
                middle = len(batch) // 2
                return self._settle(connection, batch[:middle]) | self._settle(
                    connection, batch[middle:]
                )
            entry, outcome = batch[0]
            return self._refused(connection, entry, outcome, error)

    def _refused(
        self, connection: Connection, entry: Running, outcome: Outcome, error: DBAPIError
    ) -> set[int]:
        if isinstance(outcome, Finished) and outcome.result is not None:
            # The work is done, and is not done again for the sake of its result.
            logger.warning(
                "job %s %s: result left out: %s", entry.job.id, entry.job.handler, first_line(error)
            )
            return self._settle(connection, [(entry, Finished())])
        reason = storable(f"the outcome could not be stored: {first_line(error)}")
        logger.error("job %s %s: %s", entry.job.id, entry.job.handler, reason)
        if isinstance(outcome, Failed) and outcome.error == reason:
            return set()  # Even this was refused: the lease runs out, and the sweep takes over.
        failure = Failed(reason, delay=0.0, final=entry.job.final_attempt)
        return self._settle(connection, [(entry, failure)])


def _portions(
    pending: list[tuple[Running, Outcome]], most: int
) -> Iterator[list[tuple[Running, Outcome]]]:
    """Yield what is pending in parts that are written by one statement each."""
    portion: list[tuple[Running, Outcome]] = []
    size = 0
    for entry, outcome in pending:
        length = len(outcome.result or "") if isinstance(outcome, Finished) else 0
        if portion and (len(portion) >= most or size + length > LARGEST_WRITE_CHARACTERS):
            yield portion
            portion, size = [], 0
        portion.append((entry, outcome))
        size += length
    if portion:
        yield portion
