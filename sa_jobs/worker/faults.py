"""Database errors as the worker sees them: try again, give up, or the fault of one row."""

from __future__ import annotations

import logging
import random
import time

from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from sa_jobs import poolers
from sa_jobs.error_text import error_text, without_credentials
from sa_jobs.errors import WorkerError

logger = logging.getLogger("sa_jobs.worker")

READ_ONLY = "25006"
INSUFFICIENT_PRIVILEGE = "42501"
UNDEFINED = ("42P01", "3F000", "42703", "42883")

FIRST_DELAY_SECONDS = 0.1
LONGEST_DELAY_SECONDS = 5.0
LINES_APART_SECONDS = 5.0
SAME_CAUSE_APART_SECONDS = 60.0


def sqlstate(error: BaseException) -> str:
    """Return the error's SQLSTATE, or an empty string."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) or ""


def is_transient(error: BaseException) -> bool:
    """Return whether the same call may succeed later: on a new connection, after a deadlock, ..."""
    if isinstance(error, (OSError, DisconnectionError, PoolTimeoutError)):
        return True
    if _is_the_drivers_own(error):
        return True
    if not isinstance(error, DBAPIError):
        return False
    if error.connection_invalidated or isinstance(error, (OperationalError, InterfaceError)):
        return True
    # A server that has become a standby refuses writes until clients find the new primary.
    return sqlstate(error) == READ_ONLY


def _is_the_drivers_own(error: BaseException) -> bool:
    # As psycopg raises it by itself, while it waits for notifications. Told by name, so that
    # programs which only enqueue, through another driver, do not load it.
    return any(
        kind.__module__.partition(".")[0] == "psycopg"
        and kind.__name__ in ("OperationalError", "InterfaceError")
        for kind in type(error).__mro__
    )


def hopeless(error: BaseException) -> WorkerError | None:
    """Return the WorkerError to stop with, if trying again cannot cure this error."""
    state = sqlstate(error)
    if poolers.forbids_transactions(error):
        return WorkerError(poolers.NO_TRANSACTIONS)
    if state == INSUFFICIENT_PRIVILEGE:
        return WorkerError(
            f"no permission ({first_line(error)}): grant the worker's role SELECT, INSERT, UPDATE "
            "and DELETE on the sa-jobs tables, and USAGE on their schema"
        )
    if state in UNDEFINED:
        return WorkerError(
            f"the sa-jobs tables are absent or too old ({first_line(error)}): run "
            "`alembic upgrade head` in the application, or `sa-jobs db upgrade`"
        )
    return None


def first_line(error: BaseException) -> str:
    """Return the first line of the driver's own message, without the statement."""
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class Recovery:
    """One loop's way back after a lost connection: capped, jittered delays and few log lines.

    A line when the trouble starts and when it is over; one more when its cause has changed and some
    seconds have passed. Trouble that comes and goes is said once a minute.
    """

    def __init__(self, loop: str) -> None:
        self._loop = loop
        self._failures = 0
        self._since = 0.0
        self._cause = ""
        self._logged_at: float | None = None
        self._said = False

    def failed(self, error: BaseException) -> float:
        """Note a failure, and return the seconds to wait before the next try."""
        now = time.monotonic()
        if not self._failures:
            self._since = now
        cause = first_line(error)
        if not sqlstate(error):
            cause = without_credentials(cause)
        apart = SAME_CAUSE_APART_SECONDS if cause == self._cause else LINES_APART_SECONDS
        if self._logged_at is None or now - self._logged_at >= apart:
            self._cause = cause
            self._logged_at = now
            self._said = True
            if is_transient(error):
                logger.warning("%s: %s; trying again until it works", self._loop, cause)
            else:
                # As text, since a traceback may quote the users' data.
                logger.error("%s: unexpected error: %s", self._loop, error_text(error))
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
