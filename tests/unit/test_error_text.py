"""An exception as text: whatever its own text does, it can be stored and gives no data away."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, StatementError

from sa_jobs.error_text import error_text, storable
from sa_jobs.limits import MAX_ERROR_BYTES, unstorable

MARKER = "hunter2-XYZ"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


class Broken(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Silent(Exception):
    def __str__(self) -> Any:
        return None  # noqa: PLE0307


class Odd(Exception):
    exceptions: Any = None
    __notes__: Any = 5


class Hostile(Exception):
    @property
    def exceptions(self) -> Any:
        raise SystemError


class Exiting(Exception):
    @property
    def args(self) -> Any:
        raise SystemExit

    @args.setter
    def args(self, values: Any) -> None: ...


class NamelessKind(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Nameless(Exception, metaclass=NamelessKind):
    pass


def test_an_exception_that_does_anything_when_it_is_looked_at_gives_a_text() -> None:
    assert "Exiting" in error_text(raised(Exiting()))
    assert error_text(raised(Nameless())).startswith("an exception without a name")


def test_the_text_is_the_traceback() -> None:
    content = error_text(raised(ValueError("out of paper")))
    assert content.startswith("Traceback (most recent call last):")
    assert "test_error_text.py" in content
    assert content.endswith("ValueError: out of paper")


@pytest.mark.parametrize("error", [Broken(), Silent(), Odd("x"), Hostile("x")])
def test_an_exception_without_a_usable_text_is_named(error: Exception) -> None:
    assert type(error).__name__ in error_text(raised(error))


@pytest.mark.parametrize(
    "message",
    ["a\x00b", "\ud800", "a" * 1_000_000, "é" * 600_000, "\x00" * 100_000],
    ids=["NUL", "surrogate", "1 MB", "two-byte characters", "many NULs"],
)
def test_any_message_becomes_text_that_can_be_stored(message: str) -> None:
    content = error_text(raised(ValueError(message)))
    assert unstorable(content) is None
    assert len(content.encode()) <= MAX_ERROR_BYTES


def test_long_text_is_cut_out_of_the_middle() -> None:
    content = error_text(raised(ValueError("x" * 1_000_000 + " the end")))
    assert content.startswith("Traceback")
    assert "... cut ..." in content
    assert content.endswith("the end")


@pytest.mark.parametrize("size", range(95, 106))
def test_a_cut_leaves_no_half_of_a_character(size: int) -> None:
    cut = storable("😀é" * 100, max_bytes=size)
    assert len(cut.encode()) <= size
    assert set(cut.replace("\n... cut ...\n", "")) == {"😀", "é"}


def test_a_chain_that_runs_in_a_circle_ends() -> None:
    first, second = raised(ValueError("one")), raised(ValueError("two"))
    first.__context__, second.__context__ = second, first
    content = error_text(first)
    assert "one" in content
    assert "two" in content


def test_a_long_chain_is_cut() -> None:
    error = raised(ValueError("innermost"))
    for number in range(300):
        outer = raised(ValueError(f"error {number}"))
        outer.__context__ = error
        error = outer
    content = error_text(error)
    assert len(content.encode()) <= MAX_ERROR_BYTES
    assert content.endswith("error 299")


def refused_statement() -> StatementError:
    """Return a real error of a statement whose parameter holds the marker."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(StatementError) as caught:
        connection.execute(text("SELECT :secret FROM nowhere"), {"secret": MARKER})
    engine.dispose()
    return caught.value


def test_the_parameters_of_a_statement_are_left_out() -> None:
    error = refused_statement()
    assert MARKER in str(error)
    content = error_text(error)
    assert MARKER not in content
    assert "SELECT ? FROM nowhere" in content


def test_the_parameters_are_left_out_of_a_cause_too() -> None:
    error = ValueError("could not look")
    error.__cause__ = refused_statement()
    assert MARKER not in error_text(raised(error))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_the_members_of_a_group_are_shown_without_their_parameters() -> None:
    group = eval("ExceptionGroup")("several", [ValueError("first"), refused_statement()])
    content = error_text(raised(group))
    assert "ValueError: first" in content
    assert "OperationalError" in content
    assert MARKER not in content


def test_the_detail_of_a_database_error_is_left_out() -> None:
    original = Exception(f"duplicate key value\nDETAIL:  Key (token)=({MARKER}\n) already exists.")
    error = DBAPIError.instance("INSERT ...", {"token": MARKER}, original, Exception)
    assert isinstance(error, DBAPIError)
    error.__cause__ = original
    content = error_text(raised(error))
    assert MARKER not in content
    assert "duplicate key value" in content


class DriversError(Exception):
    """As one of a driver's."""


DriversError.__module__ = "psycopg2.errors"


@pytest.mark.parametrize("label", ["DETAIL", "LINE 1", "CONTEXT", "QUERY"])
def test_whatever_follows_a_drivers_message_is_left_out(label: str) -> None:
    original = DriversError(f"refused\nHINT:  try less\n{label}: ({MARKER}\n) ^")
    error = DBAPIError.instance("INSERT ...", {}, original, DriversError)
    content = error_text(raised(error))
    assert MARKER not in content
    assert "refused" in content
    assert "try less" in content
    assert MARKER not in error_text(raised(original))


def test_the_fields_of_a_message_are_left_out_but_for_the_message() -> None:
    original = DriversError(
        {"S": "ERROR", "C": "23514", "M": "refused", "D": f"row ({MARKER})", "W": MARKER}
    )
    error = DBAPIError.instance("INSERT ...", {}, original, DriversError)
    assert isinstance(error, DBAPIError)
    error.__cause__ = original
    content = error_text(raised(error))
    assert MARKER not in content
    assert content.count("refused") == 2
    assert MARKER not in str(error)


def test_an_error_of_no_driver_keeps_its_lines() -> None:
    error = ValueError("bad settings\nLINE 3: colour", {"D": "x"})
    assert "LINE 3: colour" in error_text(raised(error))
    assert error.args[1] == {"D": "x"}


def test_an_error_without_data_keeps_its_arguments() -> None:
    error = IntegrityError("INSERT ...", {}, Exception("duplicate key value"))
    before = error.args
    error_text(error)
    assert error.args == before
