"""Calls from another thread to the event loop of coroutine handlers."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.faults import is_transient
from sa_jobs.worker.running import Running


async def run(running: Running) -> None:
    raise AssertionError("no claim was submitted")


async def dispose() -> None:
    pass


def test_a_call_that_takes_too_long_is_a_database_that_is_waited_for() -> None:
    coroutines = Coroutines(run, lambda running: None, 1)
    ended = threading.Event()

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(TimeoutError) as caught:
        coroutines.call(waits, 0.1)
    assert is_transient(caught.value)
    assert ended.wait(20), "and it is not left behind"
    coroutines.close(dispose, at_once=False)
