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
_INSTEAD = {
    "bytes": "use str, e.g. base64, or a reference to where the bytes are stored",
    "bytearray": "use str, e.g. base64, or a reference to where the bytes are stored",
    "Iterable": "use list or Sequence",
}

_MAPPED = "is a mapped class: pass its id, and load it in the handler"

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
    if isinstance(member, inspect.CustomType):
        kind: Any = member.cls
        if hasattr(kind, "__mapper__"):
            return f"{_name(kind)} {_MAPPED}"
        if kind is object or is_model(kind):
            return None
        return f"{_name(kind)} {_way_out(kind)}"
    if isinstance(member, inspect.DictType):
        key = member.key_type
        while isinstance(key, inspect.Metadata):
            key = key.type
        if not isinstance(key, _KEYS):
            return "the keys of a dict can be str, int, datetime, date, UUID or an Enum"
        return None
    if isinstance(member, inspect.StructType) and member.array_like:
        return f"{_name(member.cls)} is array_like, which no change of its fields survives"
    if isinstance(member, inspect.DataclassType):
        kind = typing.get_origin(member.cls) or member.cls
        if hasattr(kind, "__mapper__"):
            return f"{_name(kind)} {_MAPPED}"
        if hasattr(kind, "__pydantic_validator__"):
            return f"{_name(kind)} is a dataclass of pydantic's: use a model, or a plain dataclass"
        if not dataclasses.is_dataclass(kind):
            return f"{_name(kind)} {_way_out(kind)}"
        return None
    containers = (
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
    if isinstance(member, (*_LEAVES, *containers)):
        return None
    kind = getattr(member, "cls", None)
    name = type(member).__name__.removesuffix("Type").lower() if kind is None else _name(kind)
    return f"{name} {_INSTEAD.get(name, 'is not one that a payload can hold: use a dataclass')}"


def _way_out(kind: Any) -> str:
    instead = _INSTEAD.get(
        getattr(kind, "__name__", ""), "use a dataclass, or pass an id, and look it up"
    )
    return f"is not a type that a payload can hold: {instead}"


def _name(kind: Any) -> str:
    return getattr(kind, "__qualname__", None) or str(kind)
