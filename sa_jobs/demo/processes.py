"""The demo's processes: started with a log file each, and ended by their own process id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from sqlalchemy import URL

from sa_jobs.errors import SaJobsError

STOP_SECONDS = 15
START_SECONDS = 30

# Short times, so that a killed worker's jobs are back while one still looks.
WORKER_OPTIONS = (
    "--lease=3",
    "--heartbeat=1",
    "--sweep=1",
    "--poll=0.5",
    "--grace=10",
)


class Child:
    """A process of the demo's own, in a session of its own, so that Ctrl-C reaches only us."""

    def __init__(self, name: str, command: list[str], url: URL, log: Path) -> None:
        self.name = name
        self._log = log
        self._is_asked = False
        environment = {
            **os.environ,
            # Not an argument: every user of the machine can read those.
            "SA_JOBS_DATABASE_URL": url.render_as_string(hide_password=False),
            "PYTHONUNBUFFERED": "1",
        }
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise an error if the process has ended."""
        code = self._process.poll()
        if code is not None:
            raise SaJobsError(f"the {self.name} ended with code {code}: {self.log_end(1) or '-'}")

    def freeze(self) -> None:
        """Stop the process where it is."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let a frozen process go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the process on the spot; it can do nothing about it."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        """Ask the process to end, also if it is frozen; once, since a second time means at once."""
        if not self._is_asked:
            self._is_asked = True
            self._process.terminate()
            self.thaw()

    def stop(self) -> int:
        """End the process, by force if it does not by itself, and return its exit code."""
        self.ask_to_stop()
        try:
            return self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def first_line(self) -> str:
        """Wait for the process to write its first line, and return that."""
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            text = self._log.read_text(errors="replace")
            if "\n" in text:
                return text.partition("\n")[0]
            self.check()
            time.sleep(0.02)
        raise SaJobsError(f"the {self.name} did not start within {START_SECONDS} s")

    def log_end(self, lines: int) -> str:
        """Return the last lines of what the process has written."""
        with self._log.open(errors="replace") as file:
            return "".join(deque(file, lines)).strip()


def server_command() -> list[str]:
    """Return the command of the shop's HTTP server, which prints its port first."""
    return [sys.executable, "-m", "sa_jobs.demo.server"]


def worker_command() -> list[str]:
    """Return the command of a worker for the shop's jobs."""
    return [*_worker_program(), "sa_jobs.demo.shop:jobs", *WORKER_OPTIONS]


def _worker_program() -> list[str]:
    """Return the command `sa-jobs-worker` that belongs to this interpreter."""
    for beside in (sys.argv[0], sys.executable):
        program = Path(beside).absolute().with_name("sa-jobs-worker")
        if os.access(program, os.X_OK):
            return [str(program)]
    return [sys.executable, "-m", "sa_jobs", "worker"]
