"""What a handler may know of its job, and say back."""

from __future__ import annotations

import logging
import threading
from typing import Any
from weakref import WeakKeyDictionary

import pytest

from sa_jobs import JobContext
from tests.unit.test_outcome import job


def test_the_payload_is_decoded_anew_each_time() -> None:
    claimed = job()
    claimed.payload["secret"] = "changed"
    assert claimed.payload == {"secret": "hunter2-XYZ"}


@pytest.mark.parametrize(("attempts", "final"), [(1, False), (2, False), (3, True), (4, True)])
def test_the_final_attempt_is_known(attempts: int, final: bool) -> None:
    assert job(attempts=attempts).final_attempt is final


def test_a_context_tells_the_attempt() -> None:
    assert JobContext(job(attempts=2)).attempt == 2


def test_hooks_may_keep_something_for_as_long_as_an_attempt_lasts() -> None:
    begun: WeakKeyDictionary[JobContext, str] = WeakKeyDictionary()
    context = JobContext(job())
    begun[context] = "kept"
    assert begun[context] == "kept"
    del context
    assert not begun


def test_progress_is_kept_until_it_is_taken() -> None:
    context = JobContext(job())
    context.progress({"page": 1})
    context.progress({"page": 2})
    assert context.take_progress() == '{"page":2}'
    assert context.take_progress() is None


@pytest.mark.parametrize(
    "value", [object(), "a\x00b", "x" * 20_000], ids=["object", "NUL", "too long"]
)
def test_progress_that_cannot_be_stored_never_fails_the_job(
    value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    context = JobContext(job())
    context.progress(1)
    context.progress(value)
    assert context.take_progress() == "1"
    assert "progress left out" in caplog.text


def test_a_handler_in_another_thread_hears_that_it_should_stop() -> None:
    context = JobContext(job())
    assert not context.cancelled
    assert not context.wait(0)
    heard: list[bool] = []
    waiting = threading.Thread(target=lambda: heard.append(context.wait(60)))
    waiting.start()
    context.stop()
    waiting.join(10)
    assert heard == [True]
    assert context.cancelled


def test_the_log_names_the_job_and_never_the_payload(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    JobContext(job(attempts=2)).log.info("page %s", 5, extra={"page": 5})
    (record,) = caplog.records
    fields = {name: value for name, value in record.__dict__.items() if name.startswith("job_")}
    assert fields == {"job_id": 1, "job_handler": "send", "job_queue": "mail", "job_attempt": 2}
    assert record.__dict__["page"] == 5
    assert "hunter2" not in repr(record.__dict__)
