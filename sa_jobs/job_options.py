"""What a job can be given: the options and payload of each, checked before any SQL is sent."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Literal, get_args

import msgspec

from sa_jobs import jsontext, limits
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.meta import Meta, meta_text

DEFAULT_QUEUE = "default"
DEFAULT_MAX_ATTEMPTS = 20

OnConflict = Literal["existing", "replace", "raise"]
HandlerName = str | Callable[..., Any]
Delay = float | dt.timedelta
Payload = Mapping[str, Any]

# Parameters of an insert, by the names of `statements.ENQUEUE_PARAMETERS`; one left out is NULL, or
# for the time now.
Values = dict[str, Any]

# By how many seconds a test has let time pass for those who enqueue: the database's now() stands
# still in its transaction.
seconds_ahead: ContextVar[float] = ContextVar("sa_jobs_seconds_ahead", default=0.0)

_CHOICES = get_args(OnConflict)


class Row(msgspec.Struct, frozen=True):
    """One job for `enqueue_many`: its payload, and the options that differ from the call's."""

    payload: Payload | None = None
    queue: str | None = None
    priority: int | None = None
    run_at: dt.datetime | None = None
    delay: Delay | None = None
    max_attempts: int | None = None
    tenant: str | None = None
    idempotency_key: str | None = None
    unique_key: str | None = None


def check_options(
    handler: HandlerName,
    *,
    queue: str,
    priority: int,
    run_at: dt.datetime | None,
    delay: Delay | None,
    max_attempts: int,
    tenant: str | None,
    idempotency_key: str | None = None,
    unique_key: str | None = None,
    meta: Meta | None = None,
) -> Values:
    """Return the parameters of an insert, but for the payload, or raise the error of one."""
    values = {
        "queue": limits.check_name("queue", queue),
        "handler": handler_name(handler),
        "priority": limits.check_priority(priority),
        "max_attempts": limits.check_max_attempts(max_attempts),
    }
    if tenant is not None:
        values["tenant"] = limits.check_name("tenant", tenant)
    if idempotency_key is not None:
        values["idempotency_key"] = limits.check_key("idempotency_key", idempotency_key)
    if unique_key is not None:
        values["unique_key"] = limits.check_key("unique_key", unique_key)
    if meta is not None:
        values["meta"] = meta_text(meta)
    if run_at is not None or delay is not None or seconds_ahead.get():
        values |= check_due(run_at, delay)
    return values


def check_rows(elements: Iterable[Payload | Row | None], max_payload_bytes: int) -> list[Values]:
    """Return for each job of a call the parameters in which it differs from the others.

    An error names the job by its position.
    """
    rows: list[Values] = []
    for position, element in enumerate(elements):
        row = element if isinstance(element, Row) else None
        payload = element if row is None else row.payload
        text = jsontext.plain_text(payload, max_payload_bytes) if type(payload) is dict else None
        if text is None:
            text = payload_text(payload, f"row {position}: payload", max_payload_bytes)
        values = {"payload": text}
        rows.append(values if row is None else _with_own_options(values, row, position))
    return rows


def check_on_conflict(value: Any) -> OnConflict:
    """Return what is to happen where a key is taken, or raise InvalidJobError."""
    if value not in _CHOICES:
        raise InvalidJobError(f"on_conflict must be one of {', '.join(_CHOICES)}, not {value!r}")
    choice: OnConflict = value
    return choice


def check_due(run_at: dt.datetime | None, delay: Delay | None) -> Values:
    """Return `run_at` and `delay` as parameters, of which one may be given."""
    if run_at is not None and delay is not None:
        raise InvalidJobError("give run_at= or delay=, not both")
    return {
        "run_at": None if run_at is None else limits.check_run_at(run_at),
        "delay": seconds_ahead.get()
        + (0.0 if delay is None else limits.check_seconds("delay", delay)),
    }


def handler_name(handler: HandlerName) -> str:
    """Return the registered name of a handler that is given as a name or as the function."""
    if isinstance(handler, str):
        return limits.check_name("handler", handler)
    name = getattr(handler, "sa_jobs_handler", None)
    if not isinstance(name, str):
        raise InvalidJobTypeError(
            f"handler must be a name or a registered function, not {handler!r}: "
            "register it with @jobs.handler(...)"
        )
    return name


def payload_text(payload: Any, what: str, max_bytes: int) -> str:
    """Return a payload as JSON text, or raise the error that names what is wrong with it."""
    if payload is None:
        return "{}"
    if type(payload) is not dict:
        if not isinstance(payload, Mapping):
            raise InvalidJobTypeError(
                f"{what} must be a dict of the handler's arguments, not {type(payload).__name__}"
            )
        payload = dict(payload)
    return jsontext.dumps(payload, what=what, max_bytes=max_bytes)


def _with_own_options(values: Values, row: Row, position: int) -> Values:
    try:
        if row.queue is not None:
            values["queue"] = limits.check_name("queue", row.queue)
        if row.priority is not None:
            values["priority"] = limits.check_priority(row.priority)
        if row.max_attempts is not None:
            values["max_attempts"] = limits.check_max_attempts(row.max_attempts)
        if row.tenant is not None:
            values["tenant"] = limits.check_name("tenant", row.tenant)
        if row.idempotency_key is not None:
            values["idempotency_key"] = limits.check_key("idempotency_key", row.idempotency_key)
        if row.unique_key is not None:
            values["unique_key"] = limits.check_key("unique_key", row.unique_key)
        if row.run_at is not None or row.delay is not None:
            # Both, so that neither is left to the call's.
            values |= check_due(row.run_at, row.delay)
    except (InvalidJobError, InvalidJobTypeError) as error:
        raise type(error)(f"row {position}: {error}") from None
    return values
