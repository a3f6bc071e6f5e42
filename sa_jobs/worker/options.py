"""What a worker's options may be, said before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs.errors import WorkerError, WorkerOptionError
from sa_jobs.handlers import Jobs
from sa_jobs.limits import check_name

LONGEST_SECONDS = 86_400.0
# Between two looks at the database, and for an answer that crosses a network.
LEAST_PERIOD_SECONDS = 0.01
LEAST_ANSWER_SECONDS = 0.1
LEAST_LEASE_SECONDS = 1.0
# Far more than one process can do, and few enough to count them.
MOST_SLOTS = 100_000

F = TypeVar("F", bound=Callable[..., Any])


def check_registry(jobs: Jobs) -> None:
    """Raise WorkerError unless there is a handler to run."""
    if not isinstance(jobs, Jobs):
        raise WorkerError(f"a worker needs a Jobs registry, not {type(jobs).__name__}")
    if not len(jobs):
        raise WorkerError(
            "the registry has no handlers: import the modules that register them before the "
            "worker starts"
        )


def check_engine(name: str, engine: Any) -> Any:
    """Return an Engine or AsyncEngine."""
    if not isinstance(getattr(engine, "sync_engine", engine), Engine):
        # Never its value: a URL has a password.
        raise WorkerOptionError(
            f"{name} must be an Engine or AsyncEngine, not {type(engine).__name__}: make one with "
            "create_engine('postgresql+psycopg://...')"
        )
    return engine


def check_callable(name: str, function: F | None) -> F | None:
    """Return what can be called, or None for none."""
    if function is not None and not callable(function):
        raise WorkerOptionError(f"{name} must be callable, or None, not {function!r}")
    return function


def check_session_factory(factory: F | None) -> F | None:
    """Return a factory of Sessions, or None for none."""
    return _check_factory("session_factory", factory, "sessionmaker", asynchronous=False)


def check_async_session_factory(factory: F | None) -> F | None:
    """Return a factory of AsyncSessions, or None for none."""
    return _check_factory("async_session_factory", factory, "async_sessionmaker", asynchronous=True)


def _check_factory(name: str, factory: F | None, maker: str, *, asynchronous: bool) -> F | None:
    if factory is None:
        return None
    advice = f"pass {maker}(engine), or another factory of such sessions"
    if not callable(factory):
        # By its type: what is passed may be a session with the users' data.
        raise WorkerOptionError(
            f"{name} must be callable, and give each job a new session, not an object of "
            f"{type(factory).__name__}: {advice}"
        )
    made = _made_by(factory)
    if made is not None and issubclass(made, Session) is asynchronous:
        wanted = "AsyncSession" if asynchronous else "Session"
        raise WorkerOptionError(
            f"{name} must make objects of {wanted}, and this {type(factory).__name__} makes "
            f"{made.__name__}: {advice}"
        )
    return factory


def _made_by(factory: Any) -> type | None:
    """Return the kind of session that SQLAlchemy's factories make, None for any other factory."""
    maker = getattr(factory, "session_factory", factory)
    made = maker if isinstance(maker, type) else getattr(maker, "class_", None)
    # An AsyncSession is told by what it has: its module is not to be imported for that.
    if isinstance(made, type) and (
        issubclass(made, Session) or hasattr(made, "sync_session_class")
    ):
        return made
    return None


def check_queues(queues: Sequence[str] | None, jobs: Jobs) -> list[str]:
    """Return the queues to serve, each once; by default those of the handlers."""
    if queues is None:
        return list(dict.fromkeys(handler.queue for handler in jobs))
    if isinstance(queues, (str, bytes)) or not isinstance(queues, Iterable) or not queues:
        raise WorkerOptionError(f"queues must be a list of at least one queue name, not {queues!r}")
    return list(dict.fromkeys(check_name("queue", queue) for queue in queues))


def check_switch(name: str, value: bool) -> bool:
    """Return True or False."""
    if not isinstance(value, bool):
        raise WorkerOptionError(f"{name} must be True or False, not {value!r}")
    return value


def check_count(name: str, number: int, *, least: int) -> int:
    """Return a whole number that is not below `least`."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise WorkerOptionError(f"{name} must be a whole number from {least}, not {number!r}")
    return number


def check_slots(name: str, number: int, *, least: int) -> int:
    """Return a number of jobs that one process may hold."""
    if check_count(name, number, least=least) > MOST_SLOTS:
        raise WorkerOptionError(f"{name} must be at most {MOST_SLOTS}, not {number!r}")
    return number


def check_most(name: str, number: int | None) -> int | None:
    """Return a limit, which is a whole number from 1, or None for none."""
    return None if number is None else check_count(name, number, least=1)


def check_period(name: str, seconds: float, *, least: float = LEAST_PERIOD_SECONDS) -> float:
    """Return a number of seconds from `least` to a day."""
    if (
        isinstance(seconds, bool)
        or not isinstance(seconds, (int, float))
        or not least <= seconds <= LONGEST_SECONDS
    ):
        raise WorkerOptionError(
            f"{name} must be from {least:g} to {LONGEST_SECONDS:g} seconds, not {seconds!r}"
        )
    return float(seconds)


def check_lease(lease: float, heartbeat: float) -> None:
    """Raise WorkerOptionError if one late heartbeat would lose a lease."""
    if heartbeat > lease / 3:
        raise WorkerOptionError(
            f"heartbeat ({heartbeat:g} s) must be at most a third of lease ({lease:g} s), so that "
            "one missed beat does not lose a job"
        )
