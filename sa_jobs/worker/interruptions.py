"""What signal handlers raise in the main thread, kept until the worker has drained."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# The signals that ask a process to end, on any system.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def interruptions_held_back(stop: Callable[[], None]) -> Iterator[None]:
    """Call `stop` in place of what signal handlers raise in the block; raise it after the block.

    Python's own handler of SIGINT raises KeyboardInterrupt, and many a host's SystemExit, between
    any two steps of whatever runs: of two that belong together the second would be lost, such as
    noting a job that has just been claimed. The handlers are called all the same, at once. Outside
    of the main thread, where no signal handler runs, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised: list[BaseException] = []

    def holding_back(handler: Callable[[int, FrameType | None], Any]) -> Callable[..., None]:
        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handler(number, frame)
            except BaseException as error:
                raised.append(error)
                stop()

        return handle

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in before.items():
        if callable(handler):
            signal.signal(number, holding_back(handler))
    try:
        yield
    finally:
        for number, handler in before.items():
            if callable(handler):
                signal.signal(number, handler)
    if raised:
        raise raised[0]
