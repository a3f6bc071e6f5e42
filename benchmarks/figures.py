"""What a measurement gives: figures, each beside a limit and a target, and curves to plot."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Target:
    """What a figure is to reach: its value, or its ratio to the reference."""

    sense: Literal[">=", "<="]
    bound: float
    of: Literal["ratio", "value"] = "ratio"


@dataclass(frozen=True)
class Figure:
    """One measured figure.

    `against` names what the reference is, measured in the same run. `ratio` is the median of the
    ratios of single repetitions where there are several, else it is taken from the two values.
    """

    what: str
    value: float
    unit: str
    against: str = ""
    reference: float | None = None
    ratio: float | None = None
    target: Target | None = None

    def __post_init__(self) -> None:
        if self.ratio is None and self.reference:
            object.__setattr__(self, "ratio", self.value / self.reference)
        if self.target is not None and self.target.of == "ratio" and self.ratio is None:
            raise ValueError(f"{self.what}: a target for a ratio needs a reference")

    @property
    def reached(self) -> bool | None:
        """Whether the target is reached, None if there is none."""
        if self.target is None:
            return None
        measured = self.value if self.target.of == "value" else self.ratio
        assert measured is not None
        if self.target.sense == ">=":
            return measured >= self.target.bound
        return measured <= self.target.bound


@dataclass(frozen=True)
class Curve:
    """Points to plot."""

    label: str
    points: list[tuple[float, float]]


@dataclass(frozen=True)
class Result:
    """What one row of the table gave: its figures, and in `notes` what else was seen."""

    figures: list[Figure]
    notes: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
