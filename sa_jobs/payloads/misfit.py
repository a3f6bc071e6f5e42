"""Why a value does not fit, and where: in words that never hold the value."""

from __future__ import annotations

from typing import Any, NamedTuple

from sa_jobs.errors import InvalidJobError, InvalidJobTypeError

_LONGEST_PATH = 200
_LONGEST_NAME = 40
_SHOWN_NAMES = 3


class Misfit(NamedTuple):
    """Why a value does not fit, whether by its type, and where in it."""

    reason: str
    of_type: bool = False
    path: str = ""

    def below(self, part: str) -> Misfit:
        """Return the same as seen from one level farther up."""
        return self._replace(path=part + self.path)

    def error(self, path: str) -> InvalidJobError | InvalidJobTypeError:
        """Return the error for a value that is at `path`."""
        kind = InvalidJobTypeError if self.of_type else InvalidJobError
        place = path + self.path
        if len(place) > _LONGEST_PATH:
            place = f"{place[:_LONGEST_PATH]}..."
        return kind(f"{place}: {self.reason}")


TOO_DEEP = Misfit("is nested too deep, or contains itself")


def at_key(key: Any) -> str:
    """Return the part of a path that leads to a key: by name if it looks like one.

    Any other key may be somebody's data.
    """
    return f".{key}" if _is_name(key) else "[...]"


def listed(keys: list[Any]) -> str:
    """Return the first keys that look like names, and how many others there are."""
    names = [repr(key) for key in keys if _is_name(key)][:_SHOWN_NAMES]
    others = len(keys) - len(names)
    shown = ", ".join(names)
    if not others:
        return shown
    return f"{shown} and {others} more" if shown else f"{others} of them"


def type_name(value: Any) -> str:
    """Return what the type of a value is called."""
    kind = type(value)
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and key.isidentifier() and len(key) <= _LONGEST_NAME
