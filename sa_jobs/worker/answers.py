"""Answers: a connection on which the server is silent is given up, though TCP finds nothing wrong.

A network that drops a flow without a word, or a middlebox that goes on acknowledging it, leaves a
statement waiting for ever. So each of the worker's connections has a bound in band, kept by a
thread that knows no connection of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Engine, event

from sa_jobs.worker.parts import Part
from sa_jobs.worker.running import Mailbox
from sa_jobs.worker.sockets import Socket

# How much longer than its time a connection has once the server was asked to give up.
CUT_FACTOR = 1.25
LONGEST_PERIOD_SECONDS = 1.0


class Answers:
    """Knows since when the one connection of an engine waits for the server; for any thread.

    After `seconds` without an answer the server is asked to give up the statement, where that can
    be done: one that waits for a lock would else stay there, and each new try with it. A quarter
    later the socket is shut down, which ends the wait on our side.
    """

    def __init__(self, engine: Engine, seconds: float) -> None:
        self.seconds = seconds
        self._lock = threading.Lock()
        # All of these only under the lock.
        self._driver: Any = None
        self._socket: Socket | None = None
        self._asked_at: float | None = None
        self._gave_up = False
        self._over = False
        # First of all, so that what SQLAlchemy asks of a new connection is bounded too.
        event.listen(engine.pool, "connect", self._connected, insert=True)
        event.listen(engine, "before_cursor_execute", self._asked)
        event.listen(engine, "after_cursor_execute", self._answered)

    def settle(self) -> None:
        """Note that nothing is waited for."""
        with self._lock:
            self._asked_at = None

    def check(self) -> None:
        """Give up what has waited for too long."""
        with self._lock:
            if self._asked_at is None:
                return
            waited = time.monotonic() - self._asked_at
            if waited < self.seconds:
                return
            if self._driver.info.transaction_status.name != "ACTIVE":
                # The answer was an error, of which nobody told here.
                self._asked_at = None
            elif not self._gave_up:
                self._gave_up = True
                self._cancel()
            elif waited >= self.seconds * CUT_FACTOR and self._socket is not None:
                self._socket.shut_down()

    def interrupt(self) -> None:
        """Ask the server to give up the statement that runs, if one does; returns at once."""
        with self._lock:
            if self._asked_at is not None:
                self._cancel()

    def cut(self) -> None:
        """End the connection, whatever it does."""
        with self._lock:
            if self._socket is not None:
                self._socket.shut_down()

    def close(self) -> bool:
        """Forget the connection, and return whether it was given up."""
        with self._lock:
            if self._socket is not None:
                self._socket.close()
            gave_up, self._gave_up = self._gave_up, False
            self._socket = self._driver = self._asked_at = None
            return gave_up

    def end(self) -> None:
        """Forget the connection, and one that is still being opened."""
        with self._lock:
            self._over = True
        self.close()

    def _connected(self, driver: Any, _: Any) -> None:
        with self._lock:
            if self._over:
                return
            opened = Socket(driver.fileno())
            opened.keep_alive()
            if self._socket is not None:
                self._socket.close()
            self._driver, self._socket = driver, opened
            self._asked_at, self._gave_up = time.monotonic(), False

    def _asked(self, *_: Any) -> None:
        with self._lock:
            self._asked_at = time.monotonic()

    def _answered(self, *_: Any) -> None:
        self.settle()

    def _cancel(self) -> None:
        if not can_cancel():
            return
        # The request takes a connection of its own, which may hang just as well.
        threading.Thread(
            target=_cancel, args=(self._driver, self.seconds), name="sa-jobs-cancel", daemon=True
        ).start()


def can_cancel() -> bool:
    """Return whether a statement can be cancelled without stopping all threads meanwhile.

    Before libpq 17 the request blocks, under psycopg's binary packages with the interpreter's lock,
    for as long as the network likes.
    """
    from psycopg import capabilities

    return capabilities.has_cancel_safe()


def _cancel(driver: Any, seconds: float) -> None:
    with contextlib.suppress(Exception):
        driver.cancel_safe(timeout=seconds)


class AnswerWatch(Part):
    """Looks at all connections of a worker, several times in the time that an answer may take."""

    def __init__(self, mailbox: Mailbox, watched: Sequence[Answers]) -> None:
        super().__init__("answers", mailbox)
        self._watched = watched
        self._period = min(LONGEST_PERIOD_SECONDS, *(one.seconds / 8 for one in watched))

    def work(self) -> None:
        """Watch until the end."""
        while not self._ended.wait(self._period):
            for one in self._watched:
                one.check()
