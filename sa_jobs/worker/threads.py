"""The slots of plain handlers: threads that are started when needed and kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from sa_jobs.worker.running import Running


class Threads:
    """Runs claims on at most `limit` threads, in the order in which they are given.

    A thread whose handler is stuck can be abandoned: another takes its place, and it ends when its
    handler does.
    """

    def __init__(self, run: Callable[[Running], None], limit: int) -> None:
        self._run = run
        self._limit = limit
        self._changed = threading.Condition()
        # All of these only under the lock.
        self._waiting: deque[Running] = deque()
        self._busy: set[int] = set()
        self._stuck: set[int] = set()
        self._threads = 0
        self._started = 0
        self._closed = False

    def submit(self, running: Running) -> None:
        """Give a claim to a thread."""
        with self._changed:
            self._waiting.append(running)
            self._start_threads()
            self._changed.notify()

    def withdraw(self, running: Running) -> bool:
        """Take back a claim that no thread has begun; return whether that was so."""
        with self._changed:
            if running in self._waiting:
                self._waiting.remove(running)
                return True
            return False

    def abandon(self, running: Running) -> None:
        """Let another thread take the place of the one that this claim's handler keeps."""
        with self._changed:
            if running.serial in self._busy:
                self._busy.remove(running.serial)
                self._stuck.add(running.serial)
                self._threads -= 1
                self._start_threads()

    @property
    def stuck(self) -> int:
        """How many abandoned threads have not ended yet."""
        return len(self._stuck)

    def close(self) -> None:
        """Let the threads end as soon as they are idle."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start_threads(self) -> None:
        while self._threads < min(self._limit, len(self._busy) + len(self._waiting)):
            threading.Thread(
                target=self._work, name=f"sa-jobs-handler-{self._started + 1}", daemon=True
            ).start()
            # Only now: the system may refuse another thread.
            self._threads += 1
            self._started += 1

    def _work(self) -> None:
        while (running := self._next()) is not None:
            self._run(running)
            with self._changed:
                if running.serial in self._stuck:
                    self._stuck.remove(running.serial)
                    return
                self._busy.remove(running.serial)
            # Nothing of a finished job may be kept alive by an idle thread.
            del running

    def _next(self) -> Running | None:
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return None
                self._changed.wait()
            running = self._waiting.popleft()
            self._busy.add(running.serial)
            return running
