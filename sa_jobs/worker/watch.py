"""The watch over leases: a handler is told when its lease ran out before it could be renewed.

On a thread of its own that knows no connection, since in a network partition every thread that does
may wait for an answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from sa_jobs.worker.records import log_overdue
from sa_jobs.worker.running import Running

LONGEST_PERIOD_SECONDS = 1.0


class LeaseWatch(threading.Thread):
    """Looks at the claims' deadlines several times in a lease.

    Another worker may run an overdue job by now. What its handler still returns is written if the
    row says that it is ours after all.
    """

    def __init__(self, running: Callable[[], list[Running]], lease: float) -> None:
        super().__init__(name="sa-jobs-watch", daemon=True)
        self._running = running
        self._period = min(LONGEST_PERIOD_SECONDS, lease / 10)
        self._ended = threading.Event()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        self.join(1.0)

    def run(self) -> None:
        """Watch until the end (the thread's own function)."""
        while not self._ended.wait(self._period):
            now = time.monotonic()
            for running in self._running():
                overdue = running.deadline <= now and not running.with_writer
                if overdue and running.stop_reason is None:
                    running.stop("lost")
                    log_overdue(running)
