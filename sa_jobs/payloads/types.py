"""The types of a handler's parameters, and its payload as those types say."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from sa_jobs.errors import HandlerError, InvalidJobError, InvalidJobTypeError
from sa_jobs.payloads.slots import NotYetDefinedError, Parameter, Slot, slot_of

_raw_values = msgspec.json.Decoder(dict[str, msgspec.Raw])


class PayloadTypes:
    """What the parameters of one handler are annotated with, for its payloads.

    A parameter that is not annotated, or with `Any`, takes plain JSON values, as does one whose
    annotation names what does not exist at run time. Classes that are defined below the handler
    are found at its first use. `rest` is the parameter that takes all other keys.
    """

    def __init__(
        self,
        handler: str,
        function: Any,
        parameters: Iterable[Parameter],
        rest: Parameter | None = None,
    ) -> None:
        self._handler = handler
        self._function = function
        self._slots: dict[str, Slot] = {}
        self._rest: Slot | None = None
        self._rest_name = None if rest is None else rest.name
        self._waiting: list[Parameter] = []
        for parameter in (*parameters, *([] if rest is None else [rest])):
            try:
                self._take(parameter, last=False)
            except NotYetDefinedError:
                self._waiting.append(parameter)
            except HandlerError as error:
                raise HandlerError(f"handler {handler!r}: {error}") from None

    def __bool__(self) -> bool:
        """Whether any parameter takes other than plain JSON values."""
        return bool(self._slots or self._waiting) or self._rest is not None

    def encode(self, payload: Mapping[str, Any], row: str = "") -> dict[str, Any]:
        """Return a payload as JSON values, or raise InvalidJobError or InvalidJobTypeError."""
        if self._waiting:
            self._settle()
        slots, rest = self._slots, self._rest
        encoded: dict[str, Any] = {}
        try:
            for name, value in payload.items():
                slot = slots.get(name, rest)
                if slot is not None and type(value) not in slot.plain:
                    value = slot.codec.encode(value, f"payload.{name}")
                encoded[name] = value
        except (InvalidJobError, InvalidJobTypeError) as error:
            raise type(error)(f"handler {self._handler!r}{row}: {error}") from None
        return encoded

    def decode(self, payload: dict[str, Any], text: str) -> None:
        """Put the typed values in the places of the JSON values, or raise an error as `encode`.

        `text` is the payload as it is stored.
        """
        if self._waiting:
            self._settle()
        slots, rest = self._slots, self._rest
        raw: dict[str, msgspec.Raw] | None = None
        for name, value in payload.items():
            slot = slots.get(name, rest)
            if slot is not None and type(value) not in slot.plain:
                raw = raw or _raw_values.decode(text)
                payload[name] = slot.codec.decode(raw[name], value, f"payload.{name}")

    def _settle(self) -> None:
        # Two threads may do this at once, to the same end.
        for parameter in self._waiting:
            self._take(parameter, last=True)
        self._waiting = []

    def _take(self, parameter: Parameter, *, last: bool) -> None:
        slot = slot_of(parameter, self._function, last=last)
        if parameter.name == self._rest_name:
            self._rest = slot
        elif slot is not None:
            self._slots[parameter.name] = slot
