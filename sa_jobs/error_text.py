"""An exception as text that can be stored: whatever its own text does, cleaned, cut to size."""

from __future__ import annotations

import traceback

from sqlalchemy.exc import StatementError

from sa_jobs.limits import MAX_ERROR_BYTES

_CUT = "\n... cut ...\n"
_DETAIL = "\nDETAIL:"


def error_text(error: BaseException) -> str:
    """Return the exception's traceback as text that PostgreSQL can hold; never raises.

    What holds the users' data is left out, of the exception itself too: the parameters of SQL
    statements, and the DETAIL of PostgreSQL's messages, which quotes keys and rows. Text beyond
    the stated size is cut out of the middle: the end of a traceback says what happened.
    """
    try:
        _hide_data(error)
        text = "".join(traceback.format_exception(error))
    except Exception as failure:
        text = (
            f"{type(error).__name__} (its traceback cannot be formatted: {type(failure).__name__})"
        )
    return storable(text.strip())


def storable(text: str, max_bytes: int = MAX_ERROR_BYTES) -> str:
    """Return text without what PostgreSQL cannot hold, cut to `max_bytes` in UTF-8."""
    encoded = text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace")
    if len(encoded) > max_bytes:
        head = (max_bytes - len(_CUT)) // 4
        tail = max_bytes - len(_CUT) - head
        encoded = encoded[:head] + _CUT.encode() + encoded[-tail:]
    return encoded.decode("utf-8", "ignore")


def _hide_data(error: BaseException) -> None:
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        current = left.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, StatementError):
            current.hide_parameters = True
        if any(isinstance(argument, str) and _DETAIL in argument for argument in current.args):
            current.args = tuple(
                argument.partition(_DETAIL)[0] if isinstance(argument, str) else argument
                for argument in current.args
            )
        left += [current.__cause__, current.__context__]
        # An exception group; other classes may use the name for anything.
        members = getattr(current, "exceptions", None)
        if isinstance(members, (list, tuple)):
            left += [member for member in members if isinstance(member, BaseException)]
