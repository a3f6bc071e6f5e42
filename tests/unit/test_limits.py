"""What the queue can hold: each value is returned as it is, or refused with its name."""

from __future__ import annotations

import datetime as dt
import enum
import math
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa_jobs import limits
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError

UTC = dt.timezone.utc
# More digits than Python turns into text.
HUGE = pytest.param(10**5000, id="huge")


class Queue(str, enum.Enum):
    MAIL = "mail"


class Level(enum.IntEnum):
    HIGH = 5


def _name(value: Any) -> Any:
    return limits.check_name("queue", value)


def _key(value: Any) -> Any:
    return limits.check_key("idempotency_key", value)


@pytest.mark.parametrize(
    "name",
    [
        "a-b",
        "A",
        "o'x",
        'a"b',
        "a;drop table sa_jobs;--",
        "a$$b",
        "a\\b",
        "x.job",
        "é" * 40,
        " leading",
        "%s",
        "{}",
        "نص 😀 e\u0301",
        "x" * 200,
        "é" * 100,
    ],
)
@pytest.mark.parametrize("check", [_name, _key])
def test_any_storable_text_is_a_name_or_key(check: Callable[[Any], Any], name: str) -> None:
    assert check(name) == name


def test_every_control_character_is_refused_in_a_name_and_nothing_else() -> None:
    refused = {
        character for character in map(chr, range(0x110000)) if limits._CONTROL.search(character)
    }
    assert refused == {c for c in map(chr, range(0x110000)) if unicodedata.category(c) == "Cc"}


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("", "empty"),
        ("a\x00b", "NUL"),
        ("\ud800", "surrogate"),
        ("x" * 501, "at most"),
        ("é" * 251, "at most"),
        pytest.param("x" * 10_000, "at most", id="10000 characters"),
    ],
)
@pytest.mark.parametrize(("check", "what"), [(_name, "queue"), (_key, "idempotency_key")])
def test_text_that_cannot_be_stored_is_refused(
    check: Callable[[Any], Any], what: str, value: str, problem: str
) -> None:
    with pytest.raises(InvalidJobError, match=rf"^{what} .*{problem}"):
        check(value)


@pytest.mark.parametrize("value", ["x" * 201, "é" * 101, "a\nb", "a\tb", "\x1b]0;x", "\x85"])
def test_a_name_is_shorter_than_a_key_and_has_no_control_characters(value: str) -> None:
    assert _key(value) == value
    with pytest.raises(InvalidJobError, match=r"^queue "):
        _name(value)


@pytest.mark.parametrize("value", [None, 1, b"mail", ["mail"], object()])
@pytest.mark.parametrize("check", [_name, _key])
def test_what_is_no_text_is_refused(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match=f"must be a str, not {type(value).__name__}"):
        check(value)


def test_a_text_enum_becomes_plain_text() -> None:
    assert type(_name(Queue.MAIL)) is str
    assert _name(Queue.MAIL) == "mail"


@given(st.text(min_size=1, max_size=300))
def test_an_accepted_name_is_what_was_given(text: str) -> None:
    try:
        assert _name(text) == text
    except InvalidJobError:
        assert (
            len(text.encode(errors="surrogatepass")) > 200
            or not text.isprintable()
            or limits.unstorable(text)
        )


@pytest.mark.parametrize("value", [-32_768, 0, 32_767, Level.HIGH])
def test_a_smallint_is_a_priority(value: int) -> None:
    assert limits.check_priority(value) == value
    assert type(limits.check_priority(value)) is int


@pytest.mark.parametrize("value", [-32_769, 32_768, HUGE])
def test_a_priority_outside_smallint_is_refused(value: int) -> None:
    with pytest.raises(InvalidJobError, match=r"^priority must be from -32768 to 32767"):
        limits.check_priority(value)


@pytest.mark.parametrize("value", [1, 2**63 - 1])
def test_attempts_fit_a_bigint(value: int) -> None:
    assert limits.check_max_attempts(value) == value


@pytest.mark.parametrize("value", [0, -1, 2**63, HUGE])
def test_attempts_below_one_or_too_many_are_refused(value: int) -> None:
    with pytest.raises(InvalidJobError, match=r"^max_attempts must be from 1 to"):
        limits.check_max_attempts(value)


@pytest.mark.parametrize("value", [2**63, -(2**63) - 1, HUGE])
def test_an_id_outside_bigint_is_refused(value: int) -> None:
    with pytest.raises(InvalidJobError, match=r"^job_id must fit a bigint"):
        limits.check_id("job_id", value)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
@pytest.mark.parametrize(
    "check",
    [
        limits.check_priority,
        limits.check_max_attempts,
        lambda value: limits.check_id("job_id", value),
    ],
)
def test_what_is_no_integer_is_refused(check: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match="must be an int"):
        check(value)


def test_an_aware_time_is_kept_to_the_instant() -> None:
    given_at = dt.datetime(2030, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=13)))
    assert limits.check_run_at(given_at) == dt.datetime(2030, 1, 1, tzinfo=UTC)


def test_a_naive_time_is_refused_with_the_way_out() -> None:
    with pytest.raises(InvalidJobError, match=r"run_at must be aware.*timezone\.utc"):
        limits.check_run_at(dt.datetime(2030, 1, 1))  # noqa: DTZ001


@pytest.mark.parametrize("value", ["2030-01-01", 0, dt.date(2030, 1, 1), dt.timedelta(1)])
def test_what_is_no_datetime_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match="run_at must be a datetime"):
        limits.check_run_at(value)


@pytest.mark.parametrize(
    "value",
    [
        dt.datetime.min.replace(tzinfo=dt.timezone(dt.timedelta(hours=1))),
        dt.datetime.max.replace(tzinfo=dt.timezone(dt.timedelta(hours=-1))),
        dt.datetime.min.replace(tzinfo=UTC),
        dt.datetime.max.replace(tzinfo=UTC),
    ],
)
def test_a_time_that_some_time_zone_cannot_show_is_refused(value: dt.datetime) -> None:
    with pytest.raises(InvalidJobError, match="run_at is outside the years"):
        limits.check_run_at(value)


@pytest.mark.parametrize(
    ("value", "seconds"), [(0, 0.0), (1.5, 1.5), (dt.timedelta(minutes=1), 60.0), (-0.0, 0.0)]
)
def test_a_duration_is_seconds_or_a_timedelta(value: Any, seconds: float) -> None:
    assert limits.check_seconds("delay", value) == seconds


@pytest.mark.parametrize(
    "value", [-1, -0.001, math.nan, math.inf, 1e300, 10**400, HUGE, dt.timedelta.max]
)
def test_a_duration_outside_the_limits_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"^delay must be from 0 to"):
        limits.check_seconds("delay", value)


@pytest.mark.parametrize("value", ["1", None, True, [1]])
def test_what_is_no_duration_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match=r"^delay must be seconds or a timedelta"):
        limits.check_seconds("delay", value)
