"""The workers: real ones, each in a place where another is started when it dies."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal

from sa_jobs.worker import EXIT_FAILURE, EXIT_HANDED_BACK, EXIT_OK
from tests.support import clock
from tests.support.workers import WorkerProcess

APP = "benchmarks.chaos.application:jobs"

_LOOK_SECONDS = 0.05
_DRAIN_SECONDS = 60.0
# The last: Python itself had not started yet.
_DRAINED = (EXIT_OK, EXIT_HANDED_BACK, -signal.SIGTERM)
# What a worker says that drains and ends with code 1: the database was away or silent, or it was
# frozen meanwhile.
_HINDERED = (
    "could not be written; their leases run out",
    "something keeps the process from its end",
)
# Of these there should be none, so that more mean that nothing works.
_MOST_DEATHS_BY_ITSELF = 20

Cause = Literal["killed", "drained", "hindered", "itself"]


@dataclass(frozen=True)
class Death:
    """The end of a worker process. `at` is when it did its last work, in seconds of the epoch."""

    pid: int
    code: int
    at: float
    cause: Cause


@dataclass
class _Place:
    worker: WorkerProcess
    variables: Mapping[str, str]
    serves: bool = False
    cause: Cause = "itself"
    frozen_at: float | None = None
    killed_at: float | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_alive(self) -> bool:
        return self.worker.process.poll() is None

    @property
    def works(self) -> bool:
        return self.serves and self.cause == "itself" and self.frozen_at is None and self.is_alive


class Fleet:
    """So many workers, for the `with` block.

    The second has a clock that is ahead and the third one that is behind, where the system has the
    library for that. What each wrote is in a file of `logs`. `unattended` are the times in which
    none of them worked, in seconds of the epoch.
    """

    def __init__(
        self,
        number: int,
        url: str,
        variables: Mapping[str, str],
        options: Sequence[str],
        logs: Path,
    ) -> None:
        self._url = url
        self._options = options
        self._logs = logs
        self._variables = [{**variables, **clock.shifted_by(off)} for off in _offsets(number)]
        self._places: list[_Place] = []
        self._ends = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor")
        self._idle_since: float | None = None
        self.deaths: list[Death] = []
        self.unattended: list[tuple[float, float]] = []

    def __enter__(self) -> Fleet:
        try:
            for variables in self._variables:
                self._places.append(_Place(self._started(variables), variables))
            self._supervisor.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        self._ends.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        for place in self._places:
            place.worker.__exit__(None, None, None)

    @property
    def exhausted(self) -> bool:
        """Whether so many workers died by themselves that nothing is to be waited for."""
        own = [death for death in self.deaths if death.cause == "itself" and death.code != 137]
        return len(own) > _MOST_DEATHS_BY_ITSELF

    def wait_until_ready(self) -> None:
        """Wait until all serve their queues."""
        for place in self._places:
            place.worker.wait_until_ready()

    def kill(self, target: int) -> None:
        """Send SIGKILL."""
        place = self._places[target]
        with place.lock:
            if place.is_alive:
                place.cause = "killed"
                place.killed_at = time.time()
                place.worker.send(signal.SIGKILL)

    def freeze(self, target: int, wait: Callable[[], object]) -> None:
        """Send SIGSTOP, and after `wait` SIGCONT if it still is the same process."""
        place = self._places[target]
        with place.lock:
            worker = place.worker
            if not place.is_alive:
                return
            worker.send(signal.SIGSTOP)
            place.frozen_at = time.time()
        wait()
        with place.lock:
            if place.worker is worker:
                worker.send(signal.SIGCONT)
                place.frozen_at = None

    def drain(self, target: int) -> None:
        """Send SIGTERM; not twice, which would mean at once."""
        place = self._places[target]
        with place.lock:
            if place.is_alive and place.cause == "itself":
                place.cause = "drained"
                place.worker.send(signal.SIGTERM)

    def end(self) -> None:
        """Let all workers drain, without others in their places."""
        self._ends.set()
        self._supervisor.join()
        for target in range(len(self._places)):
            self.drain(target)
        for place in self._places:
            place.worker.wait(_DRAIN_SECONDS)
            self._record(place)

    def _supervise(self) -> None:
        while not self._ends.wait(_LOOK_SECONDS):
            for place in self._places:
                with place.lock:
                    if not place.is_alive and not self.exhausted:
                        self._record(place)
                        place.worker.__exit__(None, None, None)
                        place.worker = self._started(place.variables)
                        place.cause, place.frozen_at, place.killed_at = "itself", None, None
                        place.serves = False
                    elif not place.serves:
                        place.serves = place.worker.is_ready
            self._note_attendance()

    def _note_attendance(self) -> None:
        now = time.time()
        if any(place.works for place in self._places):
            if self._idle_since is not None:
                self.unattended.append((self._idle_since, now))
                self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    def _record(self, place: _Place) -> None:
        worker = place.worker
        code = worker.process.returncode
        cause = place.cause
        if cause == "drained" and code not in _DRAINED:
            says_why = code == EXIT_FAILURE and any(why in worker.log for why in _HINDERED)
            cause = "hindered" if says_why else "itself"
        last = [at for at in (place.frozen_at, place.killed_at) if at is not None]
        self.deaths.append(Death(worker.pid, code, min(last, default=time.time()), cause))
        (self._logs / f"worker-{worker.pid}.log").write_text(worker.log)

    def _started(self, variables: Mapping[str, str]) -> WorkerProcess:
        return WorkerProcess(self._url, *self._options, app=APP, variables=variables)


def _offsets(number: int) -> list[float]:
    hour = 3600.0
    return [(0.0, hour, -hour)[position % 3] for position in range(number)]
