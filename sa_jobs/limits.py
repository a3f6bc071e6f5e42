"""What the queue can hold, and the checks that say so before any SQL is sent."""

from __future__ import annotations

import datetime as dt
import re
from typing import Any

from sa_jobs.errors import InvalidJobError, InvalidJobTypeError

MAX_NAME_BYTES = 200
MAX_KEY_BYTES = 500
MAX_ERROR_BYTES = 16_000
MAX_PAYLOAD_BYTES = 1_000_000
MIN_PRIORITY, MAX_PRIORITY = -32_768, 32_767
MAX_ATTEMPTS = 2**63 - 1
MAX_ROWS = 2**62
# timestamptz ends in the year 294276, datetime in 9999; a delay must stay inside both.
MAX_DELAY_SECONDS = 100 * 365 * 86_400.0
_DAY = dt.timedelta(days=1)
# Those of the Unicode category Cc.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def check_name(what: str, value: Any, *, max_bytes: int = MAX_NAME_BYTES) -> str:
    """Return `value` if it can be a queue, a handler, a tenant or a worker id."""
    text = _check_text(what, value, max_bytes)
    if _CONTROL.search(text):
        raise InvalidJobError(f"{what} must not contain control characters: {text!r}")
    return text


def check_key(what: str, value: Any) -> str:
    """Return `value` if it can be an idempotency key or a unique key."""
    return _check_text(what, value, MAX_KEY_BYTES)


def check_priority(value: Any) -> int:
    """Return `value` if it fits the column (smallint); higher runs first."""
    number = _check_int("priority", value)
    if not MIN_PRIORITY <= number <= MAX_PRIORITY:
        raise InvalidJobError(
            f"priority must be from {MIN_PRIORITY} to {MAX_PRIORITY}, not {_shown(number)}"
        )
    return number


def check_max_attempts(value: Any) -> int:
    """Return `value` if it is at least 1 and fits the column (bigint)."""
    number = _check_int("max_attempts", value)
    if not 1 <= number <= MAX_ATTEMPTS:
        raise InvalidJobError(
            f"max_attempts must be from 1 to {MAX_ATTEMPTS}, not {_shown(number)}"
        )
    return number


def check_id(what: str, value: Any) -> int:
    """Return `value` if it can be a job's id (bigint)."""
    number = _check_int(what, value)
    if not -(2**63) <= number < 2**63:
        raise InvalidJobError(f"{what} must fit a bigint, not {_shown(number)}")
    return number


def check_limit(what: str, value: Any) -> int:
    """Return `value` if it is a number of rows to look at, at least 1 (bigint)."""
    number = _check_int(what, value)
    if not 1 <= number <= MAX_ROWS:
        raise InvalidJobError(f"{what} must be from 1 to {MAX_ROWS}, not {_shown(number)}")
    return number


def check_condition(what: str, value: Any) -> str:
    """Return `value` if rows can be compared with it; it may be a name that the queue refuses.

    Rows that plain SQL has written may have such names.
    """
    if not isinstance(value, str):
        raise InvalidJobTypeError(f"{what} must be a str, not {type(value).__name__}")
    problem = unstorable(value)
    if problem:
        raise InvalidJobError(f"{what} {problem}: {value!r}")
    return str.__str__(value)


def check_run_at(value: Any) -> dt.datetime:
    """Return `value` if it is an aware datetime that the database can hold."""
    if not isinstance(value, dt.datetime):
        raise InvalidJobTypeError(f"run_at must be a datetime, not {type(value).__name__}")
    if value.utcoffset() is None:
        raise InvalidJobError(
            f"run_at must be aware, not the naive {value!r}: "
            "pass e.g. datetime.now(timezone.utc), or use delay="
        )
    try:
        instant = value.astimezone(dt.timezone.utc)
        # A driver reads it back in the session's time zone, which may be a day away.
        instant - _DAY, instant + _DAY
    except OverflowError:
        raise InvalidJobError(
            f"run_at is outside the years 1 to 9999 in some time zone: {value!r}"
        ) from None
    return instant


def check_seconds(what: str, value: Any, *, most: float = MAX_DELAY_SECONDS) -> float:
    """Return a duration, given as seconds or a timedelta, as finite seconds from 0 to `most`."""
    seconds = value.total_seconds() if isinstance(value, dt.timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidJobTypeError(
            f"{what} must be seconds or a timedelta, not {type(value).__name__}"
        )
    if not 0 <= seconds <= most:  # false for NaN, and no OverflowError for a huge int
        raise InvalidJobError(f"{what} must be from 0 to {most:.0f} seconds, not {_shown(seconds)}")
    return float(seconds)


def unstorable(text: str) -> str | None:
    """Return why PostgreSQL cannot hold this text, or None if it can."""
    if "\x00" in text:
        return "contains a NUL character"
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return "contains a lone surrogate, which is not valid Unicode text"
    return None


def _check_text(what: str, value: Any, max_bytes: int) -> str:
    if not isinstance(value, str):
        raise InvalidJobTypeError(f"{what} must be a str, not {type(value).__name__}")
    if not value:
        raise InvalidJobError(f"{what} must not be empty")
    problem = unstorable(value)
    if problem:
        raise InvalidJobError(f"{what} {problem}: {value!r}")
    size = len(value.encode())
    if size > max_bytes:
        raise InvalidJobError(
            f"{what} must be at most {max_bytes} bytes in UTF-8, not {size}: {value[:40]!r}..."
        )
    # A subclass such as StrEnum would be adapted by its own rules in some drivers.
    return str.__str__(value)


def _shown(number: float) -> str:
    try:
        text = repr(number)
    except ValueError:  # Python's limit on the digits of an int
        return "a number of thousands of digits"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _check_int(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidJobTypeError(f"{what} must be an int, not {type(value).__name__}")
    return int(value)
