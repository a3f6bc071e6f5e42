"""Connections in autocommit mode, where a job is committed apart from what it belongs to."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

from sqlalchemy import Connection

from sa_jobs.errors import AutocommitWarning

# Whose lines are no place that a caller could change.
_PASSED_BY = ("sa_jobs", "sqlalchemy")


def is_autocommit(connection: Connection) -> bool:
    """Return whether PostgreSQL commits each statement of a connection at once."""
    return connection.dialect.name == "postgresql" and bool(
        getattr(connection.connection.dbapi_connection, "autocommit", False)
    )


def savepoint(connection: Connection) -> AbstractContextManager[Any]:
    """Begin a savepoint; in autocommit mode there is none, and no transaction to keep usable."""
    return nullcontext() if is_autocommit(connection) else connection.begin_nested()


def warn_if_autocommit(connection: Connection) -> None:
    """Warn, at the line that called the package, of a job that is committed at once."""
    if not is_autocommit(connection):
        return
    message = (
        "the connection is in AUTOCOMMIT mode: the job is committed at once, apart from the "
        "business data, and no rollback takes it back. Enqueue in the transaction that writes the "
        "data, on an engine or connection with another isolation_level; where a job stands alone, "
        'warnings.filterwarnings("ignore", category=sa_jobs.AutocommitWarning)'
    )
    frame = _calling_frame()
    if frame is None:
        warnings.warn(message, AutocommitWarning, stacklevel=2)
        return
    warnings.warn_explicit(
        message,
        AutocommitWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _calling_frame() -> FrameType | None:
    """Return the frame outside this package and SQLAlchemy that called, through a greenlet too."""
    frame: FrameType | None = sys._getframe(1)
    greenlet: Any = None
    while True:
        while frame is not None:
            if frame.f_globals.get("__name__", "").split(".")[0] not in _PASSED_BY:
                return frame
            frame = frame.f_back
        # The stack of a greenlet ends where it was started, by the coroutine that awaits us.
        if greenlet is None:
            module = sys.modules.get("greenlet")
            greenlet = module and module.getcurrent()
        greenlet = greenlet and greenlet.parent
        if greenlet is None:
            return None
        frame = greenlet.gr_frame
