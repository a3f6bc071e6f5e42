"""What msgspec and pydantic say of a value that does not fit, without the value."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from sa_jobs.payloads.comparison import at_key
from sa_jobs.payloads.pydantic_models import first_problem, is_validation_error

_PLACE = re.compile(r"(?P<reason>.*) - at (?P<key>`key` in )?`\$(?P<path>.*?)`", re.DOTALL)
_OF_TYPE = re.compile(r"expected `[^`]*`, got `\w+`")
# These quote the value.
_QUOTING = ("Invalid enum value", "Invalid value")
_LONGEST_PATH = 200


class Problem(NamedTuple):
    """Why a value does not fit, and where in it; `of_type` if by its type."""

    reason: str
    of_type: bool = False
    path: str = ""


def problem(error: BaseException) -> Problem:
    """Return what is wrong with a value whose conversion was refused with `error`."""
    found = _PLACE.fullmatch(str(error))
    reason, path = str(error), ""
    if found:
        reason, path = found["reason"], found["path"] + ("[...]" if found["key"] else "")
    cause = error.__cause__ or error
    if is_validation_error(cause):
        reason, of_type, places = first_problem(cause)
        # The keys of a dict may be anybody's data.
        inner = (f"[{place}]" if isinstance(place, int) else at_key(place) for place in places)
        return Problem(reason, of_type, path + "".join(inner))
    if not isinstance(error, msgspec.ValidationError) or error.__cause__ is not None:
        # Nobody knows what the words of a class of the users' own quote.
        return Problem(f"its type refuses it with {type(cause).__name__}", path=path)
    if reason.startswith(_QUOTING):
        return Problem("is none of the values that its type allows", path=path)
    reason = reason[:1].lower() + reason[1:]
    return Problem(reason, _OF_TYPE.fullmatch(reason) is not None, path)


def cut(path: str) -> str:
    """Return a path that is not too long to read."""
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
