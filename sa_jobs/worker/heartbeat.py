"""The heartbeat: one statement pushes out the leases of everything that runs here."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy.exc import DBAPIError

from sa_jobs import claims, presence
from sa_jobs.context import ClaimedJob
from sa_jobs.models import Tables
from sa_jobs.worker.faults import first_line, hopeless, is_transient
from sa_jobs.worker.healing import HealingThread
from sa_jobs.worker.links import Link
from sa_jobs.worker.running import Lost, Mailbox, Running

logger = logging.getLogger("sa_jobs.worker")

# A row that a finish under way has locked is looked at again this soon.
LOCKED_SECONDS = 1.0


class Heartbeat(HealingThread):
    """Renews the leases every `period` seconds; the last thing to stop.

    It tells handlers of requests to cancel, and the control loop of claims that are lost. `running`
    gives the claims, `view` the worker's row for so many of them.
    """

    def __init__(
        self,
        link: Link,
        mailbox: Mailbox,
        running: Callable[[], list[Running]],
        view: Callable[[int], dict[str, Any]],
        *,
        worker: str,
        lease: float,
        period: float,
        tables: Tables,
    ) -> None:
        super().__init__("heartbeat", link, mailbox, longest_wait=period)
        self._running = running
        self._view = view
        self._worker = worker
        self._lease = lease
        self._period = period
        self._tables = tables
        # Monotonic seconds: when the next beat should be confirmed.
        self._due: float | None = None
        self._held = False

    def step(self) -> float:
        """Beat once."""
        began = time.monotonic()
        connection = self._link.connection()
        entries: dict[int, Running] = {}
        for entry in self._running():
            # An end that cannot be written must not cost the lease either; else the writer has it.
            if entry.with_writer and (
                entry.deadline - began > self._lease / 2 or entry.job.id in entries
            ):
                continue
            earlier = entries.get(entry.job.id)
            if earlier is not None:
                # The job lapsed, and came back to this very worker.
                self._mailbox.put(Lost(earlier))
            entries[entry.job.id] = entry
        locked = bool(entries) and self._beat(entries)
        connection.execute(presence.beat_worker(self._tables), self._view(len(entries)))
        now = time.monotonic()
        if (entries or self._held) and self._due is not None:
            self._warn_if_late(now - self._due)
        # What was held at this beat may have been lost, or have ended late, by the next one.
        self._held = bool(entries)
        period = min(self._period, LOCKED_SECONDS) if locked else self._period
        self._due = began + period
        return max(0.0, self._due - now)

    def _warn_if_late(self, seconds: float) -> None:
        if seconds > self._lease / 2:
            logger.warning(
                "the heartbeat is %.1f s late, and leases last %g s: the database did not answer, "
                "or this process got no time to run, as when a handler keeps the interpreter",
                seconds,
                self._lease,
            )

    def _beat(self, entries: dict[int, Running]) -> bool:
        """Renew the leases, and return whether a row was locked."""
        beaten: list[tuple[ClaimedJob, str | None]] = [
            (entry.job, entry.context.take_progress()) for entry in entries.values()
        ]
        deadline = time.monotonic() + self._lease
        try:
            beat = self._renew(beaten)
        except DBAPIError as error:
            told = any(progress is not None for _, progress in beaten)
            if not told or is_transient(error) or hopeless(error) is not None:
                for entry, (_, progress) in zip(entries.values(), beaten, strict=True):
                    entry.context.keep_progress(progress)
                raise
            # What one handler says of its progress must not cost anybody's lease.
            logger.warning("the progress of %d jobs left out: %s", len(beaten), first_line(error))
            beat = self._renew([(job, None) for job, _ in beaten])
        for job_id in beat.renewed:
            entries[job_id].deadline = deadline
        for entry, (_, progress) in zip(entries.values(), beaten, strict=True):
            if entry.job.id in beat.locked:
                entry.context.keep_progress(progress)
        for job_id in beat.cancel_requested:
            if not entries[job_id].with_writer:
                entries[job_id].stop("cancel")
        for job_id in beat.lost:
            # A claim whose outcome went to the writer meanwhile was ended, not lost.
            if not entries[job_id].with_writer:
                self._mailbox.put(Lost(entries[job_id]))
        return bool(beat.locked)

    def _renew(self, beaten: list[tuple[ClaimedJob, str | None]]) -> claims.Heartbeat:
        return claims.heartbeat(
            self._link.connection(),
            beaten,
            worker=self._worker,
            lease=self._lease,
            tables=self._tables,
        )
