"""The gates of a worker's queues: open while it sleeps, shut when notifications cost too much."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sqlalchemy import Connection

from sa_jobs import presence
from sa_jobs.models import Tables

# So many notifications within that time, and the gates are shut: enqueues that notify are committed
# one at a time, in the whole server. At a lower rate nobody notices.
MANY = 8
WITHIN_SECONDS = 0.05
# How soon a gate that another worker holds open is looked at again: it may have ended.
AGAIN_SECONDS = 1.0
# An enqueue that looks at a gate stands in the way for a microsecond.
_TRIES = 5


class Gates:
    """Opens and shuts the gates on the connection that listens, which holds them open.

    Of several workers one holds a queue's gate open, and the others rely on it, for as long as it
    lives: all who listen are woken.
    """

    def __init__(self, queues: Iterable[str], tables: Tables) -> None:
        self._queues = frozenset(queues)
        self._tables = tables
        self._own: set[str] = set()
        self._others: set[str] = set()
        self._heard: deque[float] = deque(maxlen=MANY)

    @property
    def relies(self) -> bool:
        """Whether they are open, and one of them by the grace of another worker."""
        return bool(self._others)

    def open(self, connection: Connection) -> bool:
        """Open what is shut; return whether there was a gate that was not known to be open."""
        own, relied_on = set(self._own), self._others
        self._others = set()
        for _ in range(_TRIES):
            left = sorted(self._queues - self._own - self._others)
            if not left:
                break
            statement = presence.open_gates(self._tables)
            for queue, holder in connection.execute(statement, {"queues": left}):
                if holder == presence.SELF:
                    self._own.add(queue)
                elif holder == presence.OTHER:
                    self._others.add(queue)
        # A gate that was another worker's may have been shut for a while when it became ours.
        return bool(self._own - own or self._others - relied_on)

    def heard_too_many(self, now: float) -> bool:
        """Note a notification; return whether there were so many that the gates are to be shut."""
        self._heard.append(now)
        return len(self._heard) == MANY and now - self._heard[0] < WITHIN_SECONDS

    def shut(self, connection: Connection) -> None:
        """Shut all gates that are this worker's."""
        self._heard.clear()
        if self._own:
            connection.execute(presence.shut_gates())
        self.forget()

    def forget(self) -> None:
        """Take all gates for shut: so they are after the connection was lost."""
        self._own.clear()
        self._others.clear()
