"""The log lines about jobs: the same fields in each, and never a payload."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence

from sa_jobs.claims import Reclaimed
from sa_jobs.context import log_fields
from sa_jobs.outcome import Failed, Finished, Outcome, Released, Snoozed
from sa_jobs.worker.running import Running

logger = logging.getLogger("sa_jobs.worker")

_LONGEST_ERROR = 200
# Of more jobs the table of failures tells, without a flood of lines.
_MOST_RECLAIMED_LINES = 20
# SQLAlchemy ends its messages with a link.
_BACKGROUND = "(Background on this error at"


def log_outcome(running: Running, outcome: Outcome) -> None:
    """Log how an attempt ended: a failure as a warning, everything else as information."""
    level = logging.WARNING if isinstance(outcome, Failed) else logging.INFO
    if not logger.isEnabledFor(level):
        return
    if isinstance(outcome, Finished):
        end = "done"
    elif isinstance(outcome, Snoozed):
        end = f"snoozed for {outcome.delay:.3g} s"
    elif isinstance(outcome, Released):
        end = "handed back"
    elif outcome.final:
        end = f"dead: {_last_line(outcome.error)}"
    else:
        end = f"failed, again in {outcome.delay:.3g} s: {_last_line(outcome.error)}"
    seconds = 0.0 if running.started_at is None else time.monotonic() - running.started_at
    _log(level, running, f"{end} ({seconds:.3f} s)")


def log_ended_before(running: Running, status: str) -> None:
    """Log that a claim had been ended already, by its handler or a write whose answer was lost."""
    _log(logging.INFO, running, f"is {status}: that was written before")


def log_overdue(running: Running) -> None:
    """Log that a lease ran out before a heartbeat could be confirmed."""
    _log(logging.WARNING, running, "could not renew its lease in time; its handler is told to stop")


def log_lost(running: Running) -> None:
    """Log that a claim is no longer this worker's."""
    _log(logging.WARNING, running, "lost its lease; nothing is written for it")


def log_reclaimed(taken: Sequence[Reclaimed]) -> None:
    """Log what a sweep took back: the counts, and a line for each job unless they are many."""
    counts = Counter(job.status for job in taken)
    logger.warning(
        "the leases of %d jobs ran out: %s now",
        len(taken),
        ", ".join(f"{number} {status}" for status, number in sorted(counts.items())),
    )
    for job in taken if len(taken) <= _MOST_RECLAIMED_LINES else ():
        _log_reclaimed_one(job)


def _log_reclaimed_one(job: Reclaimed) -> None:
    logger.warning(
        "job %s %s (queue %s, attempt %s) lost its worker %s, and is %s now",
        job.id,
        job.handler,
        job.queue,
        job.attempt,
        job.worker,
        job.status,
        extra={
            "job_id": job.id,
            "job_handler": job.handler,
            "job_queue": job.queue,
            "job_attempt": job.attempt,
        },
    )


def _log(level: int, running: Running, what: str) -> None:
    job = running.job
    logger.log(
        level,
        "job %s %s (queue %s, attempt %s) %s",
        job.id,
        job.handler,
        job.queue,
        job.attempts,
        what,
        extra=log_fields(job),
    )


def _last_line(error: str) -> str:
    lines = [line for line in error.strip().splitlines() if not line.startswith(_BACKGROUND)]
    if lines and lines[-1].startswith("[") and lines[-1].endswith("]"):
        # The statement, which SQLAlchemy puts after what the database said of it.
        start = max((n for n, line in enumerate(lines) if line.startswith("[SQL: ")), default=0)
        lines = lines[:start] or lines
    return lines[-1][:_LONGEST_ERROR] if lines else ""
