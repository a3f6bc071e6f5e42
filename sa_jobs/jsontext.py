"""Strict JSON text: what goes in comes back equal in value and type, or is refused with its path.

The queue serialises payloads and results itself, once, and binds them as text that is cast to
jsonb, so that an engine's own `json_serializer` cannot change them. Writing is also checking:
what is plainly fine is left to msgspec, all else to the slower code that names what is wrong.

| Python value | stored as | comes back as |
|---|---|---|
| None, bool, int, str | JSON | the same |
| float, finite | JSON number with a fraction | float (-0.0 as 0.0, its equal) |
| list, dict with str keys | JSON | the same (jsonb keeps no key order) |
| anything else: tuple, set, bytes, datetime, Decimal, UUID, Enum, subclasses | refused | |
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Sequence
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any

import msgspec

from sa_jobs.errors import InvalidJobError, InvalidJobTypeError
from sa_jobs.limits import MAX_PAYLOAD_BYTES, unstorable

MAX_DEPTH = 200

# Text of so many times the allowed size is not even written to its end, to say how long it is.
_FAR_TOO_LARGE = 4

# Below this a float is written with a fraction, or with a negative exponent.
_LARGE_FLOAT = 1e15

_encode = msgspec.json.Encoder().encode

_INSTEAD = {
    "datetime": "pass its isoformat()",
    "date": "pass its isoformat()",
    "Decimal": "pass str() of it",
    "UUID": "pass str() of it",
    "tuple": "pass a list",
    "set": "pass a sorted list",
    "frozenset": "pass a sorted list",
    "bytes": "pass text, e.g. base64, or a reference to where the bytes are stored",
}


def dumps(value: Any, *, what: str, max_bytes: int = MAX_PAYLOAD_BYTES) -> str:
    """Return `value` as JSON text, or raise an error that names the path inside `what`."""
    text = plain_text(value, max_bytes)
    return _written(value, what, max_bytes) if text is None else text


def plain_text(value: Any, max_bytes: int = MAX_PAYLOAD_BYTES) -> str | None:
    """Return a dict or list as JSON text, or None if it must be looked at more closely."""
    if _room_after(value, max_bytes, 0) < 0:
        return None
    try:
        encoded = _encode(value)
    except (ValueError, OverflowError):
        return None  # A lone surrogate, or a very large integer.
    # A NUL is found by its escape, which may as well be a text of these six characters.
    if len(encoded) > max_bytes or b"\\u0000" in encoded:
        return None
    return encoded.decode()


def _written(value: Any, what: str, max_bytes: int) -> str:
    parts: list[str] = []
    most = left = max_bytes * _FAR_TOO_LARGE

    def put(part: str) -> None:
        nonlocal left
        left -= len(part)
        if left < 0:
            raise _too_large(what, f"more than {most}", max_bytes)
        parts.append(part)

    _write(value, what, 0, put)
    text = "".join(parts)
    # A character takes at most four bytes: only text near the limit needs to be encoded.
    if len(text) * 4 > max_bytes:
        size = len(text.encode())
        if size > max_bytes:
            raise _too_large(what, str(size), max_bytes)
    return text


def join(texts: Iterable[str]) -> str:
    """Return texts of JSON values as the text of one array."""
    return f"[{','.join(texts)}]"


def array(values: Sequence[str | int | float | dt.datetime | None]) -> str:
    """Return values of columns, which were checked before, as the text of an array."""
    return _encode(values).decode()


def loads(text: str) -> Any:
    """Return the value of JSON text that the database stored."""
    return json.loads(text)


def _too_large(what: str, size: str, max_bytes: int) -> InvalidJobError:
    return InvalidJobError(
        f"{what} takes {size} bytes as JSON, more than the {max_bytes} allowed: "
        "store the data elsewhere and pass a reference to it"
    )


def _room_after(value: Any, room: int, depth: int) -> int:
    """Return how many characters of `room` a dict or list leaves, or -1.

    -1 means that msgspec might not write it as we would: it also takes subclasses, tuples, dates
    and keys that are no text, and writes large floats in a way that jsonb turns into integers.
    """
    kind = type(value)
    if kind is dict:
        for key in value:
            if type(key) is not str:
                return -1
            room -= len(key)
        value = value.values()
    elif kind is not list:
        return -1
    room -= len(value)
    if room < 0 or depth >= MAX_DEPTH:
        return -1
    for item in value:
        kind = type(item)
        if kind is str:
            room -= len(item)
        elif kind is float:
            if not -_LARGE_FLOAT < item < _LARGE_FLOAT:  # true for NaN, too
                return -1
        elif kind is dict or kind is list:
            room = _room_after(item, room, depth + 1)
            if room < 0:
                return -1
        elif kind is not int and kind is not bool and item is not None:
            return -1
    return room


def _write(value: Any, path: str, depth: int, put: Any) -> None:
    kind = type(value)
    if kind is str:
        put(_string(value, path))
    elif kind is int:
        put(_integer(value, path))
    elif value is None:
        put("null")
    elif kind is bool:
        put("true" if value else "false")
    elif kind is float:
        put(_number(value, path))
    elif kind is dict:
        _check_depth(path, depth)
        put("{")
        separator = ""
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidJobTypeError(
                    f"{path} has the key {key!r} of type {type(key).__name__}: "
                    "JSON object keys must be str"
                )
            put(f"{separator}{_string(key, f'key {key!r} of {path}')}:")
            separator = ","
            _write(item, f"{path}[{key!r}]", depth + 1, put)
        put("}")
    elif kind is list:
        _check_depth(path, depth)
        put("[")
        for index, item in enumerate(value):
            if index:
                put(",")
            _write(item, f"{path}[{index}]", depth + 1, put)
        put("]")
    else:
        way_out = _INSTEAD.get(kind.__name__, "pass its id or plain JSON values")
        raise InvalidJobTypeError(
            f"{path} is of type {kind.__module__}.{kind.__qualname__}, "
            f"which is not a JSON type: {way_out}"
        )


def _check_depth(path: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidJobError(
            f"{path[:60]}... is nested deeper than {MAX_DEPTH} levels, or contains itself"
        )


def _string(value: str, path: str) -> str:
    problem = unstorable(value)
    if problem:
        raise InvalidJobError(f"{path} {problem}: PostgreSQL cannot store it")
    return encode_basestring(value)


def _integer(value: int, path: str) -> str:
    try:
        return int.__repr__(value)
    except ValueError as error:  # Python's limit on the digits of an int
        raise InvalidJobError(f"{path} is too large an integer: {error}") from None


def _number(value: float, path: str) -> str:
    text = float.__repr__(value)
    if text[-1].isdigit() and "e" not in text:
        return text
    if text in ("nan", "inf", "-inf"):
        raise InvalidJobError(f"{path} is {text}, which JSON does not have")
    # jsonb turns 1e+22 into an integer; written out with a fraction it stays a float.
    plain = format(Decimal(text), "f")
    return plain if "." in plain else plain + ".0"
