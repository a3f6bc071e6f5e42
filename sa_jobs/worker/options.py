"""What a worker's options may be, said before anything is started."""

from __future__ import annotations

from collections.abc import Sequence

from sa_jobs.errors import WorkerError, WorkerOptionError
from sa_jobs.handlers import Jobs
from sa_jobs.limits import check_name

LONGEST_SECONDS = 86_400.0


def check_registry(jobs: Jobs) -> None:
    """Raise WorkerError unless there is a handler to run."""
    if not isinstance(jobs, Jobs):
        raise WorkerError(f"a worker needs a Jobs registry, not {type(jobs).__name__}")
    if not len(jobs):
        raise WorkerError(
            "the registry has no handlers: import the modules that register them before the "
            "worker starts"
        )


def check_queues(queues: Sequence[str] | None, jobs: Jobs) -> list[str]:
    """Return the queues to serve, each once; by default those of the handlers."""
    if queues is None:
        return list(dict.fromkeys(handler.queue for handler in jobs))
    if isinstance(queues, str) or not queues:
        raise WorkerOptionError(f"queues must be a list of at least one queue name, not {queues!r}")
    return list(dict.fromkeys(check_name("queue", queue) for queue in queues))


def check_count(name: str, number: int, *, least: int) -> int:
    """Return a whole number that is not below `least`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise WorkerOptionError(f"{name} must be a whole number from {least}, not {number!r}")
    return number


def check_most(name: str, number: int | None) -> int | None:
    """Return a limit, which is a whole number from 1, or None for none."""
    return None if number is None else check_count(name, number, least=1)


def check_period(name: str, seconds: float, *, may_be_zero: bool = False) -> float:
    """Return a number of seconds of at most a day."""
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not 0 <= seconds <= LONGEST_SECONDS
        or (seconds == 0 and not may_be_zero)
    ):
        least = "at least 0" if may_be_zero else "more than 0"
        raise WorkerOptionError(
            f"{name} must be {least} and at most {LONGEST_SECONDS:g} seconds, not {seconds!r}"
        )
    return float(seconds)


def check_lease(lease: float, heartbeat: float) -> None:
    """Raise WorkerOptionError if one late heartbeat would lose a lease."""
    if heartbeat > lease / 3:
        raise WorkerOptionError(
            f"heartbeat ({heartbeat:g} s) must be at most a third of lease ({lease:g} s), so that "
            "one missed beat does not lose a job"
        )
