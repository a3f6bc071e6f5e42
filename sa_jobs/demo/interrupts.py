"""Ctrl-C, SIGTERM and a closed terminal: each ends the demo, at a moment when nothing gets lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """While the block runs, these signals raise KeyboardInterrupt, unless they are held."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._is_held = False
        self._has_come = False

    def __enter__(self) -> Interrupts:
        self._before = {number: signal.signal(number, self._came) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put off an interrupt to the end of the block.

        What is made in the block can be noted in it: interrupted half-way, `Popen` would lose a
        child that runs already.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            if self._has_come:
                raise KeyboardInterrupt

    def ignore(self) -> None:
        """Let no interrupt cut short what follows."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
        if not self._is_held:
            raise KeyboardInterrupt
