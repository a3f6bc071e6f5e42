"""Values of one annotated type as JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.payloads.comparison import at_key, difference, field_names, type_name
from sa_jobs.payloads.problems import cut, problem
from sa_jobs.payloads.pydantic_models import from_json, is_model, to_json
from sa_jobs.payloads.supported import has_tuples

_TOO_DEEP = "is nested too deep, or contains itself"


class Codec:
    """Turns values of one type into JSON values and back, and refuses what would not come back."""

    def __init__(self, annotation: Any) -> None:
        self._type = annotation
        self._decoder = msgspec.json.Decoder(annotation, strict=True, dec_hook=from_json)
        self._has_tuples = has_tuples(annotation)

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON values, or raise InvalidJobError or InvalidJobTypeError."""
        try:
            plain = msgspec.to_builtins(value, str_keys=True, enc_hook=to_json)
            if self._has_tuples:
                plain = _without_tuples(plain)
        except RecursionError:
            raise InvalidJobError(f"{cut(path)}: {_TOO_DEEP}") from None
        except Exception:
            raise _not_json(value, path) from None
        try:
            back = msgspec.convert(
                plain, self._type, strict=True, str_keys=True, dec_hook=from_json
            )
            found = difference(value, back)
        except RecursionError:
            raise InvalidJobError(f"{cut(path)}: {_TOO_DEEP}") from None
        except Exception as error:
            raise _refused(*problem(error), path) from None
        if found is not None:
            raise _refused(*found, path)
        return plain

    def decode(self, text: msgspec.Raw, plain: Any, path: str) -> Any:
        """Return the value of JSON text, or raise InvalidJobError if it does not fit the type.

        From the text, so that a Decimal has the digits of a JSON number. `plain` is the same text
        as JSON values.
        """
        try:
            value = self._decoder.decode(text)
            found = difference(plain, value, stored=True)
        except RecursionError:
            raise InvalidJobError(f"{cut(path)}: {_TOO_DEEP}") from None
        except Exception as error:
            raise _refused(*problem(error), path) from None
        if found is not None:
            raise _refused(*found, path)
        return value


def _refused(
    reason: str, of_type: bool, place: str, path: str
) -> InvalidJobError | InvalidJobTypeError:
    kind = InvalidJobTypeError if of_type else InvalidJobError
    return kind(f"{cut(path + place)}: {reason}")


def _not_json(value: Any, path: str) -> InvalidJobTypeError:
    """Return the error for a value that has no form in JSON, with the place in it."""
    while True:
        for place, member in _members(value, path):
            try:
                msgspec.to_builtins(member, str_keys=True, enc_hook=to_json)
            except Exception:
                value, path = member, place
                break
        else:
            break
    if type(value) is dict:
        reason = "has keys of a type that JSON has no form for"
    elif is_model(type(value)):
        reason = f"the model {type(value).__qualname__} cannot be written as JSON"
    else:
        reason = f"{type_name(value)} is not a type that a payload can hold"
    return InvalidJobTypeError(f"{cut(path)}: {reason}")


def _members(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, member in value.items():
            yield path + at_key(key), member
    elif isinstance(value, (list, tuple)):
        yield from ((f"{path}[{index}]", member) for index, member in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{path}[...]", member) for member in value)
    elif dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct):
        kind: Any = type(value)
        names = field_names(kind) or {}
        yield from ((f"{path}.{name}", getattr(value, name, None)) for name in names.values())


def _without_tuples(value: Any) -> Any:
    if type(value) is dict:
        return {key: _without_tuples(member) for key, member in value.items()}
    if type(value) in (list, tuple):
        return [_without_tuples(member) for member in value]
    return value
