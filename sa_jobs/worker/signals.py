"""Signals: the first asks the worker to drain, the second to end at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Protocol

from sa_jobs.worker.loop import EXIT_FAILURE

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stoppable(Protocol):
    """A worker, or what stands for one."""

    def run(self) -> int:
        """Work until it is stopped, and return the exit code."""

    def stop(self) -> None:
        """Ask it to drain, then to end at once."""


def run_with_signals(worker: Stoppable) -> int:
    """Run the worker in the main thread until it stops, and return its exit code.

    Every SIGTERM and SIGINT stops it. The process is to end with that code afterwards: one more
    signal on the way there ends it on the spot.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop()

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(code)

    code = EXIT_FAILURE
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    try:
        code = worker.run()
    finally:
        for number in STOP_SIGNALS:
            signal.signal(number, end)
    return code
