"""Delays, lines and the verdict of a loop that cannot reach its database."""

from __future__ import annotations

import logging
import statistics
from typing import Any

import psycopg
import pytest
from sqlalchemy.exc import OperationalError, ProgrammingError

from sa_jobs.worker import recovery
from sa_jobs.worker.faults import is_refusal
from sa_jobs.worker.recovery import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, Recovery


class Clock:
    """A monotonic clock that the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recovery, "time", clock)
    return clock


def away(text: str = "Connection refused") -> OperationalError:
    return OperationalError("SELECT 1", {}, psycopg.OperationalError(text))


def unexpected(text: str = "odd") -> ProgrammingError:
    return ProgrammingError("SELECT 1", {}, psycopg.ProgrammingError(text))


def test_delays_grow_to_a_cap_with_jitter() -> None:
    runs = []
    for _ in range(200):
        loop = Recovery("claim")
        runs.append([loop.failed(away()) for _ in range(20)])
    for number, delays in enumerate(zip(*runs, strict=True)):
        ceiling = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**number)
        assert all(ceiling / 2 <= delay <= ceiling for delay in delays)
        assert statistics.stdev(delays) > ceiling / 20
    loop = Recovery("claim")
    assert max(loop.failed(away()) for _ in range(20)) > FIRST_DELAY_SECONDS
    loop.succeeded()
    assert loop.failed(away()) <= FIRST_DELAY_SECONDS


def test_an_hour_of_one_trouble_is_a_line_a_minute(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Recovery("claim")
    end = clock.now + 3600
    while clock.now < end:
        clock.now += loop.failed(away())
    assert 50 <= len(caplog.records) <= 61
    with caplog.at_level(logging.INFO):
        loop.succeeded()
    assert caplog.messages[-1].startswith("claim: works again after 360")


def test_a_traceback_is_shown_once_for_each_distinct_error(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Recovery("sweep")
    for number in range(12):
        clock.now += 100
        loop.failed(unexpected(("odd", "odder")[number % 2]))
    shown = [line for line in caplog.messages if line.startswith("sweep: unexpected error: ")]
    again = [line for line in caplog.messages if line.startswith("sweep: unexpected error again: ")]
    assert len(shown) == 2
    assert len(again) == 10
    assert {line.count("\n") for line in again} == {0}


@pytest.mark.parametrize(
    "text",
    [
        'FATAL:  password authentication failed for user "app"',
        'FATAL:  no pg_hba.conf entry for host "10.0.0.1", user "app", database "app"',
        'FATAL:  role "app" does not exist',
        'FATAL:  database "app" does not exist',
        'FATAL:  role "app" is not permitted to log in',
        "fe_sendauth: no password supplied",
    ],
)
def test_refusals_are_told_from_a_server_that_is_away(text: str) -> None:
    refusal = away(f'connection to server at "10.0.0.2", port 5432 failed: {text}')
    assert is_refusal(refusal)


@pytest.mark.parametrize(
    "error",
    [
        away(),
        away("FATAL:  the database system is starting up"),
        away("FATAL:  sorry, too many clients already"),
        TimeoutError("no answer from the server within 10 s"),
        unexpected('role "app" does not exist'),
    ],
    ids=str,
)
def test_other_trouble_is_no_refusal(error: Any) -> None:
    assert not is_refusal(error)


def test_only_refusals_in_a_row_end_a_loop(clock: Clock) -> None:
    loop = Recovery("claim")
    refusal = away('FATAL:  password authentication failed for user "app"')

    def verdict_after(seconds: float, error: BaseException) -> bool:
        clock.now += seconds
        fatal = loop.verdict(error)
        loop.failed(error)
        return fatal is not None

    assert not any(verdict_after(100, away()) for _ in range(50))
    assert not any(verdict_after(100, refusal) for _ in range(3))
    assert not verdict_after(100, away())
    assert not any(verdict_after(100, refusal) for _ in range(3))
    loop.succeeded()
    assert not any(verdict_after(100, refusal) for _ in range(3))
    assert verdict_after(100, refusal)
