"""Pure: which jobs a test means, and by what another job misses that."""

from __future__ import annotations

import contextlib
import datetime as dt
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sa_jobs import limits
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.job_options import Delay, HandlerName, handler_name
from sa_jobs.models import STATES
from sa_jobs.signatures import read_signature
from sa_jobs.testing.rows import EnqueuedJob

Times = dt.datetime | tuple[dt.datetime | None, dt.datetime | None]
Delays = Delay | tuple[Delay | None, Delay | None]

# A time given exactly may miss by this: SQLite keeps the time of a job's creation in seconds.
EXACT = dt.timedelta(seconds=1)

_SHOWN_JOBS = 10
_WIDE = reprlib.Repr()
_WIDE.maxdict = _WIDE.maxlist = 20
_WIDE.maxstring = _WIDE.maxother = 200


@dataclass(frozen=True)
class Expectation:
    """The jobs that a test means: what is None is not looked at."""

    handler: str | None
    payload: Mapping[str, Any] | None
    status: str | None
    same: dict[str, Any]
    run_at: tuple[dt.datetime | None, dt.datetime | None] | None
    delay: tuple[dt.timedelta | None, dt.timedelta | None] | None

    def misses(self, job: EnqueuedJob) -> list[str]:
        """Return by what a job misses the expectation, each as a line; none if it meets it."""
        lines = []
        wanted = {"handler": self.handler, "status": self.status, **self.same}
        for name, value in wanted.items():
            found = getattr(job, name)
            if value is not None and found != value:
                lines.append(f"{name} is {found!r}, not {value!r}")
        if self.payload is not None:
            lines += _payload_misses("payload", self.payload, job.payload)
        for name, bounds, found in (
            ("run_at", self.run_at, job.run_at),
            ("delay", self.delay, job.delay),
        ):
            if bounds is not None and not _is_between(found, bounds):
                lines.append(f"{name} is {found}, not {_bounds_text(bounds)}")
        return lines

    def distance(self, job: EnqueuedJob) -> int:
        """Return how far a job is from what is expected; another handler outweighs all else."""
        far = 100 if self.handler is not None and job.handler != self.handler else 0
        return far + len(self.misses(job))

    def __str__(self) -> str:
        parts = [] if self.status is None else [self.status]
        parts.append("a job" if self.handler is None else f"a job of handler {self.handler!r}")
        parts += [f"with {name}={value!r}" for name, value in self.same.items()]
        if self.payload is not None:
            parts.append(f"with {shown(self.payload)} in its payload")
        for name, bounds in (("run_at", self.run_at), ("delay", self.delay)):
            if bounds is not None:
                parts.append(f"with {name} {_bounds_text(bounds)}")
        return ", ".join(parts)


def expectation(
    handler: HandlerName | None,
    payload: Mapping[str, Any] | None,
    *,
    status: str | None,
    run_at: Times | None,
    delay: Delays | None,
    **same: Any,
) -> Expectation:
    """Return what a test's arguments say, or raise an error if no job could ever meet it."""
    name = None if handler is None else handler_name(handler)
    if payload is not None and not isinstance(payload, Mapping):
        raise InvalidJobTypeError(
            f"the part of a payload must be a dict, not {type(payload).__name__}"
        )
    if payload and callable(handler):
        payload = _as_stored(handler, str(name), payload)
    if status is not None and status not in STATES:
        raise InvalidJobError(
            f"status must be one of {', '.join(STATES)}, or None for any, not {status!r}"
        )
    return Expectation(
        handler=name,
        payload=payload,
        status=status,
        same={key: value for key, value in same.items() if value is not None},
        run_at=None if run_at is None else _between(run_at, limits.check_run_at),
        delay=None if delay is None else _between(delay, _duration),
    )


def listing(jobs: Sequence[EnqueuedJob], expected: Expectation | None = None) -> list[str]:
    """Return jobs as lines of text, with what each misses."""
    lines = []
    for job in jobs[:_SHOWN_JOBS]:
        lines.append(f"  {described(job)}")
        if expected is not None:
            lines += [f"      {miss}" for miss in expected.misses(job)]
    if len(jobs) > _SHOWN_JOBS:
        lines.append(f"  ... and {len(jobs) - _SHOWN_JOBS} more")
    return lines


def described(job: EnqueuedJob) -> str:
    """Return a job in a line: its payload is shown, since this is a test."""
    parts = [f"job {job.id} {job.handler!r}", job.status, f"queue={job.queue!r}"]
    for name in ("priority", "tenant", "idempotency_key", "unique_key"):
        value = getattr(job, name)
        if value not in (None, 0):
            parts.append(f"{name}={value!r}")
    if job.delay > EXACT:
        parts.append(f"delay={job.delay}")
    return f"{', '.join(parts)}: {shown(job.payload)}"


def shown(value: Any) -> str:
    """Return a value's text, cut where it is very long."""
    text = repr(value)
    return text if len(text) <= 500 else _WIDE.repr(value)


def _as_stored(
    handler: Callable[..., Any], name: str, payload: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a part of a payload with typed values as the JSON that stands for them."""
    signature = read_signature(handler, name)
    known = signature.required | signature.optional
    unknown = sorted(map(repr, payload.keys() - known))
    if unknown and not signature.any_key:
        raise InvalidJobError(
            f"no job of handler {name!r} can have {', '.join(unknown)} in its payload: the "
            f"handler's parameters are {', '.join(sorted(known)) or '(none)'}"
        )
    part = dict(payload)
    if signature.types is not None:
        for key, value in payload.items():
            # What is no value of the parameter's type is compared as it is: a part of an object,
            # or what compares in its own way.
            with contextlib.suppress(InvalidJobError, InvalidJobTypeError):
                part |= signature.types.encode({key: value})
    return part


def _payload_misses(path: str, part: Any, found: Any) -> list[str]:
    if isinstance(part, Mapping) and isinstance(found, Mapping):
        lines = []
        for key, value in part.items():
            at = f"{path}[{key!r}]"
            if key not in found:
                lines.append(f"{at} is not there, and should be {shown(value)}")
            else:
                lines += _payload_misses(at, value, found[key])
        return lines
    # The part first: it may be an object that compares in its own way, as unittest.mock.ANY does.
    is_number = isinstance(part, (int, float))
    if part == found and not (is_number and isinstance(part, bool) is not isinstance(found, bool)):
        return []
    return [f"{path} is {shown(found)}, not {shown(part)}"]


def _between(given: Any, check: Callable[[Any], Any]) -> tuple[Any, Any]:
    if isinstance(given, tuple):
        first, last = given
        return (
            None if first is None else check(first),
            None if last is None else check(last),
        )
    exact = check(given)
    return exact - EXACT, exact + EXACT


def _duration(value: Any) -> dt.timedelta:
    return dt.timedelta(seconds=limits.check_seconds("delay", value))


def _is_between(value: Any, bounds: tuple[Any, Any]) -> bool:
    first, last = bounds
    return (first is None or first <= value) and (last is None or value <= last)


def _bounds_text(bounds: tuple[Any, Any]) -> str:
    first, last = bounds
    if first is not None and last is not None and last - first == 2 * EXACT:
        return f"{first + EXACT}"
    if last is None:
        return f"from {first} on" if first is not None else "at any time"
    return f"until {last}" if first is None else f"from {first} to {last}"
