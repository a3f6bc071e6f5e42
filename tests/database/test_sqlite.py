"""On SQLite, where hosts run their unit tests: attach, create, enqueue and drain work."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, event, literal, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import (
    Discard,
    DuplicateJobError,
    Enqueued,
    JobContext,
    Jobs,
    Retry,
    Row,
    Snooze,
    TransactionError,
    Worker,
    WorkerError,
    attach,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    fixed,
    retry,
)
from sa_jobs.testing import (
    RunError,
    assert_enqueued,
    drain,
    enqueued,
    refute_enqueued,
    rolled_back,
    run_job,
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


@jobs.handler(max_attempts=2, backoff=fixed(60))
def pay(order_id: int, session: Session, ctx: JobContext, fail_until: int = 0) -> dict[str, Any]:
    session.get_one(Order, order_id).job_id = ctx.job.id
    session.flush()
    ctx.progress({"page": ctx.attempt})
    if ctx.attempt <= fail_until:
        raise ValueError("declined")
    jobs.enqueue(session, send, {"order_id": order_id}, delay=3600)
    return {"paid": [order_id, None]}


@jobs.handler
def control(what: str) -> None:
    raise {"retry": Retry(30, "busy"), "snooze": Snooze(30), "discard": Discard("no")}[what]


@jobs.handler
async def fetch(url: str) -> str:
    return url.upper()


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


# --- the testing kit ----------------------------------------------------------------------------


def order(session: Session) -> Order:
    made = Order()
    session.add(made)
    session.flush()
    return made


def failures(session: Session) -> list[Any]:
    return list(session.scalars(select(tables.Failure).order_by(tables.Failure.id)))


def test_jobs_are_asserted_and_run(session: Session) -> None:
    made = order(session)
    enqueued_ = jobs.enqueue(session, pay, {"order_id": made.id}, priority=2)
    (job,) = assert_enqueued(session, pay, {"order_id": made.id}, delay=0, priority=2)
    assert job.run_at.utcoffset() == dt.timedelta(0)
    refute_enqueued(session, send)

    (ran,) = drain(session, jobs)

    assert (ran.status, ran.result, ran.attempt) == ("done", {"paid": [made.id, None]}, 1)
    assert made.job_id == enqueued_.id
    assert_enqueued(session, send, delay=3600)
    session.commit()
    found = session.get_one(Job, enqueued_.id)
    assert (found.status, found.attempts, found.claim_no) == ("done", 1, 1)
    assert (found.leased_until, found.meta) == (None, {"progress": {"page": 1}})
    assert found.finished_at is not None


def test_failed_attempts_are_written_and_time_moves_on(session: Session) -> None:
    made = order(session)
    job_id = jobs.enqueue(session, pay, {"order_id": made.id, "fail_until": 1}).id
    with pytest.raises(ValueError, match="declined"):
        drain(session, jobs)
    assert made.job_id is None
    found = session.get_one(Job, job_id)
    assert (found.status, found.attempts) == ("ready", 1)
    assert found.run_at - found.updated_at == dt.timedelta(seconds=60)
    (history,) = failures(session)
    assert (history.job_id, history.attempt, history.error) == (job_id, 1, found.last_error)

    ran = drain(session, jobs, advance=dt.timedelta(hours=2))

    assert [(one.job.handler, one.attempt, one.status) for one in ran] == [
        ("pay", 2, "done"),
        ("send", 1, "done"),
    ]
    # SQLite keeps the time of a job's creation in seconds.
    assert abs(ran[1].job.delay - dt.timedelta(hours=1)) < dt.timedelta(seconds=2)


def test_the_last_attempt_leaves_the_job_dead(session: Session) -> None:
    made = order(session)
    jobs.enqueue(session, pay, {"order_id": made.id, "fail_until": 2})
    ran = drain(session, jobs, advance=60, raise_errors=False)
    assert [(one.attempt, one.status) for one in ran] == [(1, "ready"), (2, "dead")]
    assert len(failures(session)) == 2
    assert retry(session, ran[0].job.id, tables=tables) == "ready"


@pytest.mark.parametrize(
    ("what", "status", "attempts", "history"),
    [("retry", "ready", 1, 1), ("snooze", "ready", 0, 0), ("discard", "dead", 1, 1)],
)
def test_what_a_handler_says_by_raising(
    session: Session, what: str, status: str, attempts: int, history: int
) -> None:
    ran = run_job(session, jobs, jobs.enqueue(session, control, {"what": what}))
    assert (ran.status, ran.job.attempts) == (status, attempts)
    assert len(failures(session)) == history
    if status == "ready":
        refute_enqueued(session, control, delay=0)
        assert_enqueued(session, control, delay=(29, 31))


@pytest.mark.parametrize("what", ["retry", "snooze", "discard"])
def test_a_job_that_was_asked_to_cancel_is_cancelled(session: Session, what: str) -> None:
    registry = Jobs(tables)

    @registry.handler("cancelled meanwhile")
    def cancelled_meanwhile() -> None:
        assert registry.cancel(outside, job_id) == "requested"
        outside.commit()
        control(what)

    with Session(session.connection(), join_transaction_mode="create_savepoint") as outside:
        job_id = registry.enqueue(session, "cancelled meanwhile").id
        (ran,) = drain(session, registry)
    assert ran.status == "cancelled"


def test_a_coroutine_runs_too(session: Session) -> None:
    assert run_job(session, jobs, jobs.enqueue(session, fetch, {"url": "a"})).result == "A"


def test_a_handler_cannot_commit(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("commits")
    def commits(session: Session) -> None:
        session.add(Order())
        session.commit()

    registry.enqueue(session, "commits")
    with pytest.raises(TransactionError):
        drain(session, registry)
    assert session.scalars(select(Order)).all() == []


def test_an_endless_chain_is_ended(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("again")
    def again(session: Session) -> None:
        registry.enqueue(session, "again")

    registry.enqueue(session, "again")
    with pytest.raises(RunError, match="5 jobs were run"):
        drain(session, registry, limit=5)


def test_nothing_is_committed_where_the_driver_begins_transactions(engine: Engine) -> None:
    """As SQLAlchemy's page on SQLite says to set it up; by itself the driver begins them late."""

    @event.listens_for(engine, "connect")
    def connected(connection: Any, record: Any) -> None:
        connection.isolation_level = None

    @event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    engine.dispose()
    Base.metadata.create_all(engine)
    with rolled_back(engine) as session:
        made = order(session)
        jobs.enqueue(session, pay, {"order_id": made.id})
        session.commit()
        drain(session, jobs)
        session.commit()
        assert len(enqueued(session)) == 1
    with Session(engine) as other:
        assert other.scalars(select(Job)).all() == []
        assert other.scalars(select(Order)).all() == []


def test_a_worker_says_that_it_needs_postgresql(engine: Engine) -> None:
    with pytest.raises(WorkerError, match="PostgreSQL"):
        Worker(engine, jobs).run()
