"""How much a worker may do before it is to be replaced: so many jobs, so much memory."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from sa_jobs.errors import WorkerOptionError

logger = logging.getLogger("sa_jobs.worker")

MIB = 1024 * 1024

_LOOKS_APART_SECONDS = 1.0
_STATM = Path("/proc/self/statm")


class Allowance:
    """Counts the jobs and watches the memory of this process; None means without limit.

    Once used up it stays so: no room is left for another job.
    """

    def __init__(self, *, max_jobs: int | None, max_memory_mib: int | None) -> None:
        self._max_jobs = max_jobs
        self._max_memory_mib = max_memory_mib
        self._jobs = 0
        self._looked_at = 0.0
        self._used_up = False

    def check(self) -> None:
        """Raise WorkerOptionError if the memory is used up before the first job."""
        if self._max_memory_mib is not None and (used := resident_mib()) > self._max_memory_mib:
            raise self._too_little(used)

    def room(self, free: int) -> int:
        """Return how many of the free slots may still be filled."""
        if self._used_up:
            return 0
        return free if self._max_jobs is None else min(free, self._max_jobs - self._jobs)

    def spend(self, jobs: int) -> None:
        """Note that so many jobs were claimed."""
        self._jobs += jobs

    def is_used_up(self) -> bool:
        """Return whether the worker is to take no more jobs; looks at most once a second.

        Raises WorkerOptionError if the memory is used up without a job: another worker, started in
        the place of this one, would fare no better.
        """
        if not self._used_up:
            reason = self._reason()
            if reason is not None:
                self._used_up = True
                logger.info("%s: no more are taken, and the worker ends when these have", reason)
        return self._used_up

    def _reason(self) -> str | None:
        if self._max_jobs is not None and self._jobs >= self._max_jobs:
            return f"the worker has taken {self._jobs} jobs of {self._max_jobs}"
        now = time.monotonic()
        if self._max_memory_mib is None or now - self._looked_at < _LOOKS_APART_SECONDS:
            return None
        self._looked_at = now
        used = resident_mib()
        if used <= self._max_memory_mib:
            return None
        if not self._jobs:
            raise self._too_little(used)
        return f"the process holds {used} MiB of {self._max_memory_mib} after {self._jobs} jobs"

    def _too_little(self, used: int) -> WorkerOptionError:
        return WorkerOptionError(
            f"max_memory_mib is {self._max_memory_mib}, and the process holds {used} MiB before "
            "its first job: give it more"
        )


def resident_mib() -> int:
    """Return the memory that the process holds now; without /proc, the most that it ever held."""
    try:
        pages = int(_STATM.read_text().split()[1])
    except FileNotFoundError:
        import resource  # Not everywhere; nor is it needed where no limit is set.

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most // MIB if sys.platform == "darwin" else most // 1024
    return pages * os.sysconf("SC_PAGE_SIZE") // MIB
