"""Real workers: the `sa-jobs-worker` command in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
APP = "tests.acceptance.app:jobs"
MODULE = (sys.executable, "-m", "sa_jobs", "worker")


class WorkerProcess:
    """`sa-jobs-worker` with short periods, as a process that is killed at the end of the block.

    `options` are added to the command, where the last one of a name counts; `variables` to its
    environment. With `in_session` it is a terminal's job: the first process of a group that signals
    can go to.
    """

    def __init__(
        self,
        database_url: str,
        *options: str,
        app: str = APP,
        lease: float = 3.0,
        program: Sequence[str] = MODULE,
        directory: Path = ROOT,
        in_session: bool = False,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        command = [
            *program,
            app,
            "--lease",
            str(lease),
            "--heartbeat",
            str(lease / 3),
            "--sweep",
            "1",
            "--poll",
            "0.5",
            *options,
        ]
        self.process = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, **(variables or {}), "SA_JOBS_DATABASE_URL": database_url},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=in_session,
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            # A stopped process takes no other signal.
            self.process.kill()
            self.process.wait()
        if kind is not None:
            sys.stderr.write(
                f"--- worker {self.pid}, exit code {self.process.returncode}\n{self.log}"
            )
        self._log.close()

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self.process.pid

    @property
    def log(self) -> str:
        """Everything that the worker has written so far."""
        return os.pread(self._log.fileno(), 10_000_000, 0).decode()

    @property
    def is_ready(self) -> bool:
        """Whether the worker has said that it serves its queues."""
        return "serves queues" in self.log

    @property
    def children(self) -> list[int]:
        """The processes that it has started and that are not gone, ended ones included."""
        return [child.pid for child in psutil.Process(self.pid).children()]

    def wait_until_ready(self, processes: int = 1) -> None:
        """Wait until so many workers have said that they serve their queues.

        Of several, the others start when the first one serves.
        """
        wait_until(
            lambda: self.log.count("serves queues") >= processes,
            f"{processes} workers of {self.pid} start",
            seconds=30.0 if processes == 1 else 60.0,
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def wait(self, seconds: float = 20.0) -> int:
        """Return the exit code, once the process has ended."""
        return self.process.wait(seconds)

    def stop(self) -> int:
        """Ask the worker to drain, and return its exit code."""
        self.send(signal.SIGTERM)
        return self.wait()


class Supervisor:
    """Keeps one worker running: `tend()` starts a new one when the last one has died."""

    def __init__(self, database_url: str, *options: str, most: int = 20) -> None:
        self._database_url = database_url
        self._options = options
        self._most = most
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Supervisor:
        self.tend()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self.workers:
            worker.__exit__(kind, error, trace)

    def tend(self) -> None:
        """Start a worker if none is running."""
        if not self.workers or self.workers[-1].process.poll() is not None:
            assert len(self.workers) < self._most, "the worker dies again and again"
            self.workers.append(WorkerProcess(self._database_url, *self._options))
