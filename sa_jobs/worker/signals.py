"""Signals: the first asks the worker to drain, the second to end at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, Protocol

from sa_jobs.worker.interruptions import STOP_SIGNALS
from sa_jobs.worker.loop import EXIT_FAILURE

logger = logging.getLogger("sa_jobs.worker")

# How long the end may take once no handler is waited for any more. It takes a fraction of a second
# unless the machine is overloaded, a network silent, or a thread of a handler's will not end.
LAST_SECONDS = 5.0
EXIT_IN_A_HURRY_SECONDS = 0.5


class Stoppable(Protocol):
    """A worker, or what stands for one."""

    @property
    def grace(self) -> float:
        """How many seconds a first stop waits for handlers."""

    @property
    def stops(self) -> int:
        """How often it was asked to stop, as it counts."""

    def run(self) -> int:
        """Work until it is stopped, and return the exit code."""

    def stop(self) -> None:
        """Ask it to drain, then to end at once."""


def run_with_signals(worker: Stoppable) -> int:
    """Run the worker until it stops, and return its exit code.

    In the main thread, the first SIGTERM or SIGINT drains and the second ends at once; the handlers
    that were there before are put back at the end. In another thread signals are left alone, since
    they are the program's: there, `worker.stop()` is the way.
    """
    if threading.current_thread() is not threading.main_thread():
        return worker.run()
    with _stopped_by_signals(worker):
        return worker.run()


def run_to_the_end(worker: Stoppable) -> int:
    """Do the same for a process that is nothing but the worker, and ends in any case.

    It ends with the worker's exit code, or 1 if the worker did not end: `LAST_SECONDS` after the
    grace period or a second signal at the latest, though the network is silent, or threads that
    handlers have started run on. Signals are ignored once the worker has ended.
    """
    last_resort = LastResort(worker.grace)
    last_resort.start()
    code = EXIT_FAILURE
    try:
        with _stopped_by_signals(worker, last_resort):
            code = worker.run()
            return code
    finally:
        last_resort.worker_ended(worker.stops, code)


@contextmanager
def _stopped_by_signals(worker: Stoppable, last_resort: LastResort | None = None) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop()
        if last_resort is not None:
            last_resort.stopping(worker.stops)

    before: dict[int, Any] = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if last_resort is None else signal.SIG_IGN)


class LastResort(threading.Thread):
    """Ends the process where its orderly end takes too long.

    A thread of its own from the start, told by a queue: a signal handler may neither start a thread
    nor take a lock that the code it interrupts may hold.
    """

    def __init__(self, grace: float) -> None:
        super().__init__(name="sa-jobs-last-resort", daemon=True)
        self._grace = grace
        # How many stops there were, and the exit code once the worker has ended.
        self._told: SimpleQueue[tuple[int, int | None]] = SimpleQueue()

    def stopping(self, stops: int) -> None:
        """Note how often the worker was asked to stop."""
        self._told.put((stops, None))

    def worker_ended(self, stops: int, code: int) -> None:
        """Note that the worker has ended, and with which exit code the process should."""
        self._told.put((stops, code))

    def run(self) -> None:
        """Wait until it is time (the thread's own function)."""
        code, end = EXIT_FAILURE, float("inf")
        while (left := end - time.monotonic()) > 0:
            try:
                stops, ended = self._told.get(timeout=None if end == float("inf") else left)
            except Empty:
                break
            now = time.monotonic()
            if ended is None:
                # The second stop takes back the patience of the first; later ones change nothing.
                end = min(end, now + (self._grace if stops == 1 else 0.0) + LAST_SECONDS)
            else:
                code = ended
                # What is left to do is the interpreter's, and that of `atexit`.
                end = min(end, now + (EXIT_IN_A_HURRY_SECONDS if stops > 1 else LAST_SECONDS))
        logger.warning("something keeps the process from its end; it ends now, with code %d", code)
        os._exit(code)
