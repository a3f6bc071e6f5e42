"""An exception as text that can be stored: whatever its own text does, cleaned, cut to size."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

from sqlalchemy.exc import DBAPIError, StatementError

from sa_jobs.limits import MAX_ERROR_BYTES

_CUT = "\n... cut ...\n"
_DETAIL = re.compile(r"\nDETAIL:.*", re.DOTALL)
# What drivers put after the server's message: the row, the statement, data that was being read.
_AFTER_MESSAGE = re.compile(r"\n(LINE \d+|DETAIL|QUERY|CONTEXT|STATEMENT):.*", re.DOTALL)
# pg8000 has the fields of a message as a dict: its text, severity, SQLSTATE and hint are kept.
_FIELDS = "SVCMH"
_DRIVERS = ("psycopg", "psycopg2", "asyncpg", "pg8000", "sqlalchemy")


def error_text(error: BaseException) -> str:
    """Return the exception's traceback as text that PostgreSQL can hold; never raises.

    What holds the users' data is left out, of the exception itself too: the parameters of SQL
    statements, and what follows PostgreSQL's messages, which quotes keys and rows. Text beyond
    the stated size is cut out of the middle: the end of a traceback says what happened.
    """
    try:
        hide_data(error)
        text = "".join(traceback.format_exception(error))
    except BaseException as failure:
        text = f"{_kind(error)} (its traceback cannot be formatted: {_kind(failure)})"
    return storable(text.strip())


def message_text(error: BaseException) -> str:
    """Return the exception's own message as text that PostgreSQL can hold; never raises."""
    try:
        # Exactly a str: a subclass may do anything when it is cut or encoded.
        text = str.__str__(str(error))
    except BaseException as failure:
        text = f"{_kind(error)} (it has no text: {_kind(failure)})"
    return storable(text)


def storable(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """Return text without what PostgreSQL cannot hold, cut to `max_bytes` in UTF-8."""
    if len(text) > 2 * max_bytes:
        # What is cut out below all the same; escaping it first would take several times its memory.
        text = text[:max_bytes] + text[-max_bytes:]
    encoded = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(encoded) > max_bytes:
        head = (max_bytes - len(_CUT)) // 4
        tail = max_bytes - len(_CUT) - head
        encoded = encoded[:head] + _CUT.encode() + encoded[-tail:]
    return encoded.decode("utf-8", "ignore")


def without_data(text: str) -> str:
    """Return a database's message without what may quote a row, a statement or its data."""
    return _AFTER_MESSAGE.sub("", text)


def without_credentials(text: str) -> str:
    """Return a driver's message about a connection without what may be the end of a password.

    One with an unescaped @ in it ends up in what the driver takes for the host.
    """
    return re.sub(r"[^\s'\"]*@", "***@", text)


def hide_data(error: BaseException) -> None:
    """Take the users' data out of an exception and all that it holds; never raises.

    What is left out is what `error_text` says.
    """
    for member in all_of(error):
        # Exceptions of the users' own may have attributes that do anything.
        with contextlib.suppress(BaseException):
            _clean(member)


def let_go(error: BaseException) -> None:
    """Clear the locals of the frames that an exception and all that it holds came by; never raises.

    They hold whatever the handler had at hand, and often the exception itself: such a circle stays
    in memory until the garbage collector finds it. So it is with every error of SQLAlchemy's.
    """
    for member in all_of(error):
        with contextlib.suppress(BaseException):
            traceback.clear_frames(member.__traceback__)


def all_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception, its causes and contexts, and the members of groups, each once."""
    seen: set[int] = set()
    left: list[Any] = [error]
    while left:
        current = left.pop()
        # Not isinstance(), which also believes what an object says of its class.
        if not issubclass(type(current), BaseException) or id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        with contextlib.suppress(BaseException):
            left += [current.__cause__, current.__context__]
        with contextlib.suppress(BaseException):
            # An exception group; other classes may use the name for anything.
            members = getattr(current, "exceptions", None)
            left += members if isinstance(members, (list, tuple)) else ()


def _clean(error: BaseException) -> None:
    if isinstance(error, StatementError):
        error.hide_parameters = True
    if isinstance(error, DBAPIError) and error.orig is not None and _has_fields(error.orig):
        # SQLAlchemy has the dict as text.
        _clean(error.orig)
        kind = type(error.orig)
        error.args = (f"({kind.__module__}.{kind.__name__}) {error.orig}",)
    modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
    pattern = _AFTER_MESSAGE if modules.intersection(_DRIVERS) else _DETAIL
    if "asyncpg" in modules and getattr(error, "detail", None):
        error.detail = None  # type: ignore[attr-defined]  # Its text is put together when asked for.
    cleaned = tuple(_cleaned(argument, pattern) for argument in error.args)
    if cleaned != error.args:
        error.args = cleaned


def _cleaned(argument: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(argument, str):
        return pattern.sub("", argument)
    if isinstance(argument, dict) and {"S", "C", "M"} <= argument.keys():
        return {name: text for name, text in argument.items() if name in _FIELDS}
    return argument


def _kind(error: BaseException) -> str:
    try:
        return str.__str__(type(error).__name__)
    except BaseException:
        return "an exception without a name"


def _has_fields(error: BaseException) -> bool:
    return len(error.args) == 1 and isinstance(error.args[0], dict)
