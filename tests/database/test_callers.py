"""The public operations with every kind of session and connection, on every driver.

Each test has handlers and keys of its own in one database, so that nothing is made anew for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import (
    Connection,
    Engine,
    insert,
    literal,
    select,
    text,
    union_all,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import (
    DuplicateJobError,
    Enqueued,
    InvalidJobError,
    InvalidJobTypeError,
    Jobs,
    Row,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from sa_jobs.models import Job
from tests.database.callers import Application, Caller, in_two_phases
from tests.database.conftest import Look


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str]


@pytest.fixture(scope="module", autouse=True)
def orders(looker: Engine) -> None:
    """The table of an application beside the queue's."""
    Base.metadata.create_all(looker)


@pytest.fixture
def caller(application: Application) -> Iterator[Caller]:
    with application.open() as opened:
        yield opened


def test_jobs_are_there_after_the_commit_and_not_before(
    caller: Caller, name: str, committed: Look
) -> None:
    one = caller(enqueue, name, {"n": 0}, delay=60, tenant="t", priority=3)
    many = caller(enqueue_many, name, [{"n": 1}, Row({"n": 2}, queue="mail"), None])
    query = select(literal(4).label("n"), literal("u").label("sa_jobs_tenant"))
    assert caller(enqueue_from_select, name, query) == 1
    assert caller(enqueue_from_select, name, select(literal(5).label("n"))) == 1
    assert one.created
    assert all(result.created for result in many)
    assert committed() == []
    caller.commit()
    rows = committed()
    assert [row.payload.get("n") for row in rows] == [0, 1, 2, None, 4, 5]
    assert [row.id for row in rows[:4]] == [one.id, *(result.id for result in many)]
    assert [row.tenant for row in rows] == ["t", None, None, None, "u", None]
    assert (rows[0].priority, rows[2].queue) == (3, "mail")
    assert (rows[0].run_at - rows[0].created_at).total_seconds() == 60


def test_jobs_go_with_the_rollback(caller: Caller, name: str, committed: Look) -> None:
    caller(enqueue, name, unique_key=name)
    caller(enqueue_many, name, [None, Row(idempotency_key=name)])
    caller(enqueue_from_select, name, select(literal(1).label("n")))
    caller.rollback()
    assert caller(enqueue, name, unique_key=name, idempotency_key=name).created
    caller.commit()
    assert len(committed()) == 1


def test_jobs_go_with_their_savepoint(caller: Caller, name: str, committed: Look) -> None:
    first = caller(enqueue, name, {"n": 0})
    savepoint = caller.savepoint()
    caller(enqueue, name, {"n": 1}, unique_key=name)
    caller(enqueue_many, name, [{"n": 2}])
    savepoint.rollback()
    savepoint = caller.savepoint()
    second = caller(enqueue, name, {"n": 3}, unique_key=name)
    savepoint.commit()
    caller.commit()
    assert second.created
    assert [row.id for row in committed()] == [first.id, second.id]


@pytest.mark.parametrize("key", ["idempotency_key", "unique_key"])
def test_a_taken_key_is_found_replaced_or_refused(
    caller: Caller, name: str, committed: Look, key: str
) -> None:
    options: dict[str, Any] = {key: name}
    first = caller(enqueue, name, {"n": 0}, **options)
    found = Enqueued(first.id, created=False)
    assert caller(enqueue, name, {"n": 1}, **options) == found
    caller.commit()
    assert caller(enqueue, name, {"n": 2}, **options) == found
    assert caller(enqueue, name, {"n": 3}, on_conflict="replace", **options) == found
    with pytest.raises(DuplicateJobError) as caught:
        caller(enqueue, name, {"n": 4}, on_conflict="raise", **options)
    assert caught.value.id == first.id
    caller(enqueue, name, {"n": 5})
    caller.commit()
    assert [row.payload["n"] for row in committed()] == [3, 5]


def test_taken_keys_among_many_are_found_replaced_or_refused(
    caller: Caller, name: str, committed: Look
) -> None:
    first = caller(enqueue, name, {"n": 0}, unique_key=name)
    rows = [Row({"n": 1}, unique_key=name), {"n": 2}, Row({"n": 3}, unique_key=name + "b")]
    found = caller(enqueue_many, name, rows)
    assert [result.created for result in found] == [False, True, True]
    assert found[0].id == first.id
    caller.commit()
    again = [Row({"n": 4}, unique_key=name + "b"), Row({"n": 5}, unique_key=name), {"n": 6}]
    replaced = caller(enqueue_many, name, again, on_conflict="replace")
    assert [result.id for result in replaced][:2] == [found[2].id, first.id]
    with pytest.raises(DuplicateJobError) as caught:
        caller(enqueue_many, name, [{"n": 7}, *again], on_conflict="raise")
    assert caught.value.id in (first.id, found[2].id)
    caller.commit()
    assert [row.payload["n"] for row in committed()] == [5, 2, 4, 6]


def test_a_select_skips_taken_keys(caller: Caller, name: str, committed: Look) -> None:
    caller(enqueue, name, {"n": 0}, idempotency_key=name + "1")
    key = "sa_jobs_idempotency_key"
    query = union_all(
        *(select(literal(n).label("n"), literal(f"{name}{n}").label(key)) for n in (1, 2, 2, 3))
    )
    assert caller(enqueue_from_select, name, query) == 2
    caller.commit()
    assert sorted(row.payload["n"] for row in committed()) == [0, 2, 3]


def test_a_job_is_cancelled_and_retried(caller: Caller, name: str, committed: Look) -> None:
    job = caller(enqueue, name, unique_key=name)
    assert caller(cancel, job.id) == "cancelled"
    assert caller(cancel, job.id) == "final"
    assert caller(cancel, 2**62) == caller(retry, 2**62) == "missing"
    twin = caller(enqueue, name, unique_key=name)
    assert caller(retry, job.id) == "duplicate"
    assert caller(cancel, twin.id) == "cancelled"
    assert caller(retry, job.id, delay=60) == "ready"
    assert caller(retry, job.id) == "refused"
    caller.commit()
    assert [row.status for row in committed()] == ["ready", "cancelled"]


BAD: dict[str, Any] = {
    "payload": {"payload": {"a": object()}},
    "NUL": {"payload": {"a": "\x00"}},
    "key": {"idempotency_key": "x" * 501},
    "queue": {"queue": ""},
}


def test_a_refusal_leaves_the_transaction_as_it_was(
    caller: Caller, name: str, committed: Look
) -> None:
    """What is refused is refused before any SQL."""
    caller(enqueue, name, {"n": 0})
    for options in BAD.values():
        with pytest.raises((InvalidJobError, InvalidJobTypeError)):
            caller(enqueue, name, **options)
    with pytest.raises(InvalidJobTypeError, match=r"^row 1: payload\['b'\]"):
        caller(enqueue_many, name, [{"a": 1}, {"b": {1}}])
    with pytest.raises(InvalidJobError):
        caller(enqueue_from_select, name, select(literal("").label("sa_jobs_queue")))
    caller(enqueue, name, {"n": 1})
    caller.commit()
    assert [row.payload["n"] for row in committed()] == [0, 1]


def test_the_registrys_spelling_is_the_same(caller: Caller, name: str, committed: Look) -> None:
    registry = Jobs()

    @registry.handler(name, queue="mail", max_attempts=3)
    def send(n: int) -> None: ...

    caller(registry.enqueue, send, {"n": 0})
    caller(registry.enqueue_many, send, [{"n": 1}], on_conflict="raise")
    caller(registry.enqueue_from_select, send, select(literal(2).label("n")))
    caller.commit()
    assert [(row.payload["n"], row.queue, row.max_attempts) for row in committed()] == [
        (0, "mail", 3),
        (1, "mail", 3),
        (2, "mail", 3),
    ]


@pytest.mark.parametrize("expire_on_commit", [True, False])
def test_what_enqueue_returns_is_plain_and_outlives_the_session(
    application: Application, name: str, expire_on_commit: bool
) -> None:
    """No attribute of it needs SQL, and pending objects are flushed before the job."""
    options = {"expire_on_commit": expire_on_commit} if application.has_sessions else {}
    with application.open(**options) as caller:
        if application.has_sessions:
            caller.session.add(Order(note=name))
        else:
            caller.execute(insert(Order).values(note=name))
        query = select(Order.id).where(Order.note == name)
        assert caller(enqueue_from_select, name, query) == 1
        one = caller(enqueue, name, unique_key=name)
        assert caller.execute(select(Job.handler).where(Job.id == one.id)).scalar() == name
        many = caller(enqueue_many, name, [None, Row(unique_key=name)])
        caller.commit()
    assert many[1] == Enqueued(one.id, created=False)
    assert (one.created, many[0].created, many[0].id > one.id) == (True, True, True)


def test_a_two_phase_transaction_can_be_prepared(
    application: Application, name: str, committed: Look, looker: Engine
) -> None:
    """Also while a worker sleeps, when an enqueue in one phase would notify it."""

    def work(session: Any) -> None:
        enqueue(session, name, unique_key=name)
        enqueue_many(session, name, [Row(unique_key=name), None])
        enqueue(session, name, {"n": 1}, unique_key=name, on_conflict="replace")

    with looker.connect() as connection:
        if connection.execute(text("SHOW max_prepared_transactions")).scalar() == "0":
            pytest.skip("the server has max_prepared_transactions = 0")
        connection.execute(
            text("""
                INSERT INTO sa_jobs_sleepers VALUES ('default', now() + interval '1 hour')
                ON CONFLICT DO NOTHING
            """)
        )
    options = {"twophase": True} if application.has_sessions else {}
    with application.open(**options) as caller:
        caller.in_sync(lambda session: in_two_phases(session, work))
    assert [row.payload for row in committed()] == [{"n": 1}, {}]


def test_the_usual_rollback_fixture_shows_nothing_outside(
    caller: Caller, name: str, committed: Look
) -> None:
    """A session's commit within an outer transaction has no effect outside."""

    def work(session: Any) -> None:
        outer = session if isinstance(session, Connection) else session.connection()
        if not outer.in_transaction():
            outer.begin()
        with Session(outer, join_transaction_mode="create_savepoint") as inner:
            first = enqueue(inner, name, idempotency_key=name)
            inner.commit()
            assert enqueue(inner, name, idempotency_key=name).id == first.id
            inner.commit()

    caller.in_sync(work)
    caller.rollback()
    assert committed() == []
