"""Strict JSON: what goes in comes back equal in value and type, or is refused with its path.

`test_payloads` in the database suite sends the same values through jsonb.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sa_jobs import jsontext
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.limits import MAX_PAYLOAD_BYTES

storable_text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"))
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | storable_text,
    lambda inner: st.lists(inner) | st.dictionaries(storable_text, inner),
    max_leaves=20,
)


@given(json_values)
def test_a_json_value_comes_back_equal_in_value_and_type(value: Any) -> None:
    back = jsontext.loads(jsontext.dumps(value, what="payload"))
    assert repr(back) == repr(value)


@given(st.lists(json_values) | st.dictionaries(storable_text, json_values))
def test_what_msgspec_writes_is_what_we_would_write(value: Any) -> None:
    """To jsonb both texts are the same value, a float as a number with a fraction."""
    text = jsontext.plain_text(value)
    if text is not None:
        ours = jsontext._written(value, "payload", MAX_PAYLOAD_BYTES)
        assert repr(numbers_kept(text)) == repr(numbers_kept(ours))


def numbers_kept(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


@pytest.mark.parametrize(
    "value",
    [{"a": 1, "b": ["é", None, True, -1.5, {"c": []}]}, [], {}, [0.1, -0.0, 5e-324], [2**63 - 1]],
)
def test_what_is_plainly_fine_is_left_to_msgspec(value: Any) -> None:
    assert jsontext.loads(jsontext.plain_text(value) or "") == value


@pytest.mark.parametrize(
    "value", [[1e15], [-1e22], [math.nan], ["\x00"], ["\\u0000"], [(1,)], 1, "a"]
)
def test_what_needs_a_closer_look_is_not(value: Any) -> None:
    assert jsontext.plain_text(value) is None


class Colour(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 9


class Kind(str, enum.Enum):
    A = "a"


@dataclasses.dataclass
class Point:
    x: int


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


itself: list[Any] = []
itself.append(itself)

REFUSED_VALUES = [
    pytest.param("a\x00b", "NUL", id="NUL"),
    pytest.param("\ud800", "surrogate", id="surrogate"),
    pytest.param("\udcff", "surrogate", id="escaped byte"),
    pytest.param(math.nan, "is nan", id="NaN"),
    pytest.param(math.inf, "is inf", id="infinity"),
    pytest.param(-math.inf, "is -inf", id="minus infinity"),
    pytest.param(10**5000, "too large an integer", id="huge integer"),
    pytest.param(itself, "contains itself", id="self-reference"),
    pytest.param(nested(2000), "nested deeper than 200", id="depth 2000"),
]
REFUSED_TYPES = [
    pytest.param(Decimal("1.10"), "str()", id="Decimal"),
    pytest.param(dt.datetime(2030, 1, 1), "isoformat()", id="naive datetime"),  # noqa: DTZ001
    pytest.param(dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc), "isoformat()", id="datetime"),
    pytest.param(dt.date(2030, 1, 1), "isoformat()", id="date"),
    pytest.param(dt.timedelta(1), "plain JSON", id="timedelta"),
    pytest.param(uuid.UUID(int=1), "str()", id="UUID"),
    pytest.param((1, 2), "list", id="tuple"),
    pytest.param({1, 2}, "list", id="set"),
    pytest.param(frozenset(), "list", id="frozenset"),
    pytest.param({1: 2}, "key 1 of type int", id="int key"),
    pytest.param({None: 2}, "key None of type NoneType", id="None key"),
    pytest.param({True: 2}, "key True of type bool", id="bool key"),
    pytest.param(b"x", "base64", id="bytes"),
    pytest.param(bytearray(b"x"), "plain JSON", id="bytearray"),
    pytest.param(Colour.RED, "Colour", id="Enum"),
    pytest.param(Size.BIG, "Size", id="IntEnum"),
    pytest.param(Kind.A, "Kind", id="text Enum"),
    pytest.param(Point(1), "Point", id="dataclass"),
    pytest.param(collections.OrderedDict(a=1), "OrderedDict", id="dict subclass"),
    pytest.param(object(), "object", id="object"),
    pytest.param(Order(id=1), "Order", id="ORM instance"),
    pytest.param(iter([]), "list_iterator", id="iterator"),
    pytest.param(int, "type", id="class"),
    pytest.param(1j, "complex", id="complex"),
]
REFUSED = [
    pytest.param(*case.values, error, id=case.id)
    for error, cases in ((InvalidJobError, REFUSED_VALUES), (InvalidJobTypeError, REFUSED_TYPES))
    for case in cases
]


@pytest.mark.parametrize(("value", "problem", "error"), REFUSED)
def test_what_json_cannot_hold_is_refused_with_its_path(
    value: Any, problem: str, error: type[Exception]
) -> None:
    with pytest.raises(error) as caught:
        jsontext.dumps({"order": [{"note": value}]}, what="payload")
    assert str(caught.value).startswith("payload['order'][0]['note']")
    assert problem in str(caught.value)


@pytest.mark.parametrize("key", ["a\x00b", "\ud800"])
def test_a_key_that_cannot_be_stored_is_refused_with_its_path(key: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        jsontext.dumps({"order": {key: 1}}, what="payload")
    assert str(caught.value).startswith(f"key {key!r} of payload['order'] ")


EQUAL = [
    0,
    -1,
    2**63 + 1,
    -(2**70),
    10**100,
    1e5,
    1e22,
    1.5e300,
    5e-324,
    -0.0,
    0.1,
    True,
    None,
    "",
    "emoji 😀, نص, e\u0301, \U0001d518, \u2028, \x7f, \x1b[31m, \\, \", '",
    "\\u0000",
    [],
    {},
    {"": {"__reduce__": "os.system", "py/object": "x"}},
    nested(150),
]


@pytest.mark.parametrize("value", EQUAL, ids=lambda value: repr(value)[:20])
def test_what_json_can_hold_comes_back_equal(value: Any) -> None:
    back = jsontext.loads(jsontext.dumps(value, what="payload"))
    assert back == value
    assert type(back) is type(value)


def test_the_depth_is_limited_at_a_stated_number() -> None:
    jsontext.dumps(nested(jsontext.MAX_DEPTH), what="payload")
    with pytest.raises(InvalidJobError, match="deeper than 200"):
        jsontext.dumps(nested(jsontext.MAX_DEPTH + 1), what="payload")


@pytest.mark.parametrize("text", ["x" * 100, "é" * 50, "😀" * 25])
def test_the_size_is_limited_in_bytes_of_utf8(text: str) -> None:
    assert len(jsontext.dumps(text, what="payload", max_bytes=102).encode()) == 102
    with pytest.raises(InvalidJobError, match="payload takes 102 bytes as JSON, more than the 101"):
        jsontext.dumps(text, what="payload", max_bytes=101)


@pytest.mark.parametrize("megabytes", [2, 30])
def test_a_payload_of_megabytes_is_refused_by_default(megabytes: int) -> None:
    with pytest.raises(InvalidJobError, match="store the data elsewhere"):
        jsontext.dumps({"data": "x" * megabytes * 1_000_000}, what="payload")


@pytest.mark.parametrize(
    "value",
    [[0] * 50_000_000, ["x" * 900_000] * 1_000, [[0] * 1_000] * 100_000, "x" * 100_000_000],
    ids=["numbers", "texts", "lists", "text"],
)
def test_a_value_of_a_hundred_megabytes_is_not_written_to_its_end(value: Any) -> None:
    with pytest.raises(InvalidJobError, match="payload takes more than 4000000 bytes as JSON"):
        jsontext.dumps(value, what="payload")
