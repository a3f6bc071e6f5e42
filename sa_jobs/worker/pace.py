"""When to look for jobs again: at once, soon, or after a sleep that enqueues can end.

With the gates of its queues open, each enqueue notifies the worker, which sleeps whenever it finds
nothing: until a notification or the poll interval. So it is until there are so many notifications
that the enqueues pay for them. Then the gates are shut, and the worker looks every few
milliseconds, until it has found nothing for a tenth of a second. It asks for open gates again, and
looks once more when they are.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

LINGER_SECONDS = 0.1
SHORTEST_SECONDS = 0.002
LONGEST_SECONDS = 0.025
# Of the time for which the gates have been open. An enqueue from before that notifies nobody,
# however late it is committed: it waits for so much of that time at most.
LATENESS = 0.1


class Pace:
    """Decides when the next claim is due. `poll` is the interval while asleep, in seconds.

    `open_gates` is called when the worker is about to sleep; it returns at once.
    """

    def __init__(self, poll: float, open_gates: Callable[[], None]) -> None:
        self._poll = poll
        self._open_gates = open_gates
        self.hears = False
        """Whether notifications reach the worker, so that gates are of use."""
        self._opened_at: float | None = None
        self._has_asked = False
        self._idle_since: float | None = None
        self._next = 0.0

    def due_in(self) -> float:
        """Return the seconds until the next claim, 0 if it is due."""
        return max(0.0, self._next - time.monotonic())

    def hurry(self) -> None:
        """Something happened: look for jobs at once, and linger."""
        self._idle_since = None
        self._has_asked = False
        self._next = 0.0

    def postpone(self, seconds: float) -> None:
        """Look for jobs again after this time: the database is not to be reached."""
        self._next = time.monotonic() + seconds

    def gates_opened(self) -> None:
        """Look for jobs at once: what was enqueued just before has notified nobody."""
        self._opened_at = time.monotonic()
        self._next = 0.0

    def gates_shut(self) -> None:
        """Look for jobs at once, and linger."""
        self._opened_at = None
        self.hurry()

    def found_nothing(self) -> None:
        """Note an empty claim: look again soon, or go to sleep."""
        now = time.monotonic()
        if self._idle_since is None:
            self._idle_since = now
        idle = now - self._idle_since
        wait = self._poll
        if self._opened_at is not None:
            wait = min(wait, max(LONGEST_SECONDS, LATENESS * (now - self._opened_at)))
        elif idle < LINGER_SECONDS:
            self._next = now + min(LONGEST_SECONDS, max(SHORTEST_SECONDS, idle / 4))
            return
        elif self.hears and not self._has_asked:
            self._has_asked = True
            self._open_gates()
        self._next = now + wait * random.uniform(0.8, 1.2)
