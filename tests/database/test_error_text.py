"""What every driver's errors look like as text: the server's message, and nothing of the data."""

from __future__ import annotations

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from sa_jobs.error_text import error_text
from tests.database.callers import Caller

MARKER = "hunter2-XYZ"


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("INSERT INTO pins VALUES (:pin)", "violates check constraint"),
        ("SELECT CAST('x' || CAST(:pin AS text) AS json)", "invalid input syntax for type json"),
        ("SELECT CAST(:pin AS text), missing FROM pins", 'column "missing" does not exist'),
    ],
)
def test_a_database_error_is_shown_without_its_data(
    caller: Caller, statement: str, says: str
) -> None:
    caller.execute(text("CREATE TEMPORARY TABLE pins (pin text CHECK (pin IS NULL))"))
    with pytest.raises(DBAPIError) as raised:
        caller.execute(text(statement).bindparams(pin=MARKER))
    caller.rollback()

    content = error_text(raised.value)

    assert MARKER not in content
    assert says in content
    assert MARKER not in str(raised.value)
