"""Pure: what a handler did, and the job's policy -> what to write.

A handler ends by returning a JSON value, by raising any exception, or by raising one of the three
that say what should follow: Retry, Snooze, Discard.
"""

from __future__ import annotations

import datetime as dt
import logging
from dataclasses import dataclass
from typing import Any

from sa_jobs import jsontext, limits
from sa_jobs.backoff import Backoff, delay_after
from sa_jobs.context import ClaimedJob, log_fields
from sa_jobs.error_text import error_text, message_text, storable
from sa_jobs.errors import SaJobsError

logger = logging.getLogger("sa_jobs.job")


class Retry(SaJobsError):
    """Raise from a handler to fail this attempt and try again after `delay` seconds or a timedelta.

    The delay is taken as it is, neither jittered nor shortened. The attempt counts; on the last
    one the job becomes dead.
    """

    def __init__(self, delay: float | dt.timedelta, reason: str | None = None) -> None:
        self.delay = limits.check_seconds("the delay of Retry", delay)
        super().__init__(reason or f"retry in {self.delay:g} s")


class Snooze(SaJobsError):
    """Raise from a handler to run the job again after `delay` seconds, at no cost of an attempt."""

    def __init__(self, delay: float | dt.timedelta) -> None:
        self.delay = limits.check_seconds("the delay of Snooze", delay)
        super().__init__(f"snooze for {self.delay:g} s")


class Discard(SaJobsError):
    """Raise from a handler to end the job as dead at once, whatever attempts it has left."""

    def __init__(self, reason: str = "discarded by its handler") -> None:
        super().__init__(reason)


@dataclass(frozen=True, slots=True)
class Finished:
    """The job is done; `result` is JSON text or None."""

    result: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The attempt failed: dead if `final`, else ready again after `delay` seconds."""

    error: str
    delay: float = 0.0
    final: bool = False


@dataclass(frozen=True, slots=True)
class Snoozed:
    """The job goes back for `delay` seconds, at no cost of an attempt."""

    delay: float


@dataclass(frozen=True, slots=True)
class Released:
    """The job goes back at once, at no cost of an attempt."""


Outcome = Finished | Failed | Snoozed | Released

_NO_RESULT = Finished()


def returned(job: ClaimedJob, value: Any) -> Finished:
    """Return the outcome of a handler that returned `value`; never raises.

    The work is done, so a result that cannot be stored is left out with a warning, rather than
    doing the work again.
    """
    if value is None:
        return _NO_RESULT
    try:
        return Finished(jsontext.dumps(value, what="result"))
    except BaseException as error:
        # As text: a log record that is kept would keep the value with the traceback's frames.
        logger.warning(
            "job %s %s: result left out: %s",
            job.id,
            job.handler,
            message_text(error),
            extra=log_fields(job),
        )
        return Finished()


def raised(job: ClaimedJob, error: BaseException, backoff: Backoff) -> Failed | Snoozed:
    """Return the outcome of a handler that raised `error`; never raises.

    One of ours whose delay was lost, as by a subclass that does not call its parent, is a failed
    attempt like any other.
    """
    # By type: isinstance() would also ask the exception, which may lie, or raise.
    kind = type(error)
    if issubclass(kind, Discard):
        return Failed(storable(f"discarded: {message_text(error)}"), final=True)
    if issubclass(kind, (Retry, Snooze)):
        try:
            delay = limits.check_seconds("the delay", error.delay)  # type: ignore[attr-defined]
        except Exception:
            return failed(job, error_text(error), backoff)
        if issubclass(kind, Snooze):
            return Snoozed(delay)
        return Failed(message_text(error), delay, final=job.final_attempt)
    return failed(job, error_text(error), backoff)


def failed(job: ClaimedJob, text: str, backoff: Backoff) -> Failed:
    """Return the outcome of an attempt that failed for the reason `text`."""
    if job.final_attempt:
        return Failed(text, final=True)
    return Failed(text, delay_after(backoff, job.attempts))
