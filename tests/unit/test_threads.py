"""The slots of plain handlers, when their threads are ended from outside."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Callable

import pytest

from sa_jobs import Jobs
from sa_jobs.context import ClaimedJob
from sa_jobs.worker.running import Running
from sa_jobs.worker.threads import Threads
from tests.support.waiting import wait_until

NOW = dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc)


@pytest.fixture
def make() -> Callable[[], Running]:
    jobs = Jobs()
    jobs.handler("send")(lambda: None)

    def make() -> Running:
        claimed = ClaimedJob(
            1, "q", "send", "{}", 0, None, NOW, None, 1, 20, 1, None, None, "{}", NOW, NOW
        )
        return Running(claimed, jobs["send"], 0.0)

    return make


def test_a_thread_that_was_abandoned_and_then_dies_is_replaced_once(
    make: Callable[[], Running],
) -> None:
    """As by an exception that a handler's own time-out sends after the handler has ended."""
    stuck, *others = make(), make(), make()
    begun: list[Running] = []
    died: list[Running] = []
    end, late = threading.Event(), threading.Event()

    def run(running: Running) -> None:
        begun.append(running)
        if running is stuck:
            late.wait(60)
            raise SystemExit
        end.wait(60)

    threads = Threads(run, lambda running, _: died.append(running), limit=1)
    try:
        threads.submit([stuck])
        wait_until(lambda: begun == [stuck], "the handler that is stuck")
        threads.abandon(stuck)
        assert threads.stuck == 1
        late.set()
        wait_until(lambda: threads.stuck == 0, "the end of its thread")
        threads.submit([others[0]])
        wait_until(lambda: len(begun) == 2, "the next one")
        threads.submit([others[1]])
        assert threads.withdraw(others[1]), "two at once, where one is the limit"
        assert died == []
    finally:
        late.set()
        end.set()
        threads.close()
