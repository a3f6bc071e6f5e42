"""When to look for jobs again: at once, soon, or after a sleep that enqueues can end.

A worker that found nothing looks again every few milliseconds for a tenth of a second. Only then
does it announce that it sleeps, looks once more, and waits for a notification or the poll interval.
Without that linger a busy worker would announce sleep between any two jobs, and every enqueue
would pay for a notification.
"""

from __future__ import annotations

import random
import time

LINGER_SECONDS = 0.1
SHORTEST_SECONDS = 0.002
LONGEST_SECONDS = 0.025


class Pace:
    """Decides when the next claim is due. `poll` is the interval while asleep, in seconds."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self.announces = False
        """Whether to announce sleep: it is of use once notifications reach the worker."""
        self._idle_since: float | None = None
        self._announced_until = 0.0
        self._next = 0.0

    def due_in(self) -> float:
        """Return the seconds until the next claim, 0 if it is due."""
        return max(0.0, self._next - time.monotonic())

    def hurry(self) -> None:
        """Something happened: look for jobs at once, and linger."""
        self._idle_since = None
        self._next = 0.0

    def postpone(self, seconds: float) -> None:
        """Look for jobs again after this time: the database is not to be reached."""
        self._next = time.monotonic() + seconds

    def found_nothing(self) -> bool:
        """Note an empty claim; return whether sleep is to be announced before the next one."""
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        idle = now - self._idle_since
        if idle < LINGER_SECONDS:
            self._next = now + min(LONGEST_SECONDS, max(SHORTEST_SECONDS, idle / 4))
            return False
        if self.announces and self._announced_until < now + self.enough_seconds:
            self._announced_until = now + self.announced_seconds
            # What was enqueued just before the announcement has notified nobody.
            self._next = now
            return True
        self._next = now + self._poll * random.uniform(0.8, 1.2)
        return False

    @property
    def announced_seconds(self) -> float:
        """How long an announcement of sleep lasts.

        No longer than it needs to: of a worker that has awoken it stands until then, and enqueues
        go on to pay. A second more, so that many workers together write it once a second.
        """
        return self.enough_seconds + 1.0

    @property
    def enough_seconds(self) -> float:
        """How long an announcement must still last to need no renewal."""
        return self._poll * 1.3
