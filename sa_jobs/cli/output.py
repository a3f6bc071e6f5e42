"""How commands print: stored text is escaped, times carry their offset, tables fit their reader.

rich is imported where a table is printed, so that a worker never loads it.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any

import click

# Joiners between letters and inside emoji: harmless, and text reads wrong without them.
_JOINERS = "\u200c\u200d"
_NO_ESCAPES_NEEDED = re.compile(r"[ -~]*")


def escaped(text: str) -> str:
    """Return text on one line, with every character spelled out that could act on a terminal.

    Those are the control characters, line separators and bidirectional controls.
    """
    if _NO_ESCAPES_NEEDED.fullmatch(text):
        return text
    return "".join(_shown(character) for character in text)


def escaped_lines(text: str) -> list[str]:
    """Return text of several lines, each escaped; a tab becomes four spaces."""
    return [escaped(line) for line in text.expandtabs(4).split("\n")]


def _shown(character: str) -> str:
    if character in _JOINERS or unicodedata.category(character) not in (
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    ):
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def shown_time(moment: dt.datetime | None) -> str:
    """Return a time in the zone of this machine, with its offset."""
    if moment is None:
        return "-"
    try:
        local = moment.astimezone()
    except (OverflowError, ValueError, OSError):
        local = moment  # the first or last day that a datetime can hold
    return local.isoformat(" ", "seconds")


def shown_age(seconds: float | None) -> str:
    """Return a duration in its two largest units."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    for size, unit, small, small_unit in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // small} {small_unit}"
    return f"{whole // 60} min {whole % 60} s"


def shown(value: Any) -> str:
    """Return any value of a job as a cell of a table, escaped."""
    if isinstance(value, dt.datetime):
        return shown_time(value)
    return "-" if value is None else escaped(str(value))


def print_line(text: str = "") -> None:
    """Print a line that is escaped already."""
    click.echo(text)


def say(text: str) -> None:
    """Print a line, escaped already, on standard error."""
    click.echo(text, err=True)


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Iterable[str] = ()
) -> None:
    """Print rows of any values; the columns in `right` are aligned to the right.

    Fitted to a terminal; elsewhere each row is one whole line.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    to_the_right = set(right)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in to_the_right else "left")
    for row in rows:
        # Text, since a str would be read as markup.
        table.add_row(*(Text(shown(value)) for value in row))
    # Wide enough for any row; a pipe or a file has no width.
    console = Console() if sys.stdout.isatty() else Console(width=100_000)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        click.echo(line.rstrip())


def print_json(value: Any) -> None:
    """Print a JSON document that holds ASCII alone; datetimes become ISO 8601 text in UTC."""
    text = json.dumps(value, indent=2, default=_json_value)
    click.echo(text.replace("\x7f", "\\u007f"))


def _json_value(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        try:
            return value.astimezone(dt.timezone.utc).isoformat()
        except OverflowError:
            return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON value")
