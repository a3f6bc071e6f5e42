"""When each handler started: a file that workers and the measurement map into their memory.

A start costs its handler well under a microsecond, and needs no connection. The times are those of
the monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from pathlib import Path
from types import TracebackType

ENVIRONMENT = "SA_JOBS_BENCHMARK_STARTS"


class Starts:
    """The start times of the jobs 0, 1, ...; 0.0 for those that have not started."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        self._times = memoryview(self._mapped).cast("d")
        self._begun = 0

    @classmethod
    def make(cls, jobs: int) -> Starts:
        """Make the file for so many jobs."""
        descriptor, name = tempfile.mkstemp(prefix="sa-jobs-starts-")
        os.truncate(descriptor, max(1, jobs) * 8)
        os.close(descriptor)
        return cls(Path(name))

    def __enter__(self) -> Starts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.path.unlink()
        self._times.release()
        self._mapped.close()

    @property
    def size(self) -> int:
        """How many jobs there are."""
        return len(self._times)

    def mark(self, job: int) -> None:
        """Note that a job's handler starts now."""
        self._times[job] = time.monotonic()

    def get(self, job: int) -> float:
        """Return when a job's handler started, 0.0 if it has not."""
        return self._times[job]

    def begun(self) -> int:
        """Return how many jobs have started without a gap, counted from the first one."""
        times = self._times
        while self._begun < len(times) and times[self._begun]:
            self._begun += 1
        return self._begun

    def any_begun(self) -> bool:
        """Return whether any job has started."""
        return any(self._times)

    def in_order(self) -> list[float]:
        """Return the times of all that have started, the earliest first."""
        return sorted(moment for moment in self._times if moment)
