"""The slots of plain handlers: threads that are started when needed and kept."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from sa_jobs.errors import WorkerError
from sa_jobs.worker.running import Running

logger = logging.getLogger("sa_jobs.worker")


class Threads:
    """Runs claims on at most `limit` threads, in the order in which they are given.

    Threads are called to work one after the other, by the one that takes a claim and leaves others
    behind: a hundred that are woken at once for as many short handlers would only be in each
    other's way.

    A thread whose handler is stuck can be abandoned: another takes its place, and it ends when its
    handler does. So does another where one died of an exception that came from outside, as those
    that a handler's own time-out sends too late; `died` is told the claim that it had.

    Where the system refuses another thread, those that there are do the work. With none left,
    `submit` and `abandon` raise WorkerError.
    """

    def __init__(
        self,
        run: Callable[[Running], None],
        died: Callable[[Running, BaseException], None],
        limit: int,
    ) -> None:
        self._run = run
        self._died = died
        self._limit = limit
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # All of these only under the lock.
        self._waiting: deque[Running] = deque()
        self._busy: dict[int, tuple[Running, int]] = {}
        self._stuck: dict[int, int] = {}
        self._threads = 0
        self._idle = 0
        # Whether a thread is on its way to take a claim.
        self._called = False
        self._started = 0
        self._refused = False
        self._closed = False

    def submit(self, claims: Iterable[Running]) -> None:
        """Give claims to threads, in this order."""
        with self._lock:
            self._waiting.extend(claims)
            # One that was called may have died on its way.
            self._called = False
            self._call()

    def withdraw(self, running: Running) -> bool:
        """Take back a claim that no thread has begun; return whether that was so."""
        with self._lock:
            if running in self._waiting:
                self._waiting.remove(running)
                return True
            return False

    def abandon(self, running: Running) -> None:
        """Let another thread take the place of the one that this claim's handler keeps."""
        with self._lock:
            if running.serial in self._busy:
                _, self._stuck[running.serial] = self._busy.pop(running.serial)
                self._threads -= 1
                self._call()

    @property
    def stuck(self) -> int:
        """How many abandoned threads have not ended yet."""
        return len(self._stuck)

    def close(self) -> None:
        """Let the threads end as soon as they are idle."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    def _call(self) -> None:
        """Call a thread to work if there is any and none is on its way; under the lock."""
        if not self._waiting or self._called:
            return
        if self._idle:
            self._called = True
            self._changed.notify()
        elif self._threads < self._limit:
            try:
                threading.Thread(
                    target=self._work, name=f"sa-jobs-handler-{self._started + 1}", daemon=True
                ).start()
            except RuntimeError as error:
                self._do_without(error)
                return
            self._called = True
            self._threads += 1
            self._started += 1

    def _do_without(self, error: RuntimeError) -> None:
        """Go on with the threads that there are; raise WorkerError if there is none."""
        if not self._threads:
            raise WorkerError(
                f"the system refuses a thread for handlers ({error}): the worker hands back its "
                "jobs and ends; raise the limit of processes (pids of the container, TasksMax, "
                "ulimit -u) or of memory, or lower the concurrency"
            ) from error
        if not self._refused:
            self._refused = True
            logger.warning(
                "the system refuses another thread (%s): %d of %d run plain handlers until it "
                "gives one; raise its limit, or lower the concurrency",
                error,
                self._threads,
                self._limit,
            )

    def _work(self) -> None:
        while True:
            try:
                self._serve()
            except BaseException as error:
                if not self._replace(error):
                    continue
            return

    def _replace(self, error: BaseException) -> bool:
        """Let another thread take the place of this one, which dies; return whether one does."""
        with self._lock:
            ident = threading.get_ident()
            stuck = [serial for serial, thread in self._stuck.items() if thread == ident]
            if stuck:
                # Another one has taken its place already.
                for serial in stuck:
                    del self._stuck[serial]
                return True
            own = [one for one, thread in self._busy.values() if thread == ident]
            for running in own:
                del self._busy[running.serial]
            self._threads -= 1
            # It may have been the one that was called.
            self._called = False
            try:
                self._call()
                replaced = True
            except WorkerError:
                # It is the last one, and goes on itself.
                self._threads += 1
                replaced = False
            begun = [running for running in own if running not in self._waiting]
        for running in begun:
            self._died(running, error)
        return replaced

    def _serve(self) -> None:
        ended = None
        while (running := self._next(ended)) is not None:
            self._run(running)
            ended = running.serial
            # Nothing of a finished job may be kept alive by an idle thread.
            del running

    def _next(self, ended: int | None) -> Running | None:
        """Return the next claim to run, after the one of this serial; None to end the thread."""
        with self._lock:
            if ended is None:
                self._called = False
            elif ended in self._stuck:
                del self._stuck[ended]
                return None
            else:
                del self._busy[ended]
            while not self._waiting:
                if self._closed:
                    return None
                self._idle += 1
                try:
                    self._changed.wait()
                finally:
                    self._idle -= 1
                    self._called = False
            # In this order, so that a thread that dies in between loses no claim.
            running = self._waiting[0]
            self._busy[running.serial] = (running, threading.get_ident())
            self._waiting.popleft()
            if self._waiting:
                self._call()
            return running
