"""A part with a connection of its own, which heals by itself after a database error."""

from __future__ import annotations

from abc import abstractmethod

from sa_jobs.errors import WorkerError
from sa_jobs.worker.links import Link
from sa_jobs.worker.parts import JOIN_SECONDS, Part
from sa_jobs.worker.recovery import Recovery
from sa_jobs.worker.running import GaveUp, Mailbox


class HealingThread(Part):
    """Calls `step()` again and again until `end()`, waiting as long as it says in between.

    After an error it tries again on a new connection, ever more rarely up to a cap. An error that
    trying again cannot cure goes to the control loop, unless the worker can do without the part.
    """

    def __init__(self, name: str, link: Link, mailbox: Mailbox, *, longest_wait: float) -> None:
        super().__init__(name, mailbox)
        self._link = link
        self._longest_wait = longest_wait
        self._recovery = Recovery(name)

    @abstractmethod
    def step(self) -> float:
        """Do the work once, and return the seconds to wait until the next time."""

    def works(self) -> None:
        """Note that the database answers."""
        self._recovery.succeeded()

    def ask_to_end(self) -> None:
        """Ask the thread to stop; returns at once."""
        super().ask_to_end()
        self._link.wake()

    def end(self) -> None:
        """Stop, and close the connection."""
        super().end()
        if self.is_alive():
            self.cut()
            self.join(JOIN_SECONDS)

    def cut(self) -> None:
        """End the wait for an answer: behind a lock, or from a server that is gone."""
        if self.is_alive():
            self._link.answers.cut()

    def gave_up(self, error: WorkerError) -> None:
        """Tell the control loop that there is no use in trying on."""
        self._mailbox.put(GaveUp(error))

    def work(self) -> None:
        """Loop until the end."""
        wait = 0.0
        try:
            while not self._ended.wait(wait):
                try:
                    wait = self.step()
                    self.works()
                except Exception as error:
                    fault = self._link.fault(error)
                    fatal = self._recovery.verdict(fault)
                    if fatal is not None:
                        self.gave_up(fatal)
                        return
                    wait = min(self._recovery.failed(fault), self._longest_wait)
        finally:
            self._link.close()
