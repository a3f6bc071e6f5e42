"""Signals: the first asks the worker to drain, the second to end at once."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from sa_jobs.worker.worker import Worker

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run_with_signals(worker: Worker) -> int:
    """Run the worker in the main thread until it stops, and return its exit code.

    The first SIGTERM or SIGINT drains, the second ends at once. The handlers that were there
    before are put back at the end.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        worker.stop()

    before: dict[int, Any] = {number: signal.signal(number, stop) for number in STOP_SIGNALS}
    try:
        return worker.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
