"""The worker's side of its supervision: a socket that tells each of the end of the other.

A terminal and systemd send a signal to every process, and the supervisor passes it on: a supervised
worker drains on any number of signals, and ends at once on its supervisor's word alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable

from sa_jobs.errors import WorkerError
from sa_jobs.worker import Worker
from sa_jobs.worker.interruptions import STOP_SIGNALS

logger = logging.getLogger("sa_jobs.supervisor")

VARIABLE = "SA_JOBS_LIFELINE"

# What is said: by the worker how many seconds it may drain, as b"g30\n", and that it serves; by the
# supervisor that it must end at once.
GRACE = b"g"
SERVES = b"s"
AT_ONCE = b"!"


class Lifeline:
    """The worker's end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._at_once: Callable[[], None] = _stop_by_signal

    @classmethod
    def inherited(cls) -> Lifeline | None:
        """Return the lifeline that the supervisor has given this process, None without one.

        Programs that handlers start do not get it. Raises WorkerError if it is lost: to supervise
        in its place would multiply the processes.
        """
        number = os.environ.pop(VARIABLE, None)
        if number is None:
            return None
        try:
            end = socket.socket(fileno=int(number))
        except (ValueError, OSError):
            raise WorkerError(
                f"{VARIABLE} is {number!r}, which is no socket to a supervisor: unset it, or start "
                "the command without what closes the files that it inherits"
            ) from None
        end.set_inheritable(False)
        return cls(end)

    def watch(self) -> None:
        """Begin to listen to the supervisor, and let signals come, which must have handlers now."""
        # The thread keeps them blocked: one that it took in the main thread's place would not end
        # what that waits for.
        threading.Thread(target=self._listen, name="sa-jobs-lifeline", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def drains_within(self, grace: float) -> None:
        """Tell the supervisor how many seconds the worker's first stop waits for handlers."""
        self._say(GRACE + f"{grace:g}\n".encode())

    def serves(self) -> None:
        """Tell the supervisor that the worker serves."""
        self._say(SERVES)

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(what)

    def when_told_to_end(self, act: Callable[[], None]) -> None:
        """Call this, on a thread of its own, if the supervisor says that the end must be at once.

        Until then, the process is told by a signal.
        """
        self._at_once = act

    def _listen(self) -> None:
        with contextlib.suppress(OSError):
            while said := self._socket.recv(1):
                if said == AT_ONCE:
                    self._at_once()
        logger.warning("the supervisor is gone: the worker drains")
        _stop_by_signal()


class Supervised:
    """A worker as its supervisor's signals and words stop it."""

    def __init__(self, worker: Worker, lifeline: Lifeline) -> None:
        self._worker = worker
        self._first = threading.Lock()
        # The application's settings may say another one than the command line did.
        lifeline.drains_within(worker.grace)
        lifeline.when_told_to_end(self._end_at_once)

    @property
    def grace(self) -> float:
        """How many seconds the worker's first stop waits for handlers."""
        return self._worker.grace

    @property
    def stops(self) -> int:
        """How often the worker was asked to stop."""
        return self._worker.stops

    def run(self) -> int:
        """Run the worker, and return its exit code."""
        return self._worker.run()

    def stop(self) -> None:
        """Ask the worker to drain; asking again changes nothing."""
        # Taken once and never let go, so that a signal within a signal finds it taken.
        if self._first.acquire(blocking=False):
            self._worker.stop()

    def _end_at_once(self) -> None:
        self.stop()
        self._worker.stop()


def _stop_by_signal() -> None:
    # To the main thread, so that it leaves a system call; handlers run on no other.
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGTERM)
