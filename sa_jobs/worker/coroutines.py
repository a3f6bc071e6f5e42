"""The slots of coroutine handlers: one event loop on a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from sa_jobs.errors import WorkerError
from sa_jobs.worker.running import Running

T = TypeVar("T")

# What has been cancelled is given this long to clean up, when the worker has ended.
_CLOSE_SECONDS = 1.0


class Coroutines:
    """Runs at most `limit` claims at once, as tasks of one background event loop.

    The loop is started when first needed. It is one for all, since a pool of asynchronous
    connections belongs to the loop that opened it. `run` runs a claim and reports its end;
    `stopped` reports the end of a claim that was told to stop before it began.
    """

    def __init__(
        self,
        run: Callable[[Running], Awaitable[None]],
        stopped: Callable[[Running], None],
        limit: int,
    ) -> None:
        self._run = run
        self._stopped = stopped
        self._limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        # All of these only under the lock. The claims hold their tasks, to which the loop itself
        # keeps only weak references.
        self._waiting: deque[Running] = deque()
        self._busy: dict[int, Running] = {}
        self._stuck: dict[int, Running] = {}
        self._closed = False
        # Monotonic time of the oldest call that the loop has not answered.
        self._asked_at: float | None = None

    def submit(self, running: Running) -> None:
        """Start a claim's handler on the loop, as soon as there is room."""
        with self._lock:
            self._waiting.append(running)
        self._ask_to_start()

    def withdraw(self, running: Running) -> bool:
        """Take back a claim that has not begun; return whether that was so."""
        with self._lock:
            if running in self._waiting:
                self._waiting.remove(running)
                return True
            return False

    def abandon(self, running: Running) -> None:
        """Let another claim have the slot of one that was cancelled, whatever its handler does."""
        with self._lock:
            if self._busy.pop(running.serial, None) is not None:
                self._stuck[running.serial] = running
        self._ask_to_start()

    @property
    def stuck(self) -> int:
        """How many abandoned handlers have not ended yet."""
        return len(self._stuck)

    @property
    def silent_seconds(self) -> float:
        """For how long the loop has not answered: a handler blocks it."""
        asked_at = self._asked_at
        return 0.0 if asked_at is None else time.monotonic() - asked_at

    def call(
        self, function: Callable[[], Coroutine[Any, Any, T]], seconds: float | None = None
    ) -> T:
        """Return what a coroutine gives that runs on the loop; raise TimeoutError if too late.

        It runs in a copy of the caller's context. From any thread but the loop's own.
        """
        future = asyncio.run_coroutine_threadsafe(function(), self._running_loop())
        try:
            return future.result(seconds)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise  # The coroutine's own.
            # Another class than the builtin one until Python 3.11, and no OSError.
            future.cancel()
            raise TimeoutError(f"no answer on the event loop within {seconds:g} s") from error

    def close(self, dispose: Callable[[], Awaitable[None]], *, at_once: bool) -> None:
        """Cancel what still runs, await `dispose`, and end the loop and its thread.

        With `at_once` nothing is waited for: the thread is a daemon.
        """
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return
        ending = asyncio.run_coroutine_threadsafe(self._end(dispose), loop)
        if at_once:
            return
        try:
            ending.result(_CLOSE_SECONDS * 3)
        except concurrent.futures.TimeoutError:
            return
        self._closed = True
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_CLOSE_SECONDS)
        if not thread.is_alive():
            loop.close()

    async def _end(self, dispose: Callable[[], Awaitable[None]]) -> None:
        ours = []
        with self._lock:
            for running in (*self._busy.values(), *self._stuck.values()):
                if running.task is not None:
                    ours.append(running.task)
                    if running.stop_reason is None:
                        running.task.cancel()
        if ours:
            await asyncio.wait(ours, timeout=_CLOSE_SECONDS)
        # Then what handlers have started and left behind.
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=_CLOSE_SECONDS)
        await dispose()
        await asyncio.get_running_loop().shutdown_asyncgens()

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            return self._start_loop() if self._loop is None else self._loop

    def _start_loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(
            target=self._keep_running, args=(loop,), name="sa-jobs-event-loop", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            loop.close()
            raise WorkerError(
                f"the system refuses the thread of the event loop ({error}): the worker hands "
                "back its jobs and ends; raise the limit of processes (pids of the container, "
                "TasksMax, ulimit -u) or of memory"
            ) from error
        self._loop, self._thread = loop, thread
        return loop

    def _keep_running(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._closed:
            # A SystemExit or KeyboardInterrupt in a task that a handler has started leaves the loop
            # as well as the task, where it stays for whoever awaits it. A handler may also call
            # stop() on the loop. Neither is the end of the other handlers.
            with contextlib.suppress(BaseException):
                loop.run_forever()

    def _ask_to_start(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self._running_loop().call_soon_threadsafe(self._start_waiting)

    def _start_waiting(self) -> None:
        self._asked_at = None
        while True:
            with self._lock:
                if not self._waiting or len(self._busy) >= self._limit:
                    return
                running = self._waiting.popleft()
                running.task = task = asyncio.ensure_future(self._execute(running))
                self._busy[running.serial] = running
            task.add_done_callback(functools.partial(self._ended, running))
            if running.stop_reason is not None:
                task.cancel()

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        with self._lock:
            self._busy.pop(running.serial, None)
            self._stuck.pop(running.serial, None)
        if running.started_at is None:
            # Cancelled before its first step, a task never enters its coroutine.
            self._stopped(running)
        self._start_waiting()

    async def _execute(self, running: Running) -> None:
        await self._run(running)
