"""The sweep: jobs whose lease ran out are taken back, whoever held them."""

from __future__ import annotations

import random
from collections.abc import Callable

from sa_jobs import claims, presence
from sa_jobs.claims import RECLAIM_BATCH
from sa_jobs.models import Tables
from sa_jobs.worker.healing import HealingThread
from sa_jobs.worker.links import Link
from sa_jobs.worker.notices import Notices
from sa_jobs.worker.records import log_reclaimed
from sa_jobs.worker.running import Mailbox, Running, Woken

# How long the row of a worker that died stays in the operators' view.
FORGET_SECONDS = 3600.0


class Sweep(HealingThread):
    """Sweeps at once, then about every `period` seconds; `running` gives the worker's claims."""

    def __init__(
        self,
        link: Link,
        mailbox: Mailbox,
        running: Callable[[], list[Running]],
        *,
        worker: str,
        period: float,
        tables: Tables,
        notices: Notices | None = None,
    ) -> None:
        super().__init__("sweep", link, mailbox, longest_wait=period)
        self._running = running
        self._worker = worker
        self._period = period
        self._tables = tables
        self._notices = notices

    def step(self) -> float:
        """Take back all lapsed jobs, batch by batch."""
        while not self._ended.is_set():
            connection = self._link.connection()
            taken = claims.reclaim(
                connection,
                worker=self._worker,
                held=[running.job.id for running in self._running()],
                alone=True,
                tables=self._tables,
            )
            connection.execute(
                presence.forget_workers(self._tables), {"id": "", "seconds": FORGET_SECONDS}
            )
            if taken:
                log_reclaimed(taken)
                if self._notices is not None:
                    self._notices.reclaimed(taken)
                self._mailbox.put(Woken())
            if len(taken) < RECLAIM_BATCH:
                break
        # Jittered, so that the sweeps of many workers spread out.
        return self._period * random.uniform(0.8, 1.0)
