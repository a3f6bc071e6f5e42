"""Database errors as the worker sees them: try again, give up, or the fault of one row."""

from __future__ import annotations

import re

from sqlalchemy.exc import DBAPIError, DisconnectionError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from sa_jobs import poolers
from sa_jobs.errors import WorkerError

READ_ONLY = "25006"
INSUFFICIENT_PRIVILEGE = "42501"
UNDEFINED = ("42P01", "3F000", "42703", "42883")

# What a server says that does not let a session in, of which libpq passes on the text alone.
_REFUSALS = re.compile(
    r"authentication failed|no pg_hba\.conf entry|no password supplied"
    r"|(role|database) .* does not exist|not permitted to log in|permission denied for database"
)


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


def is_refusal(error: BaseException) -> bool:
    """Return whether the server answers, and lets nobody in under the URL's names and password.

    A server that speaks another language than English is taken for one that is away.
    """
    return is_transient(error) and bool(_REFUSALS.search(first_line(error)))


def first_line(error: BaseException) -> str:
    """Return the first line of the driver's own message, without the statement."""
    text = str(getattr(error, "orig", None) or error).strip()
    return text.splitlines()[0] if text else type(error).__name__
