"""A loop's way back after a lost connection: when to try again, what to say, when to give up."""

from __future__ import annotations

import logging
import random
import time

from sa_jobs.error_text import error_text, without_credentials, without_data
from sa_jobs.errors import WorkerError
from sa_jobs.worker.faults import first_line, hopeless, is_refusal, is_transient, sqlstate

logger = logging.getLogger("sa_jobs.worker")

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
LINES_APART_SECONDS = 5.0
SAME_CAUSE_APART_SECONDS = 60.0
# How long a password or a database may be wrong, as while it is changed or restored.
REFUSED_SECONDS = 300.0
MOST_TRACEBACKS = 20


class Recovery:
    """Capped, jittered delays and few log lines for one loop.

    A line when the trouble starts and when it is over; one more when its cause has changed and some
    seconds have passed, and each minute while it lasts. Trouble that comes and goes is said once a
    minute. Of each unexpected error the traceback is shown once.

    A server that is away is waited for as long as it takes; one that refuses the worker's name or
    password, for five minutes.
    """

    def __init__(self, loop: str) -> None:
        self._loop = loop
        self._failures = 0
        self._since = 0.0
        self._refused_since: float | None = None
        self._cause = ""
        self._logged_at: float | None = None
        self._said = False
        self._shown: set[str] = set()

    def verdict(self, error: BaseException) -> WorkerError | None:
        """Return the WorkerError to stop with, if there is no use in trying on."""
        fatal = hopeless(error)
        if fatal is not None:
            return fatal
        now = time.monotonic()
        if not is_refusal(error):
            self._refused_since = None
            return None
        if self._refused_since is None:
            self._refused_since = now
        if now - self._refused_since < REFUSED_SECONDS:
            return None
        return WorkerError(
            f"the server has refused the worker for {now - self._refused_since:.0f} s "
            f"({first_line(error)}): check the user, the password and the database in its URL, "
            "and start it anew"
        )

    def failed(self, error: BaseException) -> float:
        """Note a failure, and return the seconds to wait before the next try."""
        now = time.monotonic()
        if not self._failures:
            self._since = now
        self._say(error, now)
        ceiling = min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return ceiling * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        """Note that the loop works."""
        if self._failures:
            if self._said:
                logger.info(
                    "%s: works again after %.1f s", self._loop, time.monotonic() - self._since
                )
            self._failures = 0
            self._said = False
            self._refused_since = None

    def _say(self, error: BaseException, now: float) -> None:
        cause = first_line(error)
        if not sqlstate(error):
            cause = without_credentials(cause)
        apart = SAME_CAUSE_APART_SECONDS if cause == self._cause else LINES_APART_SECONDS
        if self._logged_at is not None and now - self._logged_at < apart:
            return
        self._cause = cause
        self._logged_at = now
        self._said = True
        if is_transient(error):
            logger.warning("%s: %s; trying again until it works", self._loop, cause)
        elif cause in self._shown or len(self._shown) >= MOST_TRACEBACKS:
            logger.error("%s: unexpected error again: %s", self._loop, without_data(cause))
        else:
            self._shown.add(cause)
            # As text, since a traceback may quote the users' data.
            logger.error("%s: unexpected error: %s", self._loop, error_text(error))
