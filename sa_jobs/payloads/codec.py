"""Values of one annotated type as JSON, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from sa_jobs.payloads.comparison import difference, field_names
from sa_jobs.payloads.misfit import TOO_DEEP, Misfit, at_key, type_name
from sa_jobs.payloads.problems import problem
from sa_jobs.payloads.pydantic_models import from_json, is_model, to_json
from sa_jobs.payloads.supported import has_tuples


class Codec:
    """Turns values of one type into JSON values and back, and refuses what would not come back."""

    def __init__(self, annotation: Any) -> None:
        self._type = annotation
        self._decoder = msgspec.json.Decoder(annotation, strict=True, dec_hook=from_json)
        self._has_tuples = has_tuples(annotation)

    def encode(self, value: Any, path: str) -> Any:
        """Return a value as JSON values, or raise InvalidJobError or InvalidJobTypeError."""
        plain, misfit = self._encoded(value)
        # Not while the converters' errors are at hand, which may hold the value.
        if misfit is not None:
            raise misfit.error(path)
        return plain

    def decode(self, text: msgspec.Raw, plain: Any, path: str) -> Any:
        """Return the value of JSON text, or raise InvalidJobError or InvalidJobTypeError.

        From the text, so that a Decimal has the digits of a JSON number. `plain` is the same text
        as JSON values.
        """
        value, misfit = self._decoded(text, plain)
        if misfit is not None:
            raise misfit.error(path)
        return value

    def _encoded(self, value: Any) -> tuple[Any, Misfit | None]:
        try:
            plain = msgspec.to_builtins(value, str_keys=True, enc_hook=to_json)
            if self._has_tuples:
                plain = _without_tuples(plain)
        except RecursionError:
            return None, TOO_DEEP
        except Exception:
            return None, _not_json(value)
        try:
            back = msgspec.convert(
                plain, self._type, strict=True, str_keys=True, dec_hook=from_json
            )
            return plain, difference(value, back)
        except RecursionError:
            return None, TOO_DEEP
        except Exception as error:
            return None, problem(error)

    def _decoded(self, text: msgspec.Raw, plain: Any) -> tuple[Any, Misfit | None]:
        try:
            value = self._decoder.decode(text)
            return value, difference(plain, value, stored=True)
        except RecursionError:
            return None, TOO_DEEP
        except Exception as error:
            return None, problem(error)


def _not_json(value: Any) -> Misfit:
    """Return where in a value is what has no form in JSON."""
    path = ""
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
    return Misfit(reason, True, path)


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
