"""A part of the worker: a loop on a thread of its own, without which the worker cannot go on."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Sequence

from sa_jobs.errors import WorkerError
from sa_jobs.worker.running import GaveUp, Mailbox

JOIN_SECONDS = 1.0


class Part(threading.Thread):
    """Works until `end()`. If its thread dies of anything, the control loop is told."""

    def __init__(self, name: str, mailbox: Mailbox) -> None:
        super().__init__(name=f"sa-jobs-{name}", daemon=True)
        self._mailbox = mailbox
        self._ended = threading.Event()

    @abstractmethod
    def work(self) -> None:
        """Work until `self._ended` is set."""

    def run(self) -> None:
        """Work, and report what else ended it (the thread's own function)."""
        try:
            self.work()
        except BaseException as error:
            # A worker that goes on without its heartbeat or sweep looks alive and is not.
            failure = WorkerError(
                f"the thread {self.name} ended by {type(error).__name__}: the worker hands back "
                "its jobs and ends, to be started anew"
            )
            failure.__cause__ = error
            self._mailbox.put(GaveUp(failure))

    def ask_to_end(self) -> None:
        """Ask the thread to stop; returns at once."""
        self._ended.set()

    def cut(self) -> None:
        """End what the thread waits for, if it waits for a server; returns at once."""

    def end(self) -> None:
        """Stop, and wait a moment for the thread's end."""
        self.ask_to_end()
        if self.ident is not None:
            self.join(JOIN_SECONDS)


def end_all(parts: Sequence[Part]) -> None:
    """End parts together, so that the waits for them do not add up."""
    for part in parts:
        part.ask_to_end()
    deadline = time.monotonic() + JOIN_SECONDS
    for part in parts:
        if part.ident is not None:
            part.join(max(0.0, deadline - time.monotonic()))
    for part in parts:
        part.cut()
    for part in parts:
        part.end()
