"""What an application puts around each job: a context manager, such as an application context."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from sa_jobs.context import ClaimedJob, log_fields
from sa_jobs.error_text import error_text, hide_data, message_text
from sa_jobs.errors import SaJobsError, WorkerError
from sa_jobs.outcome import Discard, Retry, Snooze

logger = logging.getLogger("sa_jobs.worker")

# What users' code may raise without harm to the caller: under a worker all, in a test not its end.
Failures = tuple[type[BaseException], ...]


class Around(Protocol):
    """Return a context manager for a job, which a worker enters around the whole attempt.

    It is entered where the handler runs, on its thread or in its task, before the handler's session
    is made, and left after that was closed. What it sets in context variables is there for the
    handler.
    """

    def __call__(self, job: ClaimedJob, /) -> AbstractContextManager[Any]:
        """Return the context manager for this job."""


class AroundError(SaJobsError):
    """What `Worker(around=)` gave for a job could not be entered: its handler was not called."""


class Surroundings:
    """Enters what `around` gives for a job, and leaves it without a word in the job's outcome."""

    __slots__ = ("_around", "_failures", "_job", "_manager")

    def __init__(
        self, around: Around, job: ClaimedJob, failures: Failures = (BaseException,)
    ) -> None:
        self._around = around
        self._job = job
        self._failures = failures

    def __enter__(self) -> None:
        try:
            manager: Any = self._around(self._job)
            if not isinstance(manager, AbstractContextManager):
                raise WorkerError(
                    f"it returned an object of {type(manager).__name__}, which is no context "
                    "manager: decorate a generator function with contextlib.contextmanager"
                )
            self._manager = manager
            manager.__enter__()
        except self._failures as error:
            # By type: isinstance() would also ask the exception, which may lie, or raise.
            if issubclass(type(error), (Discard, Retry, Snooze)):
                raise
            hide_data(error)
            raise AroundError(
                f"around(job) could not be entered, so that the handler was not called: "
                f"{message_text(error) or type(error).__name__}"
            ) from error

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The outcome may be committed already: neither an exception nor a true value changes it.
        try:
            self._manager.__exit__(kind, error, trace)
        except self._failures as failure:
            if failure is not error:
                logger.error(
                    "job %s %s: around(job) could not be left, which changes nothing for the job: "
                    "%s",
                    self._job.id,
                    self._job.handler,
                    error_text(failure),
                    extra=log_fields(self._job),
                )
