"""A loop on a thread and a connection of its own, which heals by itself after a database error."""

from __future__ import annotations

import threading
from abc import abstractmethod

from sa_jobs.worker.faults import Recovery, hopeless, is_transient
from sa_jobs.worker.links import Link
from sa_jobs.worker.running import GaveUp, Mailbox

_JOIN_SECONDS = 1.0


class HealingThread(threading.Thread):
    """Calls `step()` again and again until `end()`, waiting as long as it says in between.

    After a lost connection it tries again on a new one, ever more rarely up to a cap. An error that
    trying again cannot cure goes to the control loop.
    """

    def __init__(self, name: str, link: Link, mailbox: Mailbox, *, longest_wait: float) -> None:
        super().__init__(name=f"sa-jobs-{name}", daemon=True)
        self._link = link
        self._mailbox = mailbox
        self._longest_wait = longest_wait
        self._recovery = Recovery(name)
        self._ended = threading.Event()

    @abstractmethod
    def step(self) -> float:
        """Do the work once, and return the seconds to wait until the next time."""

    def works(self) -> None:
        """Note that the database answers."""
        self._recovery.succeeded()

    def end(self) -> None:
        """Stop, and close the connection."""
        self._ended.set()
        if self.ident is not None:
            self.join(_JOIN_SECONDS)

    def run(self) -> None:
        """Loop until the end (the thread's own function)."""
        wait = 0.0
        try:
            while not self._ended.wait(wait):
                try:
                    wait = self.step()
                    self.works()
                except Exception as error:
                    fatal = hopeless(error)
                    if fatal is not None:
                        self._mailbox.put(GaveUp(fatal))
                        return
                    if is_transient(error):
                        self._link.drop()
                    wait = min(self._recovery.failed(error), self._longest_wait)
        finally:
            self._link.close()
