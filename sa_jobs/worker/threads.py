"""The slots of plain handlers: threads that are started when needed and kept."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from sa_jobs.worker.running import Running


class Threads:
    """Runs claims on at most `limit` threads of its own, in the order in which they are given.

    A thread whose handler is stuck can be abandoned: another takes its place, and it ends when its
    handler does. All methods are for the control loop alone.
    """

    def __init__(self, run: Callable[[Running], None], limit: int) -> None:
        self._run = run
        self._limit = limit
        self._threads = 0
        self._queue: SimpleQueue[Running | None] = SimpleQueue()
        # By serial number. Popping one, which is atomic, decides between a thread and the loop:
        # who may run a claim that waits, and whether a thread that ends was abandoned before.
        self._waiting: dict[int, Running] = {}
        self._busy: dict[int, Running] = {}
        self._stuck: dict[int, Running] = {}

    def submit(self, running: Running) -> None:
        """Give a claim to a thread."""
        self._waiting[running.serial] = running
        # A thread that has just ended its claim may still count as busy: one too many at worst.
        busy = len(self._waiting) + len(self._busy)
        if self._threads < min(self._limit, busy):
            self._threads += 1
            threading.Thread(
                target=self._work, name=f"sa-jobs-handler-{self._threads}", daemon=True
            ).start()
        self._queue.put(running)

    def withdraw(self, running: Running) -> bool:
        """Take back a claim that no thread has begun; return whether that was so."""
        return self._waiting.pop(running.serial, None) is not None

    def abandon(self, running: Running) -> None:
        """Let another thread take the place of the one that this claim's handler keeps."""
        self._stuck[running.serial] = running
        if self._busy.pop(running.serial, None) is None:
            del self._stuck[running.serial]
        else:
            self._threads -= 1

    @property
    def stuck(self) -> int:
        """How many abandoned threads have not ended yet."""
        return len(self._stuck)

    def close(self) -> None:
        """Let the threads end as soon as they are idle."""
        for _ in range(self._threads):
            self._queue.put(None)

    def _work(self) -> None:
        while True:
            running = self._queue.get()
            if running is None:
                return
            if self._waiting.pop(running.serial, None) is None:
                continue
            self._busy[running.serial] = running
            self._run(running)
            if self._busy.pop(running.serial, None) is None:
                self._stuck.pop(running.serial, None)
                return
            # Nothing of a finished job may be kept alive by an idle thread.
            del running
