"""Opening a connection: on a thread of its own, since nothing can interrupt the attempt."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from sqlalchemy import Connection, Engine, event

# The least that libpq takes.
LEAST_SECONDS = 2


class Opening(threading.Thread):
    """One attempt to connect, which puts itself into `ended` when it has ended.

    Where the host's URL and arguments say nothing else, each address gets `seconds`: the system's
    own bound is minutes, in which the network may have come back.
    """

    def __init__(
        self,
        open_connection: Callable[[], Connection],
        ended: SimpleQueue[Opening | None],
        seconds: float,
    ) -> None:
        super().__init__(name="sa-jobs-connect", daemon=True)
        self.seconds = max(LEAST_SECONDS, round(seconds))
        self._open = open_connection
        self._ended = ended
        self._lock = threading.Lock()
        # All of these only under the lock.
        self._connection: Connection | None = None
        self._error: BaseException | None = None
        self._abandoned = False

    def run(self) -> None:
        """Connect (the thread's own function)."""
        connection, failure = None, None
        try:
            connection = self._open()
        except BaseException as error:
            failure = error
        with self._lock:
            self._connection, self._error = connection, failure
            if self._abandoned and connection is not None:
                _close(connection)
        self._ended.put(self)

    def result(self) -> Connection:
        """Return the connection of an attempt that has ended, or raise its error."""
        with self._lock:
            connection, self._connection = self._connection, None
            error, self._error = self._error, None
        if error is not None:
            raise error
        assert connection is not None
        return connection

    def abandon(self) -> None:
        """Close the connection as soon as there is one."""
        with self._lock:
            self._abandoned = True
            if self._connection is not None:
                _close(self._connection)


def bound_attempts(engine: Engine) -> None:
    """Give the attempts of an `Opening` on this engine their bound; all others stay as they are."""
    # The dialect is the host's, and its arguments are nowhere else to be reached.
    if not event.contains(engine, "do_connect", _connect):
        event.listen(engine, "do_connect", _connect)


def _connect(dialect: Any, _: Any, arguments: Any, options: dict[str, Any]) -> Any:
    opening = threading.current_thread()
    if not isinstance(opening, Opening) or "PGCONNECT_TIMEOUT" in os.environ:
        return None
    return dialect.connect(*arguments, **{"connect_timeout": opening.seconds, **options})


def _close(connection: Connection) -> None:
    try:
        connection.invalidate()
    finally:
        connection.close()
