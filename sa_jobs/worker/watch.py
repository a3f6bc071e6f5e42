"""The watch over leases: a handler is told before its lease runs out, if it was not renewed.

On a thread of its own that knows no connection, since in a network partition every thread that does
may wait for an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sa_jobs.worker.parts import Part
from sa_jobs.worker.records import log_overdue
from sa_jobs.worker.running import Mailbox, Running

LONGEST_MARGIN_SECONDS = 2.0
MARGIN_PART = 10
LOOKS_PER_MARGIN = 4


class LeaseWatch(Part):
    """Tells the handlers whose lease ends within a tenth of its length, or 2 s.

    From the end on another worker may run the job. What the handler still returns is written if the
    row says that it is ours after all.
    """

    def __init__(
        self, mailbox: Mailbox, running: Callable[[], list[Running]], lease: float
    ) -> None:
        super().__init__("watch", mailbox)
        self._running = running
        self._margin = min(LONGEST_MARGIN_SECONDS, lease / MARGIN_PART)

    def work(self) -> None:
        """Watch until the end."""
        while not self._ended.wait(self._margin / LOOKS_PER_MARGIN):
            soon = time.monotonic() + self._margin
            for running in self._running():
                overdue = running.deadline <= soon and not running.with_writer
                if overdue and running.stop_reason is None:
                    running.stop("lost")
                    log_overdue(running)
