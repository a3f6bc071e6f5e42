"""Whether a value that was turned into JSON and back is still the same, and where it is not."""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

import msgspec

from sa_jobs.payloads.misfit import Misfit, at_key, listed, type_name
from sa_jobs.payloads.pydantic_models import is_model

Check = Callable[[Any, Any, bool], "Misfit | None"]
_OTHER_VALUE = Misfit("would come back as another value")


def difference(given: Any, back: Any, *, stored: bool = False) -> Misfit | None:
    """Return the first difference that matters between a value and what came back of it, or None.

    A value may be given as JSON where the annotation makes something else of it: text for a UUID, a
    dict for a dataclass, an int for a float of the same value. Anything else must be the same in
    value and type. With `stored` the given value is what the database holds, where a number may
    stand for a Decimal.
    """
    return _check_for(type(back))(given, back, stored)


def _choose(kind: Any) -> Check:
    check = _CHECKS.get(kind)
    if check is not None:
        return check
    names = field_names(kind)
    if names is not None:
        return functools.partial(_of_object, names)
    return _of_model if is_model(kind) else _of_leaf


_check_for: Callable[[Any], Check] = functools.lru_cache(maxsize=1024)(_choose)


def field_names(kind: Any) -> dict[str, str] | None:
    """Return the fields of a dataclass or Struct, names in JSON -> attributes, or None."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return {field.name: field.name for field in dataclasses.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
    return None


def _of_json(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is not type(back):
        return _other_type(given, back)
    return None if given == back else _OTHER_VALUE


def _of_float(given: Any, back: float, stored: bool) -> Misfit | None:
    if type(given) not in (float, int):
        return _other_type(given, back)
    # NaN is refused where the JSON is written, and named there.
    return None if given == back or given != given else _OTHER_VALUE


def _of_dict(given: Any, back: dict[Any, Any], stored: bool) -> Misfit | None:
    if type(given) is not dict:
        return _other_type(given, back)
    if len(given) != len(back):
        return _surplus(key for key in given if key not in back)
    # In the order given, so that keys which the annotation converts find their like.
    for (key, value), (other_key, other) in zip(given.items(), back.items(), strict=True):
        if type(key) is type(other_key):
            if key is not other_key and difference(key, other_key, stored=stored):
                return _OTHER_VALUE
        elif type(key) is not str:
            return _of_key(key, other_key)
        found = _check_for(type(other))(value, other, stored)
        if found:
            return found.below(at_key(key))
    return None


def _of_sequence(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is not type(back) and type(given) is not list:
        return _other_type(given, back)
    if len(given) != len(back):
        return _OTHER_VALUE
    for index, (one, other) in enumerate(zip(given, back, strict=True)):
        found = _check_for(type(other))(one, other, stored)
        if found:
            return found.below(f"[{index}]")
    return None


def _of_set(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is type(back):
        if given != back:
            return _OTHER_VALUE
        # Equal members may differ all the same, as 1 and True.
        others = {other: other for other in back}
        found = (difference(member, others[member], stored=stored) for member in given)
        return next(filter(None, found), None)
    if type(given) is not list:
        return _other_type(given, back)
    return None if len(given) == len(back) else Misfit("holds the same member twice")


def _of_object(names: dict[str, str], given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is type(back):
        for name in names.values():
            back_value = getattr(back, name, None)
            found = _check_for(type(back_value))(getattr(given, name, None), back_value, stored)
            if found:
                return found.below(f".{name}")
        return None
    if type(given) is not dict:
        return _other_type(given, back)
    tag = getattr(getattr(back, "__struct_config__", None), "tag_field", None)
    surplus = given.keys() - names.keys() - {tag}
    if surplus:
        return _surplus(sorted(surplus, key=str))
    if hasattr(back, "__post_init__"):
        return None  # It may make of its fields what it likes.
    for key, name in names.items():
        if key in given:
            back_value = getattr(back, name, None)
            found = _check_for(type(back_value))(given[key], back_value, stored)
            if found:
                return found.below(f".{name}")
    return None


def _of_model(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is type(back):
        return None if given == back else _OTHER_VALUE
    # What a model makes of JSON, and which keys it drops, is its own affair.
    return _other_type(given, back) if is_model(type(given)) else None


def _of_leaf(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is type(back):
        return None if given == back else _OTHER_VALUE
    return None if type(given) in (str, int) else _other_type(given, back)


def _of_decimal(given: Any, back: Decimal, stored: bool) -> Misfit | None:
    if type(given) is Decimal:
        return None if given.as_tuple() == back.as_tuple() else _OTHER_VALUE
    # A float is no exact decimal; a number in the database is.
    taken = type(given) in (str, int) or (stored and type(given) is float)
    return None if taken else _other_type(given, back)


def _of_time(given: Any, back: Any, stored: bool) -> Misfit | None:
    if type(given) is not type(back):
        return None if type(given) is str else _other_type(given, back)
    offset = given.utcoffset()
    # Which of two hours a naive time means has no form in ISO 8601.
    folded = offset is None and given.fold != back.fold
    same = given == back and offset == back.utcoffset() and not folded
    return None if same else _OTHER_VALUE


_CHECKS: dict[Any, Check] = {
    **dict.fromkeys((str, int, bool, type(None)), _of_json),
    float: _of_float,
    dict: _of_dict,
    **dict.fromkeys((list, tuple), _of_sequence),
    **dict.fromkeys((set, frozenset), _of_set),
    Decimal: _of_decimal,
    **dict.fromkeys((dt.datetime, dt.time), _of_time),
}


def _other_type(given: Any, back: Any) -> Misfit:
    reason = f"{type_name(given)} would come back as {type_name(back)}"
    return Misfit(reason, of_type=True)


def _of_key(given: Any, back: Any) -> Misfit:
    reason = f"has a key of type {type_name(given)}, which would come back as {type_name(back)}"
    return Misfit(reason, of_type=True)


def _surplus(keys: Iterable[Any]) -> Misfit:
    return Misfit(f"has keys that its type does not have: {listed(list(keys))}")
