"""Which types a payload can hold: those that come back equal in value and type."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from msgspec import inspect

from sa_jobs.payloads.pydantic_models import is_model

_LEAVES = (
    inspect.AnyType,
    inspect.NoneType,
    inspect.BoolType,
    inspect.IntType,
    inspect.FloatType,
    inspect.StrType,
    inspect.DateTimeType,
    inspect.DateType,
    inspect.TimeType,
    inspect.TimeDeltaType,
    inspect.UUIDType,
    inspect.DecimalType,
    inspect.EnumType,
    inspect.LiteralType,
)
# Floats and decimals are equal to others that are written otherwise.
_KEYS = (
    inspect.AnyType,
    inspect.StrType,
    inspect.IntType,
    inspect.DateTimeType,
    inspect.DateType,
    inspect.UUIDType,
    inspect.EnumType,
    inspect.LiteralType,
)
_CONTAINERS = (
    inspect.Metadata,
    inspect.UnionType,
    inspect.ListType,
    inspect.SetType,
    inspect.FrozenSetType,
    inspect.TupleType,
    inspect.VarTupleType,
    inspect.TypedDictType,
    inspect.StructType,
)
_WAY_OUT = "use a plain dataclass or a model, or pass an id, and look it up in the handler"
_INSTEAD = {
    "bytes": "use str, e.g. base64, or a reference to where the bytes are stored",
    "bytearray": "use str, e.g. base64, or a reference to where the bytes are stored",
    "Iterable": "use list or Sequence",
}

Refusal = tuple[str, str]


def refusal(annotation: Any) -> Refusal | None:
    """Return where inside the type, and why, it cannot be part of a payload, or None if it can.

    Raises NameError where the fields of a class have annotations that do not exist at run time.
    """
    try:
        described = inspect.type_info(annotation)
    except NameError:
        raise
    except Exception as error:
        return "", str(error)
    for place, member in _walk(described):
        reason = _reason(member)
        if reason is not None:
            return place, reason
    return None


def has_tuples(annotation: Any) -> bool:
    """Return whether the type holds tuples, which JSON does not have."""
    kinds = (inspect.TupleType, inspect.VarTupleType)
    return any(isinstance(member, kinds) for _, member in _walk(inspect.type_info(annotation)))


def _walk(described: inspect.Type) -> Iterator[tuple[str, inspect.Type]]:
    """Yield every type inside a type, with its place; a class that holds itself only once."""
    seen: set[Any] = set()
    left = [("", described)]
    while left:
        where, member = left.pop()
        owner = getattr(member, "cls", None)
        if owner is not None:
            if owner in seen:
                continue
            seen.add(owner)
        yield where, member
        left += reversed(list(_members(member, where)))


def _members(member: Any, path: str) -> Iterator[tuple[str, inspect.Type]]:
    if isinstance(member, inspect.Metadata):
        yield path, member.type
    elif isinstance(member, inspect.UnionType):
        yield from ((path, option) for option in member.types)
    elif isinstance(member, inspect.TupleType):
        yield from ((f"{path}[{index}]", item) for index, item in enumerate(member.item_types))
    elif isinstance(member, inspect.DictType):
        yield f"{path}[...]", member.value_type
    elif hasattr(member, "item_type"):
        yield f"{path}[]", member.item_type
    elif hasattr(member, "fields"):
        yield from ((f"{path}.{field.name}", field.type) for field in member.fields)


def _reason(member: Any) -> str | None:
    kind: Any = getattr(member, "cls", None)
    kind = typing.get_origin(kind) or kind
    name = getattr(kind, "__qualname__", None) or type(member).__name__.removesuffix("Type").lower()
    if hasattr(kind, "__mapper__"):
        return f"{name} is a mapped class: pass its id, and load it in the handler"
    if isinstance(member, inspect.DictType):
        keys_fit = isinstance(_without_metadata(member.key_type), _KEYS)
        return None if keys_fit else "the keys of a dict can be str, int, date, UUID or an Enum"
    if isinstance(member, inspect.StructType) and member.array_like:
        return f"{name} is array_like, which no change of its fields survives: use an ordinary one"
    if isinstance(member, inspect.CustomType):
        fits = kind is object or is_model(kind)
    elif isinstance(member, inspect.DataclassType):
        # Not attrs, nor pydantic's dataclasses, whose validators msgspec would pass by.
        fits = dataclasses.is_dataclass(kind) and not hasattr(kind, "__pydantic_validator__")
    else:
        fits = isinstance(member, (*_LEAVES, *_CONTAINERS))
    if fits:
        return None
    return f"{name} is not a type that a payload can hold: {_INSTEAD.get(name, _WAY_OUT)}"


def _without_metadata(described: inspect.Type) -> inspect.Type:
    while isinstance(described, inspect.Metadata):
        described = described.type
    return described
