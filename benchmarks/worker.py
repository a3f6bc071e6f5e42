"""Real workers: the `sa-jobs-worker` command in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from benchmarks.server import Database
from benchmarks.starts import ENVIRONMENT, Starts

ROOT = Path(__file__).parents[1]
APP = "benchmarks.app:jobs"
# A line per job, which the default level has, would be measured too.
QUIET = ("--log-level", "warning")

READY_SECONDS = 60.0
_STOP_SECONDS = 40.0


class WorkerProcess:
    """`sa-jobs-worker` as a process that is stopped at the end of the block."""

    def __init__(self, database: Database, starts: Starts, options: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sa_jobs", "worker", APP, *QUIET, *options],
            cwd=ROOT,
            env={
                **os.environ,
                "SA_JOBS_DATABASE_URL": database.url,
                ENVIRONMENT: str(starts.path),
            },
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
                self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self.process.pid

    def check(self) -> None:
        """Raise RuntimeError with the worker's log if it has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"the worker ended with {self.process.returncode}:\n{self.log}")

    @property
    def log(self) -> str:
        """The end of what the worker has written."""
        return os.pread(self._log.fileno(), 1_000_000, 0).decode()[-3_000:]


@contextmanager
def running_workers(
    database: Database, starts: Starts, options: Sequence[str] = (), *, count: int = 1
) -> Iterator[list[WorkerProcess]]:
    """Start workers, and stop them at the end of the block."""
    with ExitStack() as stack:
        yield [stack.enter_context(WorkerProcess(database, starts, options)) for _ in range(count)]


def wait_until_ready(database: Database, workers: Sequence[WorkerProcess]) -> None:
    """Wait until all workers are in the operators' view, and then until they sleep."""
    deadline = time.monotonic() + READY_SECONDS
    while database.row("SELECT count(*) FROM sa_jobs_workers")[0] < len(workers):
        for worker in workers:
            worker.check()
        if time.monotonic() > deadline:
            raise RuntimeError(f"no worker within {READY_SECONDS:g} s")
        time.sleep(0.05)
    time.sleep(1.0)
