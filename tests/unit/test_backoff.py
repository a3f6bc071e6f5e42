"""Back-off policies: delays stay finite and within the cap, whatever is put in."""

from __future__ import annotations

import datetime as dt
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sa_jobs.backoff import (
    DEFAULT_CAP_SECONDS,
    delay_after,
    equal_jitter,
    exponential,
    fixed,
    full_jitter,
)
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.limits import MAX_DELAY_SECONDS

attempts = st.one_of(st.integers(-5, 60), st.integers(-5, 10**9))
durations = st.one_of(
    st.sampled_from([0.0, 5e-324, 1e-9, 1.0, MAX_DELAY_SECONDS]),
    st.floats(0, MAX_DELAY_SECONDS),
)


@given(attempts, durations, durations)
def test_full_jitter_is_finite_and_within_its_cap(attempt: int, base: float, cap: float) -> None:
    delay = full_jitter(base=base, cap=cap)(attempt)
    assert math.isfinite(delay)
    assert 0 <= delay <= cap


@given(attempts, durations, durations)
def test_equal_jitter_is_finite_and_within_its_cap(attempt: int, base: float, cap: float) -> None:
    delay = equal_jitter(base=base, cap=cap)(attempt)
    assert math.isfinite(delay)
    assert 0 <= delay <= cap


@given(attempts, durations)
def test_exponential_is_finite_and_within_its_cap(attempt: int, cap: float) -> None:
    delay = exponential(cap=cap)(attempt)
    assert math.isfinite(delay)
    assert 0 <= delay <= cap


@given(attempts, durations)
def test_fixed_is_always_the_same(attempt: int, seconds: float) -> None:
    assert fixed(seconds)(attempt) == seconds


@pytest.mark.parametrize(("attempt", "window"), [(1, 2), (2, 4), (3, 8), (8, 256), (9, 300)])
def test_full_jitter_spreads_a_burst_over_the_whole_window(attempt: int, window: float) -> None:
    policy = full_jitter(base=2, cap=300)
    delays = [policy(attempt) for _ in range(400)]
    assert max(delays) <= window
    assert min(delays) < window * 0.1
    assert max(delays) > window * 0.9


def test_equal_jitter_is_never_near_zero() -> None:
    policy = equal_jitter(base=2, cap=300)
    delays = [policy(3) for _ in range(400)]
    assert all(8 <= delay <= 24 for delay in delays)
    assert max(delays) - min(delays) > 10


def test_exponential_doubles_up_to_its_cap() -> None:
    policy = exponential(cap=300)
    assert [policy(attempt) for attempt in (1, 2, 3, 8, 9, 1_000_000)] == [2, 4, 8, 256, 300, 300]


def test_a_policy_takes_timedeltas() -> None:
    assert fixed(dt.timedelta(minutes=2))(1) == 120.0
    assert full_jitter(cap=dt.timedelta(hours=1)).cap == 3600.0


def test_a_policy_shows_its_numbers() -> None:
    assert repr(full_jitter(base=2, cap=300)) == "full_jitter(base=2, cap=300)"


@pytest.mark.parametrize("value", [-1, math.nan, math.inf, -math.inf, 10**400, dt.timedelta.max])
@pytest.mark.parametrize(
    "make",
    [
        lambda value: full_jitter(base=value),
        lambda value: full_jitter(cap=value),
        lambda value: equal_jitter(base=value),
        lambda value: exponential(cap=value),
        fixed,
    ],
)
def test_a_number_that_is_no_duration_is_refused(make: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(InvalidJobError, match="seconds"):
        make(value)


@pytest.mark.parametrize("value", ["2", None, True, 2j])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match="seconds or a timedelta"):
        fixed(value)


class _Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError


def _raises(error: BaseException) -> Callable[[int], Any]:
    def policy(attempt: int) -> Any:
        raise error

    return policy


def _returns(value: Any) -> Callable[[int], Any]:
    def policy(attempt: int) -> Any:
        return value

    return policy


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(_raises(ValueError("no")), id="raises"),
        pytest.param(_raises(RecursionError()), id="raises deep"),
        pytest.param(_returns(None), id="None"),
        pytest.param(_returns("5"), id="text"),
        pytest.param(_returns(True), id="bool"),
        pytest.param(_returns(-1), id="negative"),
        pytest.param(_returns(math.nan), id="NaN"),
        pytest.param(_returns(math.inf), id="infinite"),
        pytest.param(_returns(-(10**400)), id="hugely negative"),
        pytest.param(_returns(dt.timedelta(1)), id="timedelta"),
        pytest.param(_returns(_Unprintable()), id="unprintable"),
        pytest.param(_returns(full_jitter), id="a policy"),
        pytest.param(lambda: 5.0, id="takes no attempt"),
    ],
)
def test_an_unusable_policy_is_replaced_and_logged_once(
    policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    delays = [delay_after(policy, attempt) for attempt in (1, 2, 50)]
    assert all(0 <= delay <= DEFAULT_CAP_SECONDS for delay in delays)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "the default policy is used" in caplog.text


@pytest.mark.parametrize("seconds", [0, 7, 7.5])
def test_a_callable_decides_the_delay(seconds: float) -> None:
    assert delay_after(lambda attempt: seconds * attempt, 3) == seconds * 3


@pytest.mark.parametrize("seconds", [10**400, 1e300])
def test_a_callable_is_held_to_the_longest_delay(seconds: float) -> None:
    assert delay_after(lambda _: seconds, 1) == MAX_DELAY_SECONDS
