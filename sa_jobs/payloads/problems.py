"""What msgspec and pydantic say of a value that does not fit, without the value."""

from __future__ import annotations

import re

import msgspec

from sa_jobs.payloads.misfit import Misfit, at_key
from sa_jobs.payloads.pydantic_models import first_problem, is_validation_error

_PLACE = re.compile(r"(?P<reason>.*) - at (?P<key>`key` in )?`\$(?P<path>.*?)`", re.DOTALL)
_OF_TYPE = re.compile(r"expected `[^`]*`, got `\w+`")
# These quote the value.
_QUOTING = ("Invalid enum value", "Invalid value")


def problem(error: BaseException) -> Misfit:
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
        return Misfit(reason, of_type, path + "".join(inner))
    if not isinstance(error, msgspec.ValidationError) or error.__cause__ is not None:
        # Nobody knows what the words of a class of the users' own quote.
        return Misfit(f"its type refuses it with {type(cause).__name__}", path=path)
    if reason.startswith(_QUOTING):
        return Misfit("is none of the values that its type allows", path=path)
    reason = reason[:1].lower() + reason[1:]
    return Misfit(reason, _OF_TYPE.fullmatch(reason) is not None, path)
