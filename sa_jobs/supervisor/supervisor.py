"""Supervisor: keeps a number of worker processes running, and ends when they have ended."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from sa_jobs.backoff import equal_jitter
from sa_jobs.supervisor.child import Child, how_it_ended
from sa_jobs.worker import EXIT_FAILURE, EXIT_HANDED_BACK, EXIT_OK, EXIT_RECYCLED
from sa_jobs.worker.interruptions import STOP_SIGNALS

logger = logging.getLogger("sa_jobs.supervisor")

EXIT_USAGE = 2

# A process that lived this long did not die of how it was started.
SETTLED_SECONDS = 10.0
# For processes whose time to drain is over or that were told to end at once; then they are killed.
LAST_SECONDS = 10.0
# Recycled processes of one place begin no closer to each other than this.
RECYCLED_APART_SECONDS = 1.0

# Before the first replacement 0.25 to 0.75 s, then doubling, up to half a minute.
_backoff = equal_jitter(base=0.25, cap=30)

# What the supervisor ends with is the last of these that a process ended with.
_BY_SEVERITY = (EXIT_OK, EXIT_HANDED_BACK, EXIT_USAGE, EXIT_FAILURE)


@dataclass
class _Place:
    """A place for one process: the one that has it, or when the next may start."""

    child: Child | None = None
    start_at: float = 0.0
    deaths: int = 0


class Supervisor:
    """Runs `command` in so many processes, each of which is a worker with a lifeline.

    The first one starts alone, the others when it serves: what is wrong with all of them is said
    once. One that dies is replaced after a back-off, one that is recycled at once. One that fails
    before it serves, or by its options, while no other one serves, ends the supervisor. After a
    life of `settled` seconds the back-off begins anew. Processes that are told to drain have as
    many seconds for it as they said themselves (else `grace`) and ten more, and are killed then.
    """

    def __init__(
        self,
        command: Sequence[str],
        processes: int,
        *,
        grace: float,
        settled: float = SETTLED_SECONDS,
    ) -> None:
        self._command = command
        self._grace = grace
        self._settled = settled
        self._places = [_Place() for _ in range(processes)]
        self._selector = selectors.DefaultSelector()
        self._served = False
        self._stops = 0
        self._passed_on = 0
        self._kill_at: float | None = None
        self._code: int | None = None

    def run(self) -> int:
        """Supervise until a signal or a failed start, and return the exit code.

        To be called on the main thread. The first SIGTERM or SIGINT drains all processes, the
        second ends them at once.
        """
        with self._selector, self._woken_by_signals():
            while True:
                self._pass_on_stops()
                self._start()
                if self._code is not None and not self._children():
                    return self._code
                self._wait()
                self._reap()

    def _children(self) -> list[Child]:
        return [place.child for place in self._places if place.child is not None]

    def _startable(self) -> list[_Place]:
        """Return the places that may get a process, whether it is time or not."""
        if self._code is not None:
            return []
        free = [place for place in self._places if place.child is None]
        if self._served:
            return free
        return free[:1] if len(free) == len(self._places) else []

    def _start(self) -> None:
        for place in self._startable():
            if place.start_at > time.monotonic():
                continue
            try:
                child = Child(self._command)
            except OSError as error:
                what = f"a process cannot be started ({error.strerror})"
                self._replace_later(place, what, failed_start=EXIT_FAILURE)
                continue
            place.child = child
            self._selector.register(child.lifeline, selectors.EVENT_READ, child)
            logger.info("process %d started", child.pid)

    def _wait(self) -> None:
        """Wait until a process says something or ends, a signal comes, or it is time for a step."""
        moments = [place.start_at for place in self._startable()]
        if self._kill_at is not None:
            moments.append(self._kill_at)
        timeout = max(0.0, min(moments) - time.monotonic()) if moments else None
        for key, _ in self._selector.select(timeout):
            if isinstance(key.data, Child):
                if not key.data.listen():
                    self._selector.unregister(key.fileobj)
                self._served = self._served or key.data.has_served
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.recv(4096)

    def _reap(self) -> None:
        """Take note of every process that has ended.

        As the first process of a container, also of those that others have left behind.
        """
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for place in self._places:
                if place.child is not None and place.child.pid == pid:
                    self._ended(place, place.child, os.waitstatus_to_exitcode(status))

    def _ended(self, place: _Place, child: Child, code: int) -> None:
        if child.lifeline in self._selector.get_map():
            self._selector.unregister(child.lifeline)
        child.ended(code)
        place.child = None
        self._served = self._served or child.has_served
        what = f"process {child.pid} {how_it_ended(code)}"
        if self._stops or self._code is not None:
            logger.log(logging.WARNING if code < 0 else logging.INFO, "%s", what)
            self._note(code)
        elif code == EXIT_RECYCLED and child.has_served:
            logger.info("process %d has done enough: another one starts", child.pid)
            place.start_at = child.started_at + RECYCLED_APART_SECONDS
            place.deaths = 0
        else:
            if time.monotonic() - child.started_at >= self._settled:
                place.deaths = 0
            # Whoever stopped this one alone wants another one.
            if code in (EXIT_OK, EXIT_HANDED_BACK):
                self._replace_later(place, what)
            elif not child.has_served:
                # Nobody else's 4 means that a worker has done enough.
                failed = EXIT_FAILURE if code == EXIT_RECYCLED else code
                self._replace_later(place, f"{what} before it served", failed_start=failed)
            elif code == EXIT_USAGE:
                # Such as a limit of memory that it exceeds without a job, seen when it is idle.
                self._replace_later(place, what, failed_start=code)
            else:
                self._replace_later(place, what)

    def _replace_later(self, place: _Place, what: str, *, failed_start: int | None = None) -> None:
        """Try again after a back-off; give up after a failed start, if no other process serves."""
        others = self._children()
        if failed_start is not None and not any(child.has_served for child in others):
            logger.error("%s, and no other one serves: the supervisor ends", what)
            self._note(failed_start)
            for child in others:
                child.drain()
            self._kill_after(self._longest_grace(others) + LAST_SECONDS)
            return
        place.deaths += 1
        delay = _backoff(place.deaths)
        place.start_at = time.monotonic() + delay
        logger.warning("%s; another one starts in %.1f s", what, delay)

    def _note(self, code: int) -> None:
        """End with this code, unless there is a worse one."""
        if code == EXIT_RECYCLED:
            code = EXIT_OK
        elif code not in _BY_SEVERITY:
            code = EXIT_FAILURE
        self._code = max(self._code or EXIT_OK, code, key=_BY_SEVERITY.index)

    # --- signals --------------------------------------------------------------------------------

    def _pass_on_stops(self) -> None:
        while self._passed_on < min(self._stops, 2):
            self._passed_on += 1
            children = self._children()
            self._code = self._code or EXIT_OK
            if self._passed_on == 1:
                logger.info("stopping: %d processes are told to drain", len(children))
                for child in children:
                    child.drain()
                self._kill_after(self._longest_grace(children) + LAST_SECONDS)
            else:
                logger.info("%d processes are told to end at once", len(children))
                for child in children:
                    child.end_at_once()
                self._kill_after(LAST_SECONDS)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            for child in self._children():
                logger.warning("process %d does not end, and is killed", child.pid)
                child.kill()

    def _longest_grace(self, children: list[Child]) -> float:
        """Return how many seconds these processes may drain, as far as known by their own word."""
        given = [self._grace if child.grace is None else child.grace for child in children]
        return max(given, default=self._grace)

    def _kill_after(self, seconds: float) -> None:
        """Kill what has not ended by then: it is frozen, or holds the interpreter."""
        moment = time.monotonic() + seconds
        self._kill_at = moment if self._kill_at is None else min(self._kill_at, moment)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stops += 1

    @contextmanager
    def _woken_by_signals(self) -> Iterator[None]:
        """Let signals end a wait; those that ask to stop are counted, from now on and for good."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            self._selector.register(ours, selectors.EVENT_READ)
            signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            for number in STOP_SIGNALS:
                signal.signal(number, self._stop)
            signal.signal(signal.SIGCHLD, _notice)
            try:
                yield
            finally:
                signal.set_wakeup_fd(-1)


def _notice(number: int, frame: FrameType | None) -> None:
    """Do nothing: that there is a handler ends the wait."""
