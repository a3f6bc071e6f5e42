"""A connection in autocommit mode works, and the place that enqueues on it is warned."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, literal, select
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sa_jobs import (
    AutocommitWarning,
    DuplicateJobError,
    Jobs,
    Row,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from tests.support.jobs import all_jobs

jobs = Jobs()


@jobs.handler
def send(n: int = 0) -> None: ...


ENQUEUES: dict[str, Callable[[Any], Any]] = {
    "enqueue": lambda session: enqueue(session, "send"),
    "enqueue_many": lambda session: enqueue_many(session, "send", [None]),
    "enqueue_from_select": lambda session: enqueue_from_select(
        session, "send", select(literal(1).label("n"))
    ),
    "jobs.enqueue": lambda session: jobs.enqueue(session, send),
    "jobs.enqueue_many": lambda session: jobs.enqueue_many(session, send, [None]),
    "jobs.enqueue_from_select": lambda session: jobs.enqueue_from_select(
        session, send, select(literal(1).label("n"))
    ),
}


@pytest.mark.parametrize("call", ENQUEUES.values(), ids=ENQUEUES)
def test_an_enqueue_warns_at_the_line_that_calls_it(
    engine: Engine, connection: Connection, call: Callable[[Any], Any]
) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as autocommit,
        pytest.warns(AutocommitWarning, match="committed at once, apart from the") as caught,
    ):
        call(autocommit)
    (warning,) = caught
    assert warning.filename == __file__
    assert len(all_jobs(connection)) == 1


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_a_session_over_an_autocommit_engine_warns(
    database_url: str, connection: Connection, driver: str
) -> None:
    url = make_url(database_url).set(drivername=f"postgresql+{driver}")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with Session(engine) as session:
        with pytest.warns(AutocommitWarning):
            enqueue(session, "send")
        session.rollback()
    engine.dispose()
    assert len(all_jobs(connection)) == 1


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_async_session_warns_at_the_coroutines_line(
    database_url: str, connection: Connection, driver: str
) -> None:
    url = make_url(database_url).set(drivername=f"postgresql+{driver}")

    async def place_order() -> None:
        engine = create_async_engine(url, isolation_level="AUTOCOMMIT")
        async with AsyncSession(engine) as session:
            await enqueue(session, "send")
        await engine.dispose()

    with pytest.warns(AutocommitWarning) as caught:
        asyncio.run(place_order())
    assert [warning.filename for warning in caught] == [__file__]
    assert len(all_jobs(connection)) == 1


def test_a_place_is_warned_once(engine: Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as autocommit,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("default")
        for _ in range(3):
            enqueue(autocommit, "send")
        enqueue(autocommit, "send")
    assert len({warning.lineno for warning in caught}) == len(caught) == 2


def test_the_warning_can_be_switched_off(engine: Engine) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as autocommit,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", category=AutocommitWarning)
        assert enqueue(autocommit, "send").created


@pytest.mark.parametrize(
    "level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"], ids=str.lower
)
def test_a_transaction_of_any_level_does_not_warn(engine: Engine, level: Any) -> None:
    with engine.connect().execution_options(isolation_level=level) as own:
        assert enqueue(own, "send").created


@pytest.mark.filterwarnings("ignore::sa_jobs.AutocommitWarning")
def test_every_operation_works_in_autocommit_mode(engine: Engine, connection: Connection) -> None:
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        first = enqueue(session, "send", idempotency_key="k")
        assert enqueue(session, "send", idempotency_key="k").id == first.id
        enqueue(session, "send", {"n": 1}, idempotency_key="k", on_conflict="replace")
        rows = [Row({"n": 2}, idempotency_key="k"), Row(idempotency_key="other")]
        assert enqueue_many(session, "send", rows, on_conflict="replace")[0].id == first.id
        assert enqueue_from_select(session, "send", select(literal(3).label("n"))) == 1
        assert cancel(session, first.id) == "cancelled"
        assert retry(session, first.id) == "ready"
    assert [row.payload for row in all_jobs(connection)] == [{"n": 2}, {}, {"n": 3}]


@pytest.mark.filterwarnings("ignore::sa_jobs.AutocommitWarning")
def test_a_refused_call_leaves_what_came_before_the_error(
    engine: Engine, connection: Connection
) -> None:
    """Nothing can be undone there."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as autocommit:
        enqueue(autocommit, "send", unique_key="k")
        rows = [Row(unique_key="j"), Row(unique_key="k")]
        with pytest.raises(DuplicateJobError):
            enqueue_many(autocommit, "send", rows, on_conflict="raise")
    assert [row.unique_key for row in all_jobs(connection)] == ["k", "j"]
