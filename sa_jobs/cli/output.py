"""How commands print: stored text is escaped, times carry their offset, tables fit their reader.

rich is imported where a table is printed, so that a worker never loads it. What is printed goes to
Python's own streams: click would put another encoding in place of theirs. A standard stream that
was closed is None, as everywhere in Python.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import io
import json
import os
import re
import sys
import unicodedata
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import click

# Joiners between letters and inside emoji: harmless, and text reads wrong without them.
_JOINERS = "\u200c\u200d"
_NO_ESCAPES_NEEDED = re.compile(r"[ -~]*")
_NOT_ASCII = re.compile(r"[^ -~]")
# Wide enough for any row; a pipe or a file has no width.
_ANY_WIDTH = 100_000


class OutputError(click.ClickException):
    """Standard output cannot be written; the text says why, and what it should have said."""

    def __init__(self, reason: str, *, lost: str = "") -> None:
        super().__init__(
            f"cannot write to standard output ({reason})" + (f": {lost}" if lost else "")
        )


class JsonText(str):
    """A value that is JSON text already."""

    __slots__ = ()


def prepare_streams() -> None:
    """Make the standard streams safe to write to.

    A character that a terminal or pipe cannot show becomes its number. Where a stream is closed,
    its file descriptor is taken, or the next file or connection that is opened would get it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def settle_streams() -> None:
    """Let go of what the standard streams cannot write, or Python would fail for it at its exit."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_output() -> None:
    """Raise OutputError if standard output is closed, before anything is done."""
    if sys.stdout is None:
        raise OutputError("it is closed")


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
    _write(text)


def report(text: str, *, meaning: str = "") -> None:
    """Print a line about what has been changed, at once; if it is lost, the error tells it."""
    _write(text, lost=meaning or text)
    flush(lost=meaning or text)


def flush(*, lost: str = "") -> None:
    """Write out what has been printed."""
    check_output()
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise OutputError(_reason(error), lost=lost) from error


def say(text: str) -> None:
    """Print a line, escaped already, on standard error; where that cannot be, nobody is told."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _write(text: str, *, lost: str = "") -> None:
    check_output()
    try:
        sys.stdout.write(f"{text}\n")
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:
        raise OutputError(_reason(error), lost=lost) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


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
    check_output()
    # Captured, but a console also writes to its file now and then: only a terminal is given to it.
    console = Console() if sys.stdout.isatty() else Console(file=io.StringIO(), width=_ANY_WIDTH)
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print_line(line.rstrip())


def print_json(document: dict[str, Any] | list[Any]) -> None:
    """Print a JSON document that holds ASCII alone.

    Datetimes become ISO 8601 text in UTC. A JsonText, as a value of the outermost object, is
    printed as it is: Python's numbers are neither as large nor as exact as the database's.
    """
    texts: dict[str, str] = {}
    if isinstance(document, dict):
        document = dict(document)
        for name, value in document.items():
            if isinstance(value, JsonText):
                document[name] = uuid.uuid4().hex
                texts[document[name]] = value
    text = json.dumps(document, indent=2, default=_json_value)
    for mark, value in texts.items():
        text = text.replace(f'"{mark}"', value, 1)
    print_line(_NOT_ASCII.sub(_json_escape, text))


def _json_escape(match: re.Match[str]) -> str:
    character = match.group()
    # Lines end outside of strings alone, where JSON takes them for space.
    return (
        character if character == "\n" else json.dumps(character)[1:-1].replace("\x7f", "\\u007f")
    )


def _json_value(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        try:
            return value.astimezone(dt.timezone.utc).isoformat()
        except OverflowError:
            return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON value")
