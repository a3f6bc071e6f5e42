"""On SQLite, where hosts run their unit tests: attach, create and enqueue work."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, literal, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import (
    DuplicateJobError,
    Enqueued,
    Jobs,
    Row,
    attach,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)


class Base(DeclarativeBase):
    pass


tables = attach(Base)
jobs = Jobs(tables)
Job = tables.Job
LATER = dt.datetime(2090, 1, 1, 13, tzinfo=dt.timezone(dt.timedelta(hours=13)))


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[int | None] = mapped_column(ForeignKey("sa_jobs.id"))


@jobs.handler(queue="mail", max_attempts=3)
def send(order_id: int) -> None: ...


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = create_engine("sqlite://")
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with Session(engine) as session:
        yield session


def utc(value: dt.datetime) -> dt.datetime:
    """Return a time as SQLite gives it back, without its zone."""
    return value.astimezone(dt.timezone.utc).replace(tzinfo=None)


def test_a_job_commits_with_the_orders_data(session: Session) -> None:
    order = Order()
    session.add(order)
    session.flush()
    enqueued = jobs.enqueue(session, send, {"order_id": order.id}, run_at=LATER, priority=5)
    order.job_id = enqueued.id
    session.commit()
    found = session.scalars(select(Job)).one()
    assert found.payload == {"order_id": order.id}
    assert (found.queue, found.priority, found.max_attempts) == ("mail", 5, 3)
    assert found.run_at == utc(LATER)
    assert (found.status, found.meta, found.attempts) == ("ready", {}, 0)


def test_a_job_goes_with_the_rollback(session: Session) -> None:
    enqueue(session, "send", tables=tables)
    session.rollback()
    assert session.scalars(select(Job)).all() == []


def test_a_delay_is_added_to_the_time_of_the_call(session: Session) -> None:
    enqueue(session, "send", delay=3600, tables=tables)
    found = session.scalars(select(Job)).one()
    now = dt.datetime.now(dt.timezone.utc).replace(tzinfo=None)
    assert abs(found.run_at - now - dt.timedelta(hours=1)) < dt.timedelta(seconds=30)


def test_jobs_for_now_and_later_can_be_told_apart(session: Session) -> None:
    now = enqueue(session, "send", tables=tables)
    enqueue(session, "send", delay=60, tables=tables)
    cutoff = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=30)
    assert session.scalars(select(Job.id).where(Job.run_at <= cutoff)).all() == [now.id]


@pytest.mark.parametrize("key", ["idempotency_key", "unique_key"])
def test_a_duplicate_key_gives_the_existing_job(session: Session, key: str) -> None:
    options: dict[str, Any] = {key: "k", "tables": tables}
    first = enqueue(session, "send", {"a": 1}, **options)
    assert enqueue(session, "send", {"a": 2}, **options) == Enqueued(first.id, created=False)
    enqueue(session, "send", {"a": 3}, on_conflict="replace", run_at=LATER, **options)
    with pytest.raises(DuplicateJobError):
        enqueue(session, "send", {"a": 4}, on_conflict="raise", **options)
    session.commit()
    found = session.scalars(select(Job)).one()
    assert (found.payload, found.run_at) == ({"a": 3}, utc(LATER))


def test_many_jobs_keep_their_order_and_report_duplicates(session: Session) -> None:
    results = enqueue_many(
        session,
        "send",
        [{"n": 0}, Row({"n": 1}, idempotency_key="k"), Row({"n": 2}, idempotency_key="k"), {}],
        tables=tables,
    )
    assert [result.created for result in results] == [True, True, False, True]
    assert results[2].id == results[1].id
    payloads = session.scalars(select(Job.payload).order_by(Job.id)).all()
    assert payloads == [{"n": 0}, {"n": 1}, {}]


def test_jobs_come_from_a_select(session: Session) -> None:
    session.add_all([Order(), Order()])
    query = select(
        Order.id.label("order_id"),
        literal("k").label("sa_jobs_idempotency_key"),
        literal("q").label("sa_jobs_queue"),
    )
    assert enqueue_from_select(session, "send", query, tables=tables) == 1
    assert jobs.enqueue_from_select(session, send, select(Order.id.label("order_id"))) == 2
    found = session.execute(select(Job.queue, Job.payload).order_by(Job.id)).all()
    assert [tuple(row) for row in found] == [
        ("q", {"order_id": 1}),
        ("mail", {"order_id": 1}),
        ("mail", {"order_id": 2}),
    ]


def test_a_job_is_cancelled_and_retried(session: Session) -> None:
    enqueued = enqueue(session, "send", unique_key="k", tables=tables)
    assert cancel(session, enqueued.id, tables=tables) == "cancelled"
    assert cancel(session, enqueued.id, tables=tables) == "final"
    assert cancel(session, 99, tables=tables) == "missing"
    twin = enqueue(session, "send", unique_key="k", tables=tables)
    assert retry(session, enqueued.id, tables=tables) == "duplicate"
    assert cancel(session, twin.id, tables=tables) == "cancelled"
    assert retry(session, enqueued.id, tables=tables) == "ready"
    session.commit()


def test_drop_all_works_too(engine: Engine) -> None:
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
