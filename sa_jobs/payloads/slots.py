"""How the values of one parameter are turned into JSON and back."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from sa_jobs.errors import HandlerError, InvalidJobTypeError
from sa_jobs.payloads.annotations import Missing, resolved
from sa_jobs.payloads.codec import Codec
from sa_jobs.payloads.supported import refusal

_LEAVES: tuple[type, ...] = (str, int, float, bool, types.NoneType)
# JSON already, once the queue has looked into them; under other annotations their members count.
_CONTAINERS = ((dict, dict), (list, list), (dict[str, Any], dict), (list[Any], list))
_ANY_JSON: frozenset[type] = frozenset({*_LEAVES, dict, list})
_WAY_OUT = "import it outside of `if TYPE_CHECKING`, and do not define it inside of a function"


class NotYetDefinedError(Exception):
    """An annotation names what does not exist, perhaps because it is defined farther below."""


class Parameter(NamedTuple):
    """A parameter that a payload can fill, as the function's signature has it."""

    name: str
    annotation: Any
    default: Any = inspect.Parameter.empty


class Refused:
    """Stands in a codec's place for a parameter with an annotation that no payload can fill."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def encode(self, value: Any, path: str) -> Any:
        """Raise InvalidJobTypeError with the reason."""
        raise InvalidJobTypeError(f"{path}: {self._reason}")

    def decode(self, text: Any, plain: Any, path: str) -> Any:
        """Raise InvalidJobTypeError with the reason."""
        raise InvalidJobTypeError(f"{path}: {self._reason}")


class Slot(NamedTuple):
    """A parameter's codec, and the types whose values need none: they are the same as JSON."""

    plain: frozenset[type]
    codec: Codec | Refused


def slot_of(parameter: Parameter, function: Any, *, last: bool) -> Slot | None:
    """Return how the parameter's values are handled, or None if they are plain JSON.

    Raises HandlerError for a parameter without a default whose type no payload can hold, and
    NotYetDefinedError, but for the `last` time, for names that do not exist.
    """
    annotation = resolved(parameter.annotation, function)
    if annotation in (inspect.Parameter.empty, Any, object):
        return None
    if isinstance(annotation, Missing):
        if not last:
            raise NotYetDefinedError(parameter.name)
        missing = f"the annotation {annotation.text!r} does not exist at run time: {_WAY_OUT}"
        return Slot(_ANY_JSON, Refused(missing))
    if parameter.default is None:
        annotation = typing.Optional[annotation]  # noqa: UP045
    try:
        found = refusal(annotation)
    except NameError as error:
        if not last:
            raise NotYetDefinedError(parameter.name) from None
        return Slot(frozenset(), Refused(f"{error}, in the class's annotations: {_WAY_OUT}"))
    if found is None:
        return Slot(frozenset(_plain_types(annotation)), Codec(annotation))
    place, reason = found
    if parameter.default is inspect.Parameter.empty and not last:
        raise HandlerError(f"parameter {parameter.name + place!r}: {reason}")
    return Slot(frozenset(), Refused(reason))


def _plain_types(annotation: Any) -> Iterator[type]:
    """Yield the types of the values that come back from JSON as they are."""
    while hasattr(annotation, "__supertype__"):
        annotation = annotation.__supertype__
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for member in typing.get_args(annotation):
            yield from _plain_types(member)
    elif annotation in _LEAVES:
        yield annotation
    else:
        yield from (kind for container, kind in _CONTAINERS if annotation == container)
