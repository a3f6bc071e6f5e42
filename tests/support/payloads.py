"""Types for payloads, and all that can be made of them."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import uuid
from decimal import Decimal
from typing import Any, Literal, NewType

import msgspec
import pydantic
from hypothesis import strategies as st
from typing_extensions import NotRequired, TypedDict


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Size(enum.IntEnum):
    BIG = 9


OrderId = NewType("OrderId", int)


@dataclasses.dataclass
class Item:
    sku: str
    price: Decimal
    colour: Colour | None = None


@dataclasses.dataclass
class Order:
    number: uuid.UUID
    placed_at: dt.datetime
    items: list[Item]


@dataclasses.dataclass
class Tree:
    name: str
    branches: list[Tree] = dataclasses.field(default_factory=list)


class Address(TypedDict):
    street: str
    since: NotRequired[dt.date]


class Circle(msgspec.Struct, tag=True, rename="camel"):
    half_width: Decimal


class Square(msgspec.Struct, tag=True, omit_defaults=True):
    side: int
    corners: list[str] = []


class Model(pydantic.BaseModel):
    id: uuid.UUID
    price: Decimal
    at: dt.datetime

    @pydantic.field_validator("price")
    @classmethod
    def positive(cls, value: Decimal) -> Decimal:
        if value < 0:
            raise ValueError(f"secret: {value}")
        return value


@dataclasses.dataclass
class Contact:
    model: Model


Pair = tuple[Any, st.SearchStrategy[Any]]

_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
_zones = st.none() | st.timezones() | st.just(dt.timezone.utc)
# jsonb gives -0.0 back as 0.0, its equal.
_floats = st.floats(allow_nan=False, allow_infinity=False).map(lambda number: number + 0.0)
_decimals = st.decimals(allow_nan=False, allow_infinity=False)
_leaves: list[Pair] = [
    (str, _text),
    (int, st.integers()),
    (bool, st.booleans()),
    (float, _floats),
    (Decimal, _decimals),
    (dt.datetime, st.datetimes(timezones=_zones)),
    (dt.date, st.dates()),
    (dt.time, st.times(timezones=st.none() | st.just(dt.timezone.utc))),
    (dt.timedelta, st.timedeltas()),
    (uuid.UUID, st.uuids()),
    (Colour, st.sampled_from(Colour)),
    (Size, st.sampled_from(Size)),
    (Literal["a", "b"], st.sampled_from(["a", "b"])),
    (OrderId, st.integers()),
    (Item, st.builds(Item, _text, _decimals, st.none() | st.sampled_from(Colour))),
    (Circle, st.builds(Circle, _decimals)),
]
_hashable = [leaf for leaf in _leaves if leaf[0] not in (Item, Circle, float, Decimal)]
_keys = [leaf for leaf in _hashable if leaf[0] not in (bool, dt.time, dt.timedelta, dt.datetime)]


def _list(pair: Pair) -> Pair:
    member: Any = pair[0]
    return list[member], st.lists(pair[1], max_size=3)


def _tuple(pair: Pair) -> Pair:
    member: Any = pair[0]
    return tuple[member, ...], st.lists(pair[1], max_size=3).map(tuple)


def _pair(pairs: tuple[Pair, Pair]) -> Pair:
    first, second = pairs
    one: Any = first[0]
    other: Any = second[0]
    return tuple[one, other], st.tuples(first[1], second[1])


def _dict(pairs: tuple[Pair, Pair]) -> Pair:
    (of_keys, keys), (of_values, values) = pairs
    key: Any = of_keys
    value: Any = of_values
    return dict[key, value], st.dictionaries(keys, values, max_size=3)


def _set(pair: Pair) -> Pair:
    member: Any = pair[0]
    return frozenset[member], st.frozensets(pair[1], max_size=3)


def _optional(pair: Pair) -> Pair:
    return pair[0] | None, st.none() | pair[1]


def _around(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    """Return pairs of a container's type and its values, for pairs of its members'."""
    return st.one_of(
        inner.map(_list),
        inner.map(_tuple),
        st.tuples(inner, inner).map(_pair),
        inner.map(_optional),
        st.tuples(st.sampled_from(_keys), inner).map(_dict),
        st.sampled_from(_hashable).map(_set),
    )


# Pairs of a type and a strategy for its values.
anything = st.recursive(st.sampled_from(_leaves), _around, max_leaves=4)
