"""pydantic's models in payloads; pydantic itself is never imported unless the host has done so."""

from __future__ import annotations

import json
import sys
from typing import Any

# What a validator says may quote the value.
_OWN_WORDS = ("value_error", "assertion_error")


def is_model(kind: Any) -> bool:
    """Return whether this is a class of pydantic's models: whoever has one has imported it."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def to_json(value: Any) -> Any:
    """Return a model as JSON values (msgspec calls this for what it does not know)."""
    if is_model(type(value)):
        # Without computed fields, which the model would refuse or drop again.
        return value.model_dump(mode="json", by_alias=True, round_trip=True, warnings="error")
    raise TypeError(f"{type(value).__qualname__} is not a type that a payload can hold")


def from_json(kind: Any, value: Any) -> Any:
    """Return JSON values as an instance of the model `kind` (msgspec calls this)."""
    if is_model(kind):
        # From text: as JSON a strict model takes "2030-01-01" for a date, but not "5" for an int.
        return kind.model_validate_json(json.dumps(value), strict=True)
    return value  # annotated `object`


def is_validation_error(error: BaseException | None) -> bool:
    """Return whether an exception is pydantic's list of what does not fit."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(error, pydantic.ValidationError)


def first_problem(error: Any) -> tuple[str, bool, tuple[str | int, ...]]:
    """Return why a value does not fit a model, whether by its type, and where.

    Of several problems the first, without the value, and without what may quote it.
    """
    found = error.errors(include_url=False, include_context=False, include_input=False)[0]
    kind, place = found["type"], found["loc"]
    if kind in _OWN_WORDS:
        return f"a validator of the model refuses it ({kind})", False, place
    return found["msg"], kind.endswith("_type"), place
