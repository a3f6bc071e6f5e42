"""The columns of a caller's select: which are the payload's keys, and which set options."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Select, SelectBase
from sqlalchemy.exc import InvalidRequestError

from sa_jobs import limits, statements
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError

_NAME_RULE = f"1 to {limits.MAX_NAME_BYTES} bytes in UTF-8, without control characters"
_KEY_RULE = f"1 to {limits.MAX_KEY_BYTES} bytes in UTF-8"

# What the value of an option must be, in the words of an error.
RULES = {
    "queue": _NAME_RULE,
    "tenant": _NAME_RULE,
    "priority": f"from {limits.MIN_PRIORITY} to {limits.MAX_PRIORITY}",
    "run_at": "a finite time in the years 1 to 9999",
    "idempotency_key": _KEY_RULE,
    "unique_key": _KEY_RULE,
}


def payload_columns(query: Any) -> list[str]:
    """Return the payload's keys that a select gives, or raise an error that says what is wrong."""
    return [name for name in column_names(query) if name not in statements.OPTION_LABELS]


def column_names(query: Any) -> list[str]:
    """Return the names of a select's columns, payload keys and options."""
    if not isinstance(query, SelectBase):
        raise InvalidJobTypeError(f"query must be a select(), not {type(query).__name__}")
    described = query.column_descriptions if isinstance(query, Select) else []
    if any(entry["name"] in (None, "*") for entry in described):
        raise InvalidJobError(
            "the select has columns as text, whose names are not known: "
            "use columns, or literal_column(...).label(...)"
        )
    try:
        keys = query.subquery().c.keys()
    except InvalidRequestError as error:
        raise InvalidJobError(f"the select has two columns of one name: {error}") from None
    names: list[str] = []
    given: set[str] = set()
    for index, (name, column) in enumerate(zip(keys, query.selected_columns, strict=True)):
        if name == "_no_label":
            raise InvalidJobError(f"column {index} of the select has no name: give it a label()")
        # SQLAlchemy would name the second of two anew, e.g. "id_1".
        own_name = getattr(column, "name", None) or name
        if own_name in given:
            raise InvalidJobError(
                f"the select has two columns named {own_name!r}: label() one of them"
            )
        given.add(own_name)
        if name.startswith("sa_jobs_") and name not in statements.OPTION_LABELS:
            raise InvalidJobError(
                f"the select's column {name!r} is none of the options "
                f"{', '.join(sorted(statements.OPTION_LABELS))}"
            )
        names.append(name)
    return names
