"""What a handler did, and the job's policy -> what to write."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
from typing import Any

import pytest

from sa_jobs import ClaimedJob, Discard, Retry, Snooze
from sa_jobs.backoff import fixed
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.outcome import Failed, Finished, Snoozed, failed, raised, returned

NOW = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
BACKOFF = fixed(7)


def job(attempts: int = 1, max_attempts: int = 3) -> ClaimedJob:
    return ClaimedJob(
        id=1,
        queue="mail",
        handler="send",
        payload_text='{"secret": "hunter2-XYZ"}',
        priority=0,
        tenant=None,
        run_at=NOW,
        scheduled_for=None,
        attempts=attempts,
        max_attempts=max_attempts,
        claim_no=attempts,
        idempotency_key=None,
        unique_key=None,
        meta_text="{}",
        created_at=NOW,
        claimed_at=NOW,
    )


@pytest.mark.parametrize(
    ("value", "result"),
    [(None, None), ({"a": [1]}, '{"a":[1]}'), (0, "0"), (False, "false"), ("", '""')],
)
def test_a_returned_value_is_the_result(value: Any, result: str | None) -> None:
    assert returned(job(), value) == Finished(result)


@pytest.mark.parametrize(
    "value",
    [object(), NOW, "a\x00b", "\ud800", math.nan, {1: 2}, "x" * 2_000_000],
    ids=["object", "datetime", "NUL", "surrogate", "NaN", "int key", "2 MB"],
)
def test_a_result_that_cannot_be_stored_is_left_out_with_a_warning(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert returned(job(), value) == Finished(None)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "result left out" in record.getMessage()
    assert (record.__dict__["job_id"], record.__dict__["job_handler"]) == (1, "send")
    assert len(record.getMessage()) < 500


EXCEPTIONS = [
    ValueError("no"),
    AssertionError(),
    SystemExit(1),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    StopIteration(),
]


@pytest.mark.parametrize("error", EXCEPTIONS, ids=lambda error: type(error).__name__)
def test_any_exception_fails_the_attempt_and_backs_off(error: BaseException) -> None:
    outcome = raised(job(attempts=1), error, BACKOFF)
    assert isinstance(outcome, Failed)
    assert (outcome.delay, outcome.final) == (7.0, False)
    assert type(error).__name__ in outcome.error


def test_an_exception_on_the_last_attempt_is_final() -> None:
    outcome = raised(job(attempts=3), ValueError("no"), BACKOFF)
    assert isinstance(outcome, Failed)
    assert (outcome.delay, outcome.final) == (0.0, True)


@pytest.mark.parametrize("attempts", [3, 4, 2**62])
def test_any_attempt_from_the_last_on_is_final(attempts: int) -> None:
    assert failed(job(attempts=attempts), "lost", BACKOFF) == Failed("lost", 0.0, final=True)


@pytest.mark.parametrize("delay", [0, 0.001, 10_000, dt.timedelta(days=3)])
def test_retry_is_taken_as_it_is(delay: Any) -> None:
    seconds = delay.total_seconds() if isinstance(delay, dt.timedelta) else delay
    assert raised(job(), Retry(delay, "later"), BACKOFF) == Failed("later", seconds, final=False)


def test_retry_on_the_last_attempt_is_final() -> None:
    outcome = raised(job(attempts=3), Retry(5), BACKOFF)
    assert outcome == Failed("retry in 5 s", 5.0, final=True)


@pytest.mark.parametrize("attempts", [1, 3])
def test_snooze_burns_no_attempt_even_on_the_last(attempts: int) -> None:
    assert raised(job(attempts=attempts), Snooze(60), BACKOFF) == Snoozed(60.0)


@pytest.mark.parametrize("attempts", [1, 3])
def test_discard_is_final_on_any_attempt(attempts: int) -> None:
    outcome = raised(job(attempts=attempts), Discard("gone"), BACKOFF)
    assert outcome == Failed("discarded: gone", 0.0, final=True)


@pytest.mark.parametrize("make", [Retry, Snooze])
@pytest.mark.parametrize("delay", [-1, math.nan, math.inf, dt.timedelta.max])
def test_a_delay_that_cannot_be_is_refused_where_it_is_raised(make: Any, delay: Any) -> None:
    with pytest.raises(InvalidJobError, match=f"the delay of {make.__name__}"):
        make(delay)


@pytest.mark.parametrize("make", [Retry, Snooze])
@pytest.mark.parametrize("delay", ["60", None])
def test_a_delay_that_is_no_duration_is_refused(make: Any, delay: Any) -> None:
    with pytest.raises(InvalidJobTypeError):
        make(delay)


@pytest.mark.parametrize("make", [lambda text: Retry(1, text), Discard])
@pytest.mark.parametrize("text", ["a\x00b", "\ud800", "x" * 100_000], ids=["NUL", "half", "long"])
def test_a_reason_becomes_text_that_can_be_stored(make: Any, text: str) -> None:
    outcome = raised(job(), make(text), BACKOFF)
    assert isinstance(outcome, Failed)
    assert len(outcome.error.encode()) <= 16_000
    assert "\x00" not in outcome.error


def test_a_reason_is_text_even_where_none_was_given() -> None:
    outcome = raised(job(), Discard(None), BACKOFF)  # type: ignore[arg-type]
    assert isinstance(outcome, Failed)
    assert outcome.error


class Lost(Snooze):
    def __init__(self) -> None:
        Exception.__init__(self, "its parent was not called")


class Odd(Retry):
    def __init__(self, delay: Any) -> None:
        super().__init__(1)
        self.delay = delay


@pytest.mark.parametrize(
    "error", [Lost(), Odd(math.nan), Odd(-1), Odd("soon")], ids=["none", "NaN", "negative", "text"]
)
def test_a_delay_that_was_lost_on_the_way_is_a_failure_like_any_other(error: Exception) -> None:
    outcome = raised(job(), error, BACKOFF)
    assert isinstance(outcome, Failed)
    assert (outcome.delay, outcome.final) == (7.0, False)
    assert type(error).__name__ in outcome.error


class Unspeakable(Discard):
    def __str__(self) -> str:
        raise SystemExit


def test_a_reason_without_a_text_is_named() -> None:
    outcome = raised(job(), Unspeakable(), BACKOFF)
    assert outcome == Failed("discarded: Unspeakable (it has no text: SystemExit)", final=True)


def test_no_log_record_keeps_a_result_that_was_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert returned(job(), [object()]) == Finished()
    assert all(isinstance(argument, (int, str)) for argument in caplog.records[0].args or ())
