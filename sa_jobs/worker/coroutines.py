"""The slots of coroutine handlers: one event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Awaitable, Callable

from sa_jobs.worker.running import Running

_CLOSE_SECONDS = 5.0


class Coroutines:
    """Runs at most `limit` claims at once, as tasks of one background event loop.

    The loop is started when first needed. It is one for all, since a pool of asynchronous
    connections belongs to the loop that opened it. All methods are for the control loop alone.
    """

    def __init__(self, run: Callable[[Running], Awaitable[None]], limit: int) -> None:
        self._run = run
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        # Claims that have not begun: popping one, which is atomic, is the right to run it.
        self._waiting: dict[int, Running] = {}
        # The loop itself keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, running: Running) -> None:
        """Start a claim's handler on the loop, as soon as there is room."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="sa-jobs-event-loop", daemon=True
            )
            self._thread.start()
        self._waiting[running.serial] = running
        self._loop.call_soon_threadsafe(self._start_waiting)

    def withdraw(self, running: Running) -> bool:
        """Take back a claim that has not begun; return whether that was so."""
        return self._waiting.pop(running.serial, None) is not None

    def close(self, dispose: Callable[[], Awaitable[None]]) -> None:
        """Cancel what still runs, await `dispose`, and end the loop and its thread."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return

        async def end() -> None:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
            await dispose()
            await loop.shutdown_asyncgens()

        try:
            asyncio.run_coroutine_threadsafe(end(), loop).result(_CLOSE_SECONDS * 2)
        except concurrent.futures.TimeoutError:
            return  # A handler blocks the loop; its thread is a daemon.
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_SECONDS)
        if not thread.is_alive():
            loop.close()

    def _start_waiting(self) -> None:
        while self._waiting and len(self._tasks) < self._limit:
            serial = next(iter(self._waiting), None)
            running = None if serial is None else self._waiting.pop(serial, None)
            if running is not None:
                self._start(running)

    def _start(self, running: Running) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._execute(running))
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        running.task = task
        if running.stop_reason is not None:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._start_waiting()

    async def _execute(self, running: Running) -> None:
        await self._run(running)
