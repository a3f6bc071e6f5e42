"""Typed payloads: what comes back from JSON is equal in value and type, all else is refused.

`tests/database/test_payloads.py` sends the same values through jsonb and a worker.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import inspect
import json
import re
import typing
import uuid
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
import pydantic
import pydantic.dataclasses
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column

from sa_jobs import jsontext
from sa_jobs.errors import HandlerError, InvalidJobError, InvalidJobTypeError
from sa_jobs.payloads import Parameter, PayloadTypes
from sa_jobs.payloads.comparison import field_names
from tests.support.payloads import (
    Address,
    Circle,
    Colour,
    Contact,
    Item,
    Model,
    Order,
    OrderId,
    Size,
    Square,
    Tree,
    anything,
)

PAGE = Path(__file__).parents[2] / "docs" / "payloads.md"
UTC = dt.timezone.utc
AT = dt.datetime(2030, 5, 17, 12, 30, 1, 250_000, tzinfo=UTC)
ID = uuid.UUID("6f1c3c63-5b0e-4c6e-9d2e-9c3c3b7e0f11")


def types_of(annotation: Any, default: Any = inspect.Parameter.empty) -> PayloadTypes:
    return PayloadTypes("send", None, [Parameter("x", annotation, default)])


def through(annotation: Any, value: Any) -> Any:
    """Return what comes back of a value under an annotation, by way of JSON text."""
    types = types_of(annotation)
    text = jsontext.dumps(types.encode({"x": value}), what="payload")
    payload = json.loads(text)
    types.decode(payload, text)
    return payload["x"]


def shown(value: Any) -> Any:
    """Return a value with all its types, but for the name of a time zone, to compare it by."""
    kind: Any = type(value)
    if isinstance(value, (dt.datetime, dt.time)):
        return kind, value.isoformat(), value.utcoffset() is None and value.fold
    if isinstance(value, dict):
        return kind, [(shown(key), shown(member)) for key, member in value.items()]
    if isinstance(value, (list, tuple)):
        return kind, [shown(member) for member in value]
    if isinstance(value, (set, frozenset)):
        return kind, sorted((shown(member) for member in value), key=repr)
    if isinstance(value, pydantic.BaseModel):
        return kind, shown(dict(value))
    names = field_names(kind)
    if names is not None:
        return kind, [(name, shown(getattr(value, name))) for name in names.values()]
    return kind, repr(value)


# One entry per row of the page's table.
ROWS: dict[str, list[tuple[Any, Any]]] = {
    "`str`, `int`, `bool`, `None`": [
        (str, "a"),
        (int, 2**63 + 1),
        (int, -(2**70)),
        (bool, True),
        (None, None),
    ],
    "`float`": [(float, 1e22), (float, 0.1), (float, -1.5)],
    "`Decimal`": [
        (Decimal, Decimal("1.10")),
        (Decimal, Decimal("1E+3")),
        (Decimal, Decimal("-0.00")),
    ],
    "`datetime`": [
        (dt.datetime, AT),
        (dt.datetime, dt.datetime(2030, 1, 1)),  # noqa: DTZ001
        (dt.datetime, AT.astimezone(dt.timezone(dt.timedelta(hours=5, minutes=30)))),
    ],
    "`date`, `time`": [
        (dt.date, dt.date(2030, 1, 1)),
        (dt.time, dt.time(1, 2, 3, 4)),
        (dt.time, dt.time(1, tzinfo=UTC)),
    ],
    "`timedelta`": [(dt.timedelta, dt.timedelta(days=-3, microseconds=7))],
    "`UUID`": [(uuid.UUID, ID)],
    "an `Enum` of all text or all ints": [(Colour, Colour.RED), (Size, Size.BIG)],
    '`Literal["a", "b"]`, `Literal[1, 2]`': [(Literal["a", "b"], "b"), (Literal[1, 2], 2)],
    "`list[...]`, `Sequence[...]`": [
        (list[int], [1, 2]),
        (list[Any], [1, "a", None]),
        (Sequence[dt.date], [dt.date(2030, 1, 1)]),
    ],
    "`tuple[int, str]`, `tuple[int, ...]`": [
        (tuple[int, str], (1, "a")),
        (tuple[int, ...], (1, 2, 3)),
        (list[tuple[Decimal, ...]], [(Decimal("1.0"),), ()]),
    ],
    "`set[...]`, `frozenset[...]`": [(set[uuid.UUID], {ID}), (frozenset[str], frozenset("ab"))],
    "`dict[str, ...]`, `Mapping[str, ...]`": [
        (dict[str, Decimal], {"a@example.org": Decimal("2.50")}),
        (Mapping[str, int], {"a": 1}),
        (dict[str, Any], {"a": [1, {"b": None}]}),
    ],
    "`dict[int, ...]`, also `date`, `datetime`, `UUID` or an `Enum` as the key": [
        (dict[int, str], {1: "a", 2: "b"}),
        (dict[dt.date, int], {dt.date(2030, 1, 1): 1}),
        (dict[dt.datetime, int], {AT: 1}),
        (dict[uuid.UUID, int], {ID: 1}),
        (dict[Colour, int], {Colour.RED: 1}),
    ],
    "a dataclass": [
        (Order, Order(ID, AT, [Item("tea", Decimal("4.50"), Colour.RED)])),
        (Tree, Tree("root", [Tree("leaf")])),
        (list[Item], [Item("tea", Decimal(1))]),
    ],
    "a `TypedDict`, with `NotRequired`": [
        (Address, {"street": "Elm", "since": dt.date(2030, 1, 1)}),
        (Address, {"street": "Elm"}),
    ],
    "a `msgspec.Struct`, also a union of tagged ones": [
        (Circle, Circle(Decimal("1.5"))),
        (Circle | Square, Square(2)),
    ],
    "a pydantic model (`pip install sa-jobs[pydantic]`)": [
        (Model, Model(id=ID, price=Decimal("1.10"), at=AT)),
        (list[Model], [Model(id=ID, price=Decimal("1.1"), at=AT)]),
        (Contact, Contact(Model(id=ID, price=Decimal("1.1"), at=AT))),
    ],
    "`Optional[X]`, `Union[int, str]`, unions of what JSON tells apart": [
        (dt.datetime | None, AT),
        (dt.datetime | None, None),
        (int | str, "5"),
        (int | str, 5),
        (int | float, 5),
        (int | float, 5.0),
        (int | Decimal, Decimal("5.0")),
        (Item | None, Item("tea", Decimal(1))),
        (Order | str, "later"),
    ],
    "`NewType`, `Annotated[...]`, with `msgspec.Meta` also checked": [
        (OrderId, OrderId(5)),
        (Annotated[uuid.UUID, "doc"], ID),
        (Annotated[int, msgspec.Meta(ge=1)], 1),
        (Annotated[dt.datetime, msgspec.Meta(tz=True)], AT),
    ],
    "none, `Any`, `object`": [
        (inspect.Parameter.empty, {"a": [1, 2.5, None]}),
        (Any, 5),
        (object, ["a"]),
    ],
}
CASES = [(annotation, value) for cases in ROWS.values() for annotation, value in cases]


def test_the_page_lists_what_is_tested_here() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| annotation |")[2].partition("\n\n")[0]
    listed = set(re.findall(r"^\| ([^|]+?) \| [^|]+ \|[^|]*\|$", table, re.MULTILINE))
    assert listed == set(ROWS)


@pytest.mark.parametrize(("annotation", "value"), CASES)
def test_a_value_comes_back_equal_in_value_and_type(annotation: Any, value: Any) -> None:
    assert shown(through(annotation, value)) == shown(value)


@given(st.data())
@settings(deadline=None, max_examples=300)
def test_whatever_is_taken_comes_back_equal_in_value_and_type(data: st.DataObject) -> None:
    """Of any type, and of any value of that type."""
    annotation, values = data.draw(anything)
    value = data.draw(values)
    try:
        back = through(annotation, value)
    except InvalidJobError:
        # Offsets of seconds, as of times before time zones, which ISO 8601 has no form for.
        assert "time" in repr(annotation)
        return
    assert shown(back) == shown(value)


any_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "5", "red", "2030-01-01", str(ID), Colour.RED, Size.BIG, AT, ID, b"x"])
    | st.sampled_from([Decimal("1.10"), dt.date(2030, 1, 1), Item("tea", Decimal(1)), 2**63]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "x", "street", 1, True, ID]), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(any_value)
@settings(deadline=None, max_examples=300)
def test_below_any_there_is_plain_json_or_an_error(value: Any) -> None:
    @dataclasses.dataclass
    class Holder:
        held: Any
        pair: tuple[int, int] = (1, 2)

    try:
        back = through(Holder, Holder(value))
    except (InvalidJobError, InvalidJobTypeError):
        with pytest.raises((InvalidJobError, InvalidJobTypeError)):
            jsontext.dumps(value, what="payload")
        return
    assert shown(back.held) == shown(value)


@given(any_value, st.sampled_from(CASES))
@settings(deadline=None, max_examples=300)
def test_no_value_of_another_type_is_changed_in_silence(value: Any, case: tuple[Any, Any]) -> None:
    annotation = case[0]
    try:
        back = through(annotation, value)
    except (InvalidJobError, InvalidJobTypeError):
        return
    assert stands_for(value, back)


def stands_for(given: Any, back: Any) -> bool:
    """Return whether the first is the same as the second, or JSON of it."""
    if type(given) is type(back):
        if isinstance(given, (list, tuple)):
            return len(given) == len(back) and all(map(stands_for, given, back))
        if isinstance(given, dict):
            return len(given) == len(back) and all(map(stands_for, given.values(), back.values()))
        return bool(shown(given) == shown(back))
    if type(back) is float:
        return type(given) is int and given == back
    # JSON of what the annotation says.
    return type(given) in (str, int, list, dict) and type(back) not in (str, int, bool, list, dict)


@pytest.mark.parametrize(
    ("annotation", "given", "back"),
    [
        (float, 5, 5.0),
        (Decimal, "1.10", Decimal("1.10")),
        (Decimal, 5, Decimal(5)),
        (dt.datetime, "2030-05-17T12:30:01.25Z", AT),
        (dt.date, "2030-01-01", dt.date(2030, 1, 1)),
        (dt.timedelta, "PT90S", dt.timedelta(seconds=90)),
        (uuid.UUID, str(ID), ID),
        (Colour, "red", Colour.RED),
        (Size, 9, Size.BIG),
        (tuple[int, ...], [1, 2], (1, 2)),
        (set[int], [1, 2], {1, 2}),
        (dict[int, str], {"1": "a"}, {1: "a"}),
        (Item, {"sku": "tea", "price": Decimal("1.0")}, Item("tea", Decimal("1.0"))),
        (
            Order,
            {"number": ID, "placed_at": AT, "items": [{"sku": "tea", "price": "1.0"}]},
            Order(ID, AT, [Item("tea", Decimal("1.0"))]),
        ),
        (Circle, {"type": "Circle", "halfWidth": "1.5"}, Circle(Decimal("1.5"))),
        (Circle | Square, {"type": "Square", "side": 2}, Square(2)),
        (
            Model,
            {"id": ID, "price": "1.10", "at": "2030-05-17T12:30:01.25Z"},
            Model(id=ID, price=Decimal("1.10"), at=AT),
        ),
    ],
)
def test_json_stands_for_what_the_annotation_says(annotation: Any, given: Any, back: Any) -> None:
    assert shown(through(annotation, given)) == shown(back)


def all_said(error: BaseException | None) -> str:
    """Return the texts of an exception, and of those that it came from."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return " ".join(texts)


class Text(str):
    pass


@dataclasses.dataclass
class Sub(Item):
    extra: int = 0


itself: list[Any] = []
itself.append(itself)
WRONG = (InvalidJobTypeError, InvalidJobError)


@pytest.mark.parametrize(
    ("annotation", "value", "error", "message"),
    [
        (int, "5", InvalidJobTypeError, "payload.x: expected `int`, got `str`"),
        (int, True, InvalidJobTypeError, "payload.x: expected `int`, got `bool`"),
        (int, 5.0, InvalidJobTypeError, "payload.x: expected `int`, got `float`"),
        (int, Size.BIG, InvalidJobTypeError, "payload.x: .*Size would come back as int"),
        (bool, 1, InvalidJobTypeError, "payload.x: expected `bool`, got `int`"),
        (float, 2**63 + 1, InvalidJobError, "payload.x: would come back as another value"),
        (float, True, InvalidJobTypeError, "payload.x: "),
        (str, Text("a"), InvalidJobTypeError, "payload.x: .*Text is not a type"),
        (str, Colour.RED, InvalidJobTypeError, "payload.x: .*Colour would come back as str"),
        (str, None, InvalidJobTypeError, "payload.x: expected `str`, got `null`"),
        (Decimal, 1.1, InvalidJobTypeError, "payload.x: float would come back as decimal.Decimal"),
        (dt.datetime, dt.datetime(2030, 1, 1, fold=1), InvalidJobError, "payload.x: would come"),  # noqa: DTZ001
        (Decimal, "1,5", InvalidJobError, "payload.x: invalid decimal"),
        (dt.datetime, dt.date(2030, 1, 1), InvalidJobError, "payload.x: invalid"),
        (dt.date, AT, InvalidJobError, "payload.x: invalid"),
        (dt.datetime, 5, InvalidJobTypeError, "payload.x: expected `datetime`, got `int`"),
        (
            Annotated[dt.datetime, msgspec.Meta(tz=True)],
            dt.datetime(2030, 1, 1),  # noqa: DTZ001
            InvalidJobError,
            "payload.x: expected `datetime` with a timezone",
        ),
        (
            dt.datetime,
            AT.astimezone(dt.timezone(dt.timedelta(seconds=3_208))),
            InvalidJobError,
            "payload.x: would come back as another value",
        ),
        (Colour, "secret", InvalidJobError, "payload.x: is none of the values"),
        (Literal["a"], "secret", InvalidJobError, "payload.x: is none of the values"),
        (Colour, Size.BIG, InvalidJobTypeError, "payload.x: expected `str`, got `int`"),
        (list[int], (1, 2), InvalidJobTypeError, "payload.x: tuple would come back as list"),
        (list[int], {1}, InvalidJobTypeError, "payload.x: set would come back as list"),
        (list[int], [1, True], InvalidJobTypeError, r"payload.x\[1\]: expected `int`, got `bool`"),
        (tuple[int, str], (1,), InvalidJobError, "payload.x: expected `array` of length 2"),
        (set[int], [1, 1], InvalidJobError, "payload.x: holds the same member twice"),
        (dict[str, Any], collections.OrderedDict(a=1), InvalidJobTypeError, "payload.x: .*Ordered"),
        (dict[str, int], {1: 2}, InvalidJobTypeError, "payload.x: has a key of type int"),
        (dict[int, int], {True: 2}, InvalidJobTypeError, "payload.x: has keys of a type"),
        (dict[str, int], {"a@b.c": "secret"}, InvalidJobTypeError, r"payload.x\[\.\.\.\]: expec"),
        (list[Any], [(1,)], InvalidJobTypeError, r"payload\['x'\]\[0\] is of type builtins.tuple"),
        (list[Any] | int, [{1: 2}], InvalidJobTypeError, r"payload\['x'\]\[0\] has the key"),
        (tuple[Any, ...], ((1,),), InvalidJobTypeError, r"payload.x\[0\]: tuple would come back"),
        (Item, Sub("tea", Decimal(1)), InvalidJobTypeError, "payload.x: .*Sub would come back as"),
        (Item, Item("tea", 1.1), InvalidJobTypeError, "payload.x.price: float would"),  # type: ignore[arg-type]
        (Item, {"sku": "tea"}, InvalidJobError, "payload.x: object missing required field `price`"),
        (
            Item,
            {"sku": "tea", "price": "1", "prise": "secret", "a@b.c": 5},
            InvalidJobError,
            "payload.x: has keys that its type does not have: 'prise' and 1 more",
        ),
        (Address, {"street": "Elm", "x": 1}, InvalidJobError, "payload.x: has keys .*: 'x'"),
        (
            Order,
            Order(ID, AT, [Item("a", Decimal(1))] * 3 + [Item("b", True)]),  # type: ignore[arg-type]
            InvalidJobTypeError,
            r"payload.x.items\[3\].price: expected `decimal`, got `bool`",
        ),
        (Order, Order(ID, AT, [object()]), InvalidJobTypeError, r"payload.x.items\[0\]: object"),  # type: ignore[list-item]
        (Circle | Square, {"type": "secret"}, InvalidJobError, "payload.x.type: is none of the"),
        (Model, {"id": ID, "price": "1", "at": 5}, InvalidJobTypeError, "payload.x.at: Input sho"),
        (Model, {"id": ID, "at": AT}, InvalidJobError, "payload.x.price: Field required"),
        (
            Model,
            {"id": ID, "price": "-1", "at": AT},
            InvalidJobError,
            r"payload.x.price: a validator of the model refuses it \(value_error\)",
        ),
        (Any, itself, InvalidJobError, "contains itself"),
        (list[list[Any]], itself, InvalidJobError, "payload.x: is nested too deep"),
        (int | None, Any, InvalidJobTypeError, "payload.x: "),
        (Annotated[str, msgspec.Meta(max_length=2)], "secret", InvalidJobError, "length <= 2"),
    ],
)
def test_what_would_come_back_as_something_else_is_refused(
    annotation: Any, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(WRONG, match=message) as caught:
        through(annotation, value)
    assert type(caught.value) is error
    assert "secret" not in all_said(caught.value)


def test_an_error_names_its_handler_and_row() -> None:
    with pytest.raises(InvalidJobTypeError, match=r"^handler 'send', row 3: payload\.x: expected"):
        types_of(int).encode({"x": "5"}, ", row 3")


def test_the_path_of_an_error_is_cut() -> None:
    value: Any = True
    for _ in range(50):
        value = {"a_rather_long_name": value}
    annotation: Any = int
    for _ in range(50):
        annotation = dict[str, annotation]
    with pytest.raises(InvalidJobTypeError) as caught:
        through(annotation, value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("values", [{"NaN": float("nan")}, {"inf": float("inf")}])
def test_what_postgresql_cannot_hold_is_refused_below_a_type_too(values: dict[str, float]) -> None:
    with pytest.raises(InvalidJobError, match="which JSON does not have"):
        through(dict[str, float], values)


@pytest.mark.parametrize("text", ["a\x00b", "\ud800"])
def test_text_that_postgresql_cannot_hold_is_refused_below_a_type_too(text: str) -> None:
    with pytest.raises(InvalidJobError, match="PostgreSQL cannot store it"):
        through(Item, Item(text, Decimal(1)))


class Base(DeclarativeBase):
    pass


class MappedOrder(Base):
    __tablename__ = "mapped"
    id: Mapped[int] = mapped_column(primary_key=True)


class MappedItem(MappedAsDataclass, Base):
    __tablename__ = "mapped_items"
    id: Mapped[int] = mapped_column(primary_key=True)


@pydantic.dataclasses.dataclass
class PydanticItem:
    a: int


class Pair(NamedTuple):
    a: int


class Plain:
    pass


Odd = enum.Enum("Odd", {"A": (1, 2)})


@dataclasses.dataclass
class Holder:
    items: list[Pair]
    plain: Plain


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (bytes, "use str, e.g. base64"),
        (Plain, "Plain is not a type that a payload can hold: use a plain dataclass"),
        (MappedOrder, "is a mapped class: pass its id"),
        (MappedItem, "is a mapped class: pass its id"),
        (PydanticItem, "use a plain dataclass or a model"),
        (Pair, "Pair"),
        (Holder, r"\.items\[\]': Pair"),
        (dict[str, list[Plain]], r"\[\.\.\.\]\[\]': Plain"),
        (tuple[int, Plain], r"\[1\]': Plain"),
        (Iterable[int], "use list or Sequence"),
        (dict[float, int], "the keys of a dict can be"),
        (dict[tuple[int, int], int], "the keys of a dict can be"),
        (str | uuid.UUID, "more than one str-like type"),
        (Item | Order, "more than one dataclass"),
        (dt.date | dt.datetime, "more than one str-like type"),
        (Odd, "Enums must contain either all str or all int"),
        (msgspec.defstruct("Listed", ["a"], array_like=True), "array_like"),
        (typing.Callable[[], int], "Callable"),
        (5, "5"),
    ],
)
def test_a_type_that_no_payload_can_hold_is_refused_with_the_handler(
    annotation: Any, message: str
) -> None:
    with pytest.raises(HandlerError, match=f"^handler 'send': parameter 'x.*{message}"):
        types_of(annotation)


def test_a_parameter_with_such_a_type_and_a_default_keeps_its_default() -> None:
    types = types_of(Plain, default=Plain())
    assert types.encode({}) == {}
    with pytest.raises(InvalidJobTypeError, match=r"payload\.x: Plain is not a type"):
        types.encode({"x": Plain()})


def test_a_default_of_none_allows_none() -> None:
    types = types_of(dt.date, default=None)
    assert types.encode({"x": None}) == {"x": None}


def test_all_other_keys_have_the_type_of_the_parameter_that_takes_them() -> None:
    types = PayloadTypes("send", None, [], Parameter("rest", Decimal))
    assert types.encode({"a": Decimal("1.0")}) == {"a": "1.0"}
    payload = {"a": "1.0"}
    types.decode(payload, '{"a": "1.0"}')
    assert payload == {"a": Decimal("1.0")}


def test_a_handler_with_plain_parameters_has_no_types() -> None:
    assert not PayloadTypes("send", None, [Parameter("a", Any), Parameter("b", object)])


def function(later: Later, never: OnlyForTheChecker, inside: HasMissing) -> None: ...  # type: ignore[name-defined]  # noqa: F821


PARAMETERS = [Parameter(name, function.__annotations__[name]) for name in function.__annotations__]
LATE = PayloadTypes("late", function, PARAMETERS[:3])


@dataclasses.dataclass
class Later:
    at: dt.date


@dataclasses.dataclass
class HasMissing:
    money: Money  # type: ignore[name-defined]  # noqa: F821


def test_a_class_that_is_defined_below_the_handler_is_found() -> None:
    assert LATE.encode({"later": Later(dt.date(2030, 1, 1))}) == {"later": {"at": "2030-01-01"}}


def test_an_annotation_that_does_not_exist_counts_as_absent() -> None:
    plain = {"never": {"a": [1, "x", None]}}
    assert LATE.encode(plain) == plain
    with pytest.raises(InvalidJobTypeError, match=r"payload\.never: .*'OnlyForTheChecker'"):
        LATE.encode({"never": ID})


def test_a_class_with_an_annotation_that_does_not_exist_is_refused_at_its_first_use() -> None:
    with pytest.raises(InvalidJobTypeError, match=r"payload\.inside: name 'Money' is not defined"):
        LATE.encode({"inside": {"money": 5}})


T = TypeVar("T")


@dataclasses.dataclass
class Box(Generic[T]):
    held: T


def test_a_generic_dataclass_holds_what_it_says() -> None:
    assert through(Box[dt.date], Box(dt.date(2030, 1, 1))) == Box(dt.date(2030, 1, 1))
    with pytest.raises(InvalidJobTypeError, match=r"payload\.x\.held: expected `int`"):
        through(Box[int], Box("5"))


@dataclasses.dataclass
class Careful:
    name: str

    def __post_init__(self) -> None:
        self.name = self.name.strip()
        if not self.name:
            raise ValueError("secret")
        if self.name == "odd":
            raise KeyError("secret")


def test_a_class_may_put_its_fields_right() -> None:
    assert through(Careful, {"name": " a "}) == Careful("a")


@pytest.mark.parametrize(("name", "kind"), [(" ", "ValueError"), ("odd", "KeyError")])
def test_what_a_class_says_of_a_value_is_not_quoted(name: str, kind: str) -> None:
    with pytest.raises(
        InvalidJobError, match=f"payload.x: its type refuses it with {kind}"
    ) as caught:
        through(Careful, {"name": name})
    assert "secret" not in all_said(caught.value)


class Extra(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    a_b: int = pydantic.Field(alias="aB")
    any: Any = None

    @pydantic.computed_field
    def double(self) -> int:
        return self.a_b * 2


def test_a_model_with_aliases_and_computed_fields_comes_back() -> None:
    assert through(Extra, Extra(aB=2)) == Extra(aB=2)
    with pytest.raises(InvalidJobError, match="Extra inputs are not permitted"):
        through(Extra, {"aB": 2, "c": 3})


def test_what_a_model_would_not_give_back_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="would come back as another value"):
        through(Extra, Extra(aB=2, any=(1, 2)))


def decoded(annotation: Any, text: str) -> Any:
    payload = json.loads(text)
    types_of(annotation).decode(payload, text)
    return payload["x"]


def test_a_number_of_the_database_is_a_decimal_with_its_digits() -> None:
    text = '{"x": 12345678901234567890.10}'
    assert shown(decoded(Decimal, text)) == shown(Decimal("12345678901234567890.10"))


@pytest.mark.parametrize("text", ["2030-05-17T12:30:01.25+00:00", "2030-05-17 12:30:01.250000Z"])
def test_a_time_as_the_database_writes_it_is_read(text: str) -> None:
    assert decoded(dt.datetime, json.dumps({"x": text})) == AT


@pytest.mark.parametrize(
    ("annotation", "text", "message"),
    [
        (Item, '{"x": {"sku": "tea"}}', "payload.x: object missing required field `price`"),
        (Item, '{"x": {"sku": "tea", "price": "1", "no": 1}}', "payload.x: has keys .*: 'no'"),
        (list[Item], '{"x": [{"sku": 5, "price": "1"}]}', r"payload.x\[0\].sku: expected `str`"),
        (Address, '{"x": {"street": "Elm", "no": 1}}', "payload.x: has keys .*: 'no'"),
        (int, '{"x": "secret"}', "payload.x: expected `int`, got `str`"),
        (Model, '{"x": {"id": "secret"}}', "payload.x.id: Input should be a valid UUID"),
    ],
)
def test_what_the_database_holds_is_checked_too(annotation: Any, text: str, message: str) -> None:
    with pytest.raises(WRONG, match=message) as caught:
        decoded(annotation, text)
    assert "secret" not in all_said(caught.value)
