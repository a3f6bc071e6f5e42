"""Writing outcomes: in batches, again after a lost connection, and one by one around a bad row."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sa_jobs import claims
from sa_jobs.claims import Settled
from sa_jobs.error_text import storable
from sa_jobs.models import Tables
from sa_jobs.outcome import Failed, Outcome
from sa_jobs.worker.faults import first_line, hopeless, is_transient
from sa_jobs.worker.running import Running

logger = logging.getLogger("sa_jobs.worker")


@dataclass
class Writer:
    """Holds the outcomes that are still to be written. For the control loop alone."""

    worker: str
    tables: Tables
    pending: list[tuple[Running, Outcome]] = field(default_factory=list)

    def add(self, running: Running, outcome: Outcome) -> None:
        """Take over an outcome; the heartbeat leaves its claim alone from now on."""
        running.with_writer = True
        self.pending.append((running, outcome))

    def discard(self, running: Running) -> None:
        """Drop the outcome of a claim that turned out to be ended already."""
        self.pending = [entry for entry in self.pending if entry[0] is not running]

    def flush(self, connection: Connection) -> tuple[list[tuple[Running, Outcome]], list[Running]]:
        """Write everything that is pending; return what was written, and the claims that were lost.

        On a transient error everything stays pending: the leases live, and a row that was written
        though its answer was lost is recognised at the next try.
        """
        batch = self.pending
        landed = self._settle(connection, batch)
        missing = [Settled(entry.job, outcome) for entry, outcome in batch if entry not in landed]
        if missing:
            before = claims.landed_before(
                connection, missing, worker=self.worker, tables=self.tables
            )
            landed.update(entry for entry, _ in batch if entry.job.id in before)
        self.pending = []
        return (
            [(entry, outcome) for entry, outcome in batch if entry in landed],
            [entry for entry, _ in batch if entry not in landed],
        )

    def _settle(self, connection: Connection, batch: list[tuple[Running, Outcome]]) -> set[Running]:
        try:
            ids = claims.settle(
                connection,
                [Settled(entry.job, outcome) for entry, outcome in batch],
                worker=self.worker,
                tables=self.tables,
            )
            return {entry for entry, _ in batch if entry.job.id in ids}
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
    ) -> set[Running]:
        reason = storable(f"the outcome could not be stored: {first_line(error)}")
        logger.error("job %s %s: %s", entry.job.id, entry.job.handler, reason)
        if isinstance(outcome, Failed) and outcome.error == reason:
            return set()  # Even this was refused: the lease runs out, and the sweep takes over.
        failure = Failed(reason, delay=0.0, final=entry.job.final_attempt)
        return self._settle(connection, [(entry, failure)])
