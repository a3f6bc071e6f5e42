"""What the server refuses in a step, as one line that says what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import DBAPIError

from sa_jobs.errors import MigrationError

# Duplicate table (or index), object, function, column, schema.
_TAKEN = ("42P07", "42710", "42723", "42701", "42P06")
# Undefined table, object, column, function.
_MISSING = ("42P01", "42704", "42703", "42883")
_FORBIDDEN = "42501"
_NEEDED = "2BP01"


@contextmanager
def refusals(what: str, schema: str | None, *, fresh: bool) -> Iterator[None]:
    """Raise a MigrationError for what the server refuses; `what` says what could not be done."""
    try:
        yield
    except DBAPIError as error:
        advice = _advice(sqlstate(error), schema, fresh=fresh)
        if advice is None:
            raise
        raise MigrationError(f"{what}: {_message(error)}; {advice}") from error


def _advice(state: str | None, schema: str | None, *, fresh: bool) -> str | None:
    if state in _TAKEN and fresh:
        return (
            "that is not of these tables: choose another name= or schema=, or move it away, and "
            "run this again"
        )
    if state in _TAKEN:
        return (
            "if create_all() of this release made it beside the older tables, drop it and run "
            "this again (call create_all() on new databases only, and in others leave our tables "
            "out); if it is not of sa-jobs, move it away"
        )
    if state in _MISSING:
        return (
            "the tables are not as the steps before have left them: put back what was changed by "
            "hand (`sa-jobs migrations sql` prints what the steps make), and run this again"
        )
    if state == _FORBIDDEN:
        create = f'CREATE ON SCHEMA "{schema}"' if schema else "CREATE ON the SCHEMA"
        return (
            "run the migration as the owner of the tables, who also needs the right to create "
            f"some: GRANT {create}"
        )
    if state == _NEEDED:
        return "drop what depends on our tables first, in your own revision, and run this again"
    return None


def sqlstate(error: DBAPIError) -> str | None:
    """Return the server's code of an error, whatever the driver."""
    original: Any = error.orig
    for attribute in ("sqlstate", "pgcode"):
        state: str | None = getattr(original, attribute, None)
        if state is not None:
            return state
    # pg8000 gives the fields of the server's message.
    fields = original.args[0] if original is not None and original.args else None
    return fields.get("C") if isinstance(fields, dict) else None


def _message(error: DBAPIError) -> str:
    """Return the server's message and detail as one line."""
    original: Any = error.orig
    fields = original.args[0] if original.args and isinstance(original.args[0], dict) else {}
    diagnosis = getattr(original, "diag", None)
    # asyncpg's own error is the cause of what SQLAlchemy raises.
    cause = original.__cause__
    message = (
        getattr(diagnosis, "message_primary", None)
        or fields.get("M")
        or getattr(cause, "message", None)
        or str(cause or original)
    )
    detail = (
        getattr(diagnosis, "message_detail", None)
        or fields.get("D")
        or getattr(cause, "detail", None)
    )
    return " ".join(f"{message} ({detail})".split() if detail else str(message).split())
