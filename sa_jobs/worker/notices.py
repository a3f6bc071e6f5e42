"""Hooks of what ends without its handler's word, and of deaths, called on a thread for that."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from sa_jobs import deaths
from sa_jobs.claims import Reclaimed
from sa_jobs.context import JobContext
from sa_jobs.errors import AttemptLostError, AttemptTimeoutError, WorkerError
from sa_jobs.models import Tables
from sa_jobs.outcome import Failed, Outcome
from sa_jobs.worker.healing import HealingThread
from sa_jobs.worker.hook_calls import HookCalls
from sa_jobs.worker.links import Link
from sa_jobs.worker.running import Mailbox, Running
from sa_jobs.worker.surroundings import Around, Surroundings

logger = logging.getLogger("sa_jobs.worker")

# How long the worker's end waits for the calls that are left.
LAST_CALLS_SECONDS = 10.0
# Each keeps a payload and perhaps an exception.
MOST_WAITING = 10_000
_LONGEST_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class _Notice:
    """A job whose attempt has failed. `context` is absent for another worker's."""

    job_id: int
    error: BaseException | None
    context: JobContext | None
    failure: bool
    death: bool


class Notices(HealingThread):
    """Calls hooks of `on_failure` that no handler's thread has called, and those of `on_dead`.

    That a job is dead is read from its row: it may have been cancelled instead. Between two calls
    the thread holds no connection. Calls that are left at the end get LAST_CALLS_SECONDS.
    """

    def __init__(
        self,
        link: Link,
        mailbox: Mailbox,
        hooks: HookCalls,
        around: Around | None,
        *,
        tables: Tables,
    ) -> None:
        super().__init__("hooks", link, mailbox, longest_wait=_LONGEST_WAIT_SECONDS)
        self._hooks = hooks
        self._around = around
        self._tables = tables
        # None is the last one.
        self._waiting: SimpleQueue[_Notice | None] = SimpleQueue()
        self._held: _Notice | None = None
        self._overflowed = False

    def written(self, running: Running, outcome: Outcome) -> None:
        """Note an outcome that was written; returns at once."""
        if not isinstance(outcome, Failed) or not self.is_alive():
            return
        # A job that was to be cancelled has not failed, whatever ended it.
        failure = (
            self._hooks.of_failures and running.error is None and running.stop_reason != "cancel"
        )
        death = self._hooks.of_deaths and outcome.final
        if failure or death:
            error = running.error
            if error is None and running.stop_reason == "timeout":
                error = AttemptTimeoutError(outcome.error)
            elif error is None:
                error = AttemptLostError(outcome.error)
            self._put(_Notice(running.job.id, error, running.context, failure, death))

    def reclaimed(self, taken: Sequence[Reclaimed]) -> None:
        """Note jobs whose leases ran out; returns at once."""
        if self._hooks.of_deaths and self.is_alive():
            for job in taken:
                if job.status == "dead":
                    self._put(_Notice(job.id, None, None, failure=False, death=True))

    def finish(self, seconds: float) -> None:
        """Call what is left, for so long, and end."""
        if self.ident is None:
            return
        self._waiting.put(None)
        self.join(seconds)
        if self.is_alive():
            logger.warning(
                "hooks of on_failure and on_dead have not ended within %g s: %d calls are left out",
                seconds,
                max(0, self._waiting.qsize() - 1),
            )
        self.end()

    def step(self) -> float:
        """Call the hooks of each notice as it comes."""
        while True:
            if self._held is None:
                if self._waiting.empty():
                    self._link.drop()
                self._held = self._waiting.get()
            if self._held is None:
                self._ended.set()
                return 0.0
            self._tell(self._held)
            self._held = None

    def gave_up(self, error: WorkerError) -> None:
        """Say that no hook is called any more: the jobs themselves need none."""
        logger.error("hooks of on_failure and on_dead are called no more: %s", error)

    def _put(self, notice: _Notice) -> None:
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(notice)
        elif not self._overflowed:
            self._overflowed = True
            logger.error(
                "%d calls of on_failure and on_dead hooks wait for one that goes on and on: "
                "what more comes is left out",
                MOST_WAITING,
            )

    def _tell(self, notice: _Notice) -> None:
        context, error = notice.context, notice.error
        died = None
        if notice.death:
            connection = self._link.connection()
            died = deaths.dead_with(connection, notice.job_id, tables=self._tables)
        if died is not None:
            context = context or JobContext(died.job)
            error = error or AttemptLostError(died.error)
        if context is not None and error is not None:
            contextvars.copy_context().run(
                self._call, context, error, failure=notice.failure, death=died is not None
            )

    def _call(
        self, context: JobContext, error: BaseException, *, failure: bool, death: bool
    ) -> None:
        # What cannot be entered, and perhaps was why the attempt failed, hides no failure.
        with contextlib.ExitStack() as stack:
            if self._around is not None:
                with contextlib.suppress(Exception):
                    stack.enter_context(Surroundings(self._around, context.job))
            if failure:
                self._hooks.failed(context, error)
            if death:
                self._hooks.dead(context, error)
