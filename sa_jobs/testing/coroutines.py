"""An event loop for the coroutine handlers that a plain test runs, for one call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any


class OwnLoop:
    """Runs coroutines, one after the other, on a loop that ends with the block.

    It is one loop for all, since a pool of asynchronous connections belongs to the loop that opened
    it. The thread's own event loop, if a test has set one, stays what it was.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __enter__(self) -> OwnLoop:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = self._loop
        if loop is None:
            return
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            if left:
                loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            loop.close()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Return what a coroutine gives."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        return self._loop.run_until_complete(coroutine)


def is_loop_running() -> bool:
    """Return whether the calling thread is inside an event loop, where no other can run."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
