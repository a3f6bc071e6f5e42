"""Figures as a table: in columns for a terminal, or in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.figures import Figure

HEADER = ("what", "figure", "measured beside it", "", "ratio", "target", "reached")
_RIGHT = (False, True, False, True, True, True, False)


def number(value: float) -> str:
    """Return a number with as many digits as mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def cells(figure: Figure) -> tuple[str, ...]:
    """Return a figure's cells, in the order of HEADER."""
    target = figure.target
    unit = figure.unit if target is not None and target.of == "value" else "x"
    return (
        figure.what,
        f"{number(figure.value)} {figure.unit}",
        figure.against,
        "" if figure.reference is None else number(figure.reference),
        "" if figure.ratio is None else f"{figure.ratio:.2f}",
        "" if target is None else f"{target.sense} {number(target.bound)} {unit}",
        {True: "yes", False: "no", None: ""}[figure.reached],
    )


def in_columns(figures: Iterable[Figure]) -> str:
    """Return the table for a terminal."""
    lines = [HEADER, *map(cells, figures)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, _RIGHT, strict=True)
        ).rstrip()
        for line in lines
    )


def in_markdown(figures: Iterable[Figure]) -> str:
    """Return the table as Markdown."""
    return markdown(HEADER, [cells(figure) for figure in figures], _RIGHT)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]], right: Sequence[bool]) -> str:
    """Return a Markdown table; the columns of numbers are set to the right."""
    rules = ["--:" if is_number else "---" for is_number in right]
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, rules, *lines])
