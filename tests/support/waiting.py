"""Waiting for a condition, in place of sleeping, and bounds on how long something may take."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, *, seconds: float = 30.0) -> T:
    """Return the condition's first true value, or fail with `what` after so many seconds."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.02)


def slowdown() -> float:
    """Return how many times slower a process runs now than it would alone on this machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import sqlalchemy.orm"], check=True)
    took = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return max(1.0, took / used)


def assert_within(seconds: float, took: float) -> None:
    """Fail if something took longer than it may on a machine that has nothing else to do."""
    assert took < seconds or took < seconds * slowdown(), f"took {took:.2f} s of {seconds:g} s"
