"""What a function's parameters are annotated with, as types."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any


class Missing:
    """Stands for an annotation with a name that does not exist at run time."""

    def __init__(self, text: str) -> None:
        self.text = text


def resolved(annotation: Any, function: Any) -> Any:
    """Return an annotation of the function's as a type, or a `Missing` that holds its text.

    Each is resolved by itself: a name that only the type checker imports hides no other.
    """
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        hints = typing.get_type_hints(
            holder, globalns=getattr(function, "__globals__", {}), include_extras=True
        )
    except Exception:
        # Whatever text an annotation holds; what is no type at all is a TypeError.
        return Missing(annotation if isinstance(annotation, str) else str(annotation))
    return hints["it"]
