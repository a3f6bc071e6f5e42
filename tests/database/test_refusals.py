"""Bad input: a documented error before any SQL, and the host's transaction unharmed."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event, func, literal, literal_column, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import (
    DuplicateJobError,
    InvalidJobError,
    InvalidJobTypeError,
    Jobs,
    Row,
    UnknownHandlerError,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from sa_jobs.models import Job
from tests.database.conftest import ServerLog


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)


jobs = Jobs(max_payload_bytes=100)


@jobs.handler
def send_receipt(invoice_id: int, note: str = "") -> None: ...


NAIVE = dt.datetime(2030, 1, 1)  # noqa: DTZ001
AWARE = dt.datetime(2030, 1, 1, tzinfo=dt.timezone.utc)
Call = Callable[[Session], Any]


def with_payload(payload: Any) -> Call:
    return lambda session: enqueue(session, "send", payload)


def with_options(**options: Any) -> Call:
    return lambda session: enqueue(session, **{"handler": "send", **options})


def of_receipt(payload: Any, handler: Any = "send_receipt") -> Call:
    return lambda session: jobs.enqueue(session, handler, payload)


def of_rows(*rows: Any) -> Call:
    return lambda session: enqueue_many(session, "send", rows)


def of_select(*columns: Any) -> Call:
    return lambda session: enqueue_from_select(session, "send", select(*columns))


ONE = literal(1).label("a")

REFUSED: dict[str, tuple[Call, type[Exception]]] = {
    "NUL": (with_payload({"a": "b\x00"}), InvalidJobError),
    "NUL in a key": (with_payload({"a\x00": 1}), InvalidJobError),
    "lone surrogate": (with_payload({"a": ["\ud800"]}), InvalidJobError),
    "NaN": (with_payload({"a": math.nan}), InvalidJobError),
    "infinity": (with_payload({"a": math.inf}), InvalidJobError),
    "object": (with_payload({"a": object()}), InvalidJobTypeError),
    "datetime": (with_payload({"a": AWARE}), InvalidJobTypeError),
    "set": (with_payload({"a": {1}}), InvalidJobTypeError),
    "list as payload": (with_payload([1]), InvalidJobTypeError),
    "text as payload": (with_payload("a"), InvalidJobTypeError),
    "2 MB": (with_payload({"a": "x" * 2_000_000}), InvalidJobError),
    "naive run_at": (with_options(run_at=NAIVE), InvalidJobError),
    "text as run_at": (with_options(run_at="2030-01-01"), InvalidJobTypeError),
    "latest run_at": (
        with_options(run_at=dt.datetime.max.replace(tzinfo=dt.timezone.utc)),
        InvalidJobError,
    ),
    "run_at and delay": (with_options(run_at=AWARE, delay=1), InvalidJobError),
    "negative delay": (with_options(delay=-1), InvalidJobError),
    "endless delay": (with_options(delay=dt.timedelta.max), InvalidJobError),
    "empty queue": (with_options(queue=""), InvalidJobError),
    "NUL in the queue": (with_options(queue="a\x00"), InvalidJobError),
    "over-long queue": (with_options(queue="é" * 101), InvalidJobError),
    "no queue": (with_options(queue=None), InvalidJobTypeError),
    "empty handler": (with_options(handler=""), InvalidJobError),
    "over-long handler": (with_options(handler="x" * 201), InvalidJobError),
    "unregistered function": (with_options(handler=print), InvalidJobTypeError),
    "empty key": (with_options(idempotency_key=""), InvalidJobError),
    "over-long key": (with_options(idempotency_key="x" * 501), InvalidJobError),
    "surrogate in a key": (with_options(unique_key="\udfff"), InvalidJobError),
    "number as key": (with_options(idempotency_key=1842), InvalidJobTypeError),
    "empty tenant": (with_options(tenant=""), InvalidJobError),
    "priority too high": (with_options(priority=32_768), InvalidJobError),
    "priority too low": (with_options(priority=-32_769), InvalidJobError),
    "fractional priority": (with_options(priority=1.5), InvalidJobTypeError),
    "no attempts": (with_options(max_attempts=0), InvalidJobError),
    "too many attempts": (with_options(max_attempts=2**63), InvalidJobError),
    "unknown on_conflict": (with_options(on_conflict="ignore"), InvalidJobError),
    "unknown handler": (of_receipt({}, "send_recipt"), UnknownHandlerError),
    "missing payload key": (of_receipt({"note": "x"}), InvalidJobError),
    "extra payload key": (of_receipt({"invoice_id": 1, "x": 1}), InvalidJobError),
    "the registry's own size": (
        of_receipt({"invoice_id": 1, "note": "x" * 100}),
        InvalidJobError,
    ),
    "a bad row": (of_rows({}, {"a": math.nan}), InvalidJobError),
    "a bad option of a row": (of_rows({}, Row(queue="")), InvalidJobError),
    "a bad type in a row": (of_rows({}, Row(priority="high")), InvalidJobTypeError),  # type: ignore[arg-type]
    "a row with two times": (of_rows(Row(run_at=AWARE, delay=1)), InvalidJobError),
    "a tuple as row": (of_rows((1, 2)), InvalidJobTypeError),
    "a column without a name": (of_select(literal(1)), InvalidJobError),
    "two columns of a name": (of_select(ONE, literal(2).label("a")), InvalidJobError),
    "two tables' ids": (of_select(Note.id, Job.id), InvalidJobError),
    "one column twice": (of_select(Note.id, Note.id), InvalidJobError),
    "an expression without a name": (of_select(Note.id + 1), InvalidJobError),
    "an unknown option": (of_select(ONE.label("sa_jobs_queu")), InvalidJobError),
    "columns as text": (of_select(ONE, text("2 AS b")), InvalidJobError),
    "all columns of a table by star": (of_select(literal_column("*")), InvalidJobError),
    "no select": (
        lambda session: enqueue_from_select(session, "send", "SELECT 1"),  # type: ignore[call-overload]
        InvalidJobTypeError,
    ),
    "a select that lacks a parameter": (
        lambda session: jobs.enqueue_from_select(
            session, send_receipt, select(literal(1).label("note"))
        ),
        InvalidJobError,
    ),
    "an id that is no number": (lambda session: cancel(session, "1"), InvalidJobTypeError),  # type: ignore[call-overload]
    "an id beyond bigint": (lambda session: cancel(session, 2**63), InvalidJobError),
    "a retry beyond bigint": (lambda session: retry(session, 2**63), InvalidJobError),
    "a retry at a naive time": (lambda session: retry(session, 1, run_at=NAIVE), InvalidJobError),
}


@pytest.fixture
def host(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


class Statements:
    """Counts what an engine sends."""

    def __init__(self, engine: Engine) -> None:
        self.sent: list[str] = []
        event.listen(engine, "before_cursor_execute", self._note)

    def _note(self, connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        self.sent.append(statement)


def test_bad_input_is_refused_before_any_sql_and_the_hosts_work_is_kept(
    host: Engine, server_log: ServerLog
) -> None:
    """One database serves all cases, each of which has a session and transaction of its own."""
    for number, (name, (call, error)) in enumerate(REFUSED.items(), start=1):
        with Session(host) as session:
            session.add(Note())
            session.flush()
            session.add(Note())
            statements = Statements(host)
            try:
                call(session)
            except error:
                pass
            else:
                pytest.fail(f"{name}: not refused")
            assert statements.sent == [], name
            event.remove(host, "before_cursor_execute", statements._note)
            session.add(Note())
            session.commit()
            assert session.scalar(select(func.count()).select_from(Note)) == 3 * number, name
            assert session.scalar(select(func.count()).select_from(Job)) == 0, name
    assert server_log.errors() == []


@pytest.mark.parametrize("on_conflict", ["existing", "replace", "raise"])
def test_a_duplicate_leaves_no_error_and_the_hosts_work_is_kept(
    host: Engine, server_log: ServerLog, on_conflict: Any
) -> None:
    with Session(host) as session:
        enqueue(session, "send", idempotency_key="k")
        session.add(Note())
        session.flush()
        session.add(Note())
        try:
            enqueue(session, "send", idempotency_key="k", on_conflict=on_conflict)
        except DuplicateJobError:
            assert on_conflict == "raise"
        session.add(Note())
        session.commit()
        assert session.scalar(select(func.count()).select_from(Note)) == 3
        assert session.scalar(select(func.count()).select_from(Job)) == 1
    assert server_log.errors() == []


def test_a_refusal_names_what_was_wrong_where(host: Engine) -> None:
    with Session(host) as session:
        with pytest.raises(InvalidJobError, match=r"^row 1: payload\['a'\]\[0\] is nan"):
            enqueue_many(session, "send", [{}, {"a": [math.nan]}])
        with pytest.raises(InvalidJobError, match=r"^row 1: queue must not be empty"):
            enqueue_many(session, "send", [{}, Row(queue="")])
        with pytest.raises(InvalidJobError, match="column 1 of the select has no name"):
            enqueue_from_select(session, "send", select(ONE, literal(2)))
