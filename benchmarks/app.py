"""The handlers that the measured workers run: `sa-jobs-worker benchmarks.app:jobs`."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.starts import ENVIRONMENT, Starts
from sa_jobs import Jobs

jobs = Jobs()
_starts = Starts(Path(os.environ[ENVIRONMENT]))


@jobs.handler("noop")
def noop(i: int) -> None:
    _starts.mark(i)


@jobs.handler("noop_coroutine")
async def noop_coroutine(i: int) -> None:
    _starts.mark(i)


@jobs.handler("nap")
def nap(i: int, seconds: float = 0.002) -> None:
    _starts.mark(i)
    time.sleep(seconds)
