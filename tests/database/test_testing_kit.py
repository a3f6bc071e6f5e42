"""Users' tests: jobs are run inside the test's own transaction, which is rolled back."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, ForeignKey, create_engine, func, select, text, update
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from sa_jobs import (
    Discard,
    JobContext,
    Jobs,
    Retry,
    Snooze,
    TransactionError,
    UnknownHandlerError,
    attach,
    fixed,
)
from sa_jobs.testing import RunError, drain, enqueued, ledger, rolled_back, run_job
from tests.support.running import run_all


class Base(DeclarativeBase):
    pass


tables = attach(Base, register=False)
Job, Failure = tables.Job, tables.Failure


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


class Line(Base):
    __tablename__ = "lines"
    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))


jobs = Jobs(tables)
calls: list[Any] = []


class DeclinedError(Exception):
    pass


@jobs.handler
def note(value: Any = None) -> Any:
    calls.append(value)
    return value


@jobs.handler(max_attempts=3, backoff=fixed(60))
def fail(text: str = "declined") -> None:
    raise DeclinedError(text)


@jobs.handler(max_attempts=3, backoff=fixed(60))
def pay(order_id: int, session: Session, ctx: JobContext, fail_until: int = 0) -> str:
    session.get_one(Order, order_id).state = f"paid at {ctx.attempt}"
    session.flush()
    if ctx.attempt <= fail_until:
        raise DeclinedError("declined")
    return "paid"


@jobs.handler
def misbehave(how: str, session: Session) -> None:
    session.add(Order(state="handler"))
    session.flush()
    if how == "rollback":
        session.rollback()
        session.add(Order(state="after the rollback"))
    elif how == "savepoint left open":
        session.begin_nested()
        session.add(Order(state="in the savepoint"))
    elif how == "swallowed error":
        with pytest.raises(DBAPIError):
            session.execute(text("SELECT 1 / 0"))
    elif how == "refused at the flush":
        session.add(Line(order_id=-1))
    elif how == "connection":
        session.connection().commit()
    else:
        getattr(session, how)()


@jobs.handler
def control(what: str, delay: float = 30) -> None:
    raise {"retry": Retry(delay, "busy"), "snooze": Snooze(delay), "discard": Discard("no")}[what]


@jobs.handler
def report(pages: int, ctx: JobContext) -> None:
    for page in range(pages):
        ctx.progress({"page": page})


@jobs.handler
async def fetch(url: str) -> str:
    await asyncio.sleep(0)
    if url == "bad":
        raise DeclinedError(url)
    calls.append((url, threading.current_thread().name))
    return url.upper()


@jobs.handler
async def leave_work_behind() -> None:
    calls.append(asyncio.get_running_loop())
    await asyncio.to_thread(lambda: calls.append(threading.current_thread()))
    calls.append(asyncio.create_task(asyncio.sleep(3600)))


@pytest.fixture(scope="module")
def shop_url(server_url: str) -> Iterator[str]:
    from tests.support.postgres import create_database, drop_database

    url = create_database(server_url, "sa_jobs_test_kit")
    engine = create_engine(url)
    Base.metadata.create_all(engine)
    engine.dispose()
    yield url
    drop_database(server_url, "sa_jobs_test_kit")


@pytest.fixture
def engine(shop_url: str) -> Iterator[Engine]:
    """An engine on the shop's database, where every test must leave nothing behind."""
    engine = create_engine(shop_url)
    yield engine
    with Session(engine) as session:
        assert session.scalar(select(func.count()).select_from(Job)) == 0
        assert session.scalar(select(func.count()).select_from(Order)) == 0
        assert session.scalar(select(func.count()).select_from(Failure)) == 0
    engine.dispose()


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with rolled_back(engine) as session:
        yield session


@pytest.fixture(autouse=True)
def _no_calls() -> None:
    calls.clear()


def order(session: Session) -> Order:
    made = Order()
    session.add(made)
    session.flush()
    return made


def states(session: Session) -> list[str]:
    return list(session.scalars(select(Order.state).order_by(Order.id)))


def row(session: Session, job_id: int) -> Any:
    return session.execute(select(tables.jobs).where(tables.jobs.c.id == job_id)).one()


# --- one job ------------------------------------------------------------------------------------


def test_a_job_is_run_as_by_a_worker(session: Session) -> None:
    ran = run_job(session, jobs, jobs.enqueue(session, note, {"value": [1, {"a": None}]}))
    assert calls == [[1, {"a": None}]]
    assert (ran.status, ran.result, ran.attempt, ran.error) == ("done", [1, {"a": None}], 1, None)
    found = row(session, ran.job.id)
    assert (found.status, found.attempts, found.claim_no) == ("done", 1, 1)
    assert found.leased_until is None
    assert found.claimed_at <= found.finished_at == found.updated_at


def test_it_is_named_by_its_id_or_by_what_has_one(session: Session) -> None:
    one, two = jobs.enqueue_many(session, note, [{}, {}])
    assert run_job(session, jobs, one.id).status == "done"
    assert run_job(session, jobs, session.get_one(Job, two.id)).status == "done"


def test_it_is_run_whether_it_is_due_or_not(session: Session) -> None:
    assert run_job(session, jobs, jobs.enqueue(session, note, delay=3600)).status == "done"


def test_a_job_that_cannot_be_run_is_refused_with_the_reason(session: Session) -> None:
    ran = run_job(session, jobs, jobs.enqueue(session, note))
    with pytest.raises(RunError, match=f"job {ran.job.id} is done, and only a job that is ready"):
        run_job(session, jobs, ran.job)
    with pytest.raises(RunError, match="there is no job 987654 in sa_jobs"):
        run_job(session, jobs, 987654)
    foreign = jobs.enqueue(session, note)
    with pytest.raises(UnknownHandlerError):
        run_job(session, Jobs(tables), foreign)
    assert row(session, foreign.id).status == "ready"


def test_unflushed_work_of_the_test_is_there_for_the_handler(session: Session) -> None:
    session.add(Order(id=77))
    assert run_job(session, jobs, jobs.enqueue(session, pay, {"order_id": 77})).result == "paid"


@pytest.mark.parametrize("raise_errors", [True, False])
def test_a_failed_attempt_is_written_and_raised_if_asked_for(
    session: Session, raise_errors: bool
) -> None:
    job_id = jobs.enqueue(session, fail).id
    if raise_errors:
        with pytest.raises(DeclinedError, match="declined") as raised:
            run_job(session, jobs, job_id)
        assert [entry.name for entry in raised.traceback][-1] == "fail"
    else:
        ran = run_job(session, jobs, job_id, raise_errors=False)
        assert isinstance(ran.error, DeclinedError)
        assert (ran.status, ran.attempt) == ("ready", 1)
    found = row(session, job_id)
    assert (found.status, found.attempts) == ("ready", 1)
    assert found.run_at - found.updated_at == dt.timedelta(seconds=60)
    (history,) = session.scalars(select(Failure).where(Failure.job_id == job_id))
    assert history.error == found.last_error
    assert history.error.startswith("Traceback (most recent call last):\n")
    assert history.error.splitlines()[1].endswith("in fail")
    assert history.error.endswith("DeclinedError: declined")
    assert (history.attempt, history.worker) == (1, found.locked_by)


def test_the_last_attempt_leaves_the_job_dead(session: Session) -> None:
    job_id = jobs.enqueue(session, fail, max_attempts=1).id
    ran = run_job(session, jobs, job_id, raise_errors=False)
    assert ran.status == "dead"
    assert ran.job.finished_at is not None


@pytest.mark.parametrize(
    ("what", "status", "attempts", "waits", "failures"),
    [("retry", "ready", 1, 30, 1), ("snooze", "ready", 0, 30, 0), ("discard", "dead", 1, None, 1)],
)
def test_what_a_handler_says_by_raising_is_no_error(
    session: Session, what: str, status: str, attempts: int, waits: int | None, failures: int
) -> None:
    ran = run_job(session, jobs, jobs.enqueue(session, control, {"what": what}))
    found = row(session, ran.job.id)
    assert (found.status, found.attempts) == (status, attempts)
    if waits is not None:
        assert found.run_at - found.updated_at == dt.timedelta(seconds=waits)
    count = select(func.count()).select_from(Failure).where(Failure.job_id == ran.job.id)
    assert session.scalar(count) == failures
    assert type(ran.error) in (Retry, Snooze, Discard)


def test_a_payload_that_does_not_fit_is_a_failed_attempt(session: Session) -> None:
    job_id = jobs.enqueue(session, note).id
    session.execute(update(Job).where(Job.id == job_id).values(payload={"odd": 1}))
    ran = run_job(session, jobs, job_id, raise_errors=False)
    assert "has 'odd'" in str(ran.job.last_error)


def test_progress_is_stored(session: Session) -> None:
    ran = run_job(session, jobs, jobs.enqueue(session, report, {"pages": 3}))
    assert ran.job.meta == {"progress": {"page": 2}}


def test_what_the_handler_sets_in_its_context_ends_with_it(session: Session) -> None:
    variable = contextvars.ContextVar("variable", default="unset")
    registry = Jobs(tables)

    @registry.handler("sets")
    def sets() -> str:
        before = variable.get()
        variable.set("by the handler")
        return before

    variable.set("by the test")
    assert run_job(session, registry, registry.enqueue(session, "sets")).result == "by the test"
    assert variable.get() == "by the test"


def test_an_exception_that_ends_a_test_is_no_failed_attempt(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("interrupted")
    def interrupted(session: Session) -> None:
        session.add(Order())
        session.flush()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_job(session, registry, registry.enqueue(session, "interrupted"), raise_errors=False)
    assert states(session) == []
    session.commit()


def test_a_system_exit_is_one(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("leaves")
    def leaves() -> None:
        raise SystemExit(3)

    enqueued_ = registry.enqueue(session, "leaves")
    ran = run_job(session, registry, enqueued_, raise_errors=False)
    assert (ran.status, type(ran.error)) == ("ready", SystemExit)


# --- the session --------------------------------------------------------------------------------


def test_a_handler_writes_with_the_tests_session(session: Session) -> None:
    made = order(session)
    ran = run_job(session, jobs, jobs.enqueue(session, pay, {"order_id": made.id}))
    assert (ran.status, made.state) == ("done", "paid at 1")


def test_a_failed_handlers_work_goes_and_the_tests_stays(session: Session) -> None:
    made = order(session)
    job_id = jobs.enqueue(session, pay, {"order_id": made.id, "fail_until": 1}).id
    with pytest.raises(DeclinedError):
        run_job(session, jobs, job_id)
    assert made.state == "new"
    assert run_job(session, jobs, job_id).attempt == 2
    assert made.state == "paid at 2"


@pytest.mark.parametrize("how", ["commit", "close", "reset", "invalidate", "connection"])
def test_a_handler_cannot_end_the_transaction(session: Session, how: str) -> None:
    job_id = jobs.enqueue(session, misbehave, {"how": how}).id
    with pytest.raises(TransactionError, match="return from the handler instead"):
        run_job(session, jobs, job_id)
    assert states(session) == []
    assert row(session, job_id).attempts == 1
    order(session)
    session.commit()
    assert states(session) == ["new"]


@pytest.mark.parametrize(
    ("how", "status", "left"),
    [
        ("rollback", "done", ["new", "after the rollback"]),
        ("savepoint left open", "done", ["new", "handler", "in the savepoint"]),
        ("swallowed error", "ready", ["new"]),
        ("refused at the flush", "ready", ["new"]),
    ],
)
def test_however_a_handler_leaves_the_session_it_is_usable(
    session: Session, how: str, status: str, left: list[str]
) -> None:
    made = order(session)
    job_id = jobs.enqueue(session, misbehave, {"how": how}).id
    ran = run_job(session, jobs, job_id, raise_errors=False)
    assert ran.status == status
    assert states(session) == left
    made.state = "changed"
    session.commit()
    session.rollback()
    assert states(session)[0] == "changed"
    assert not {"commit", "rollback", "close"} & vars(session).keys()


@pytest.fixture
def shared(engine: Engine) -> Iterator[scoped_session[Session]]:
    """The application's scoped session, as its handlers that ask for none use it too."""
    with engine.connect() as connection:
        transaction = connection.begin()
        factory = sessionmaker(connection, join_transaction_mode="create_savepoint")
        shared = scoped_session(factory)
        yield shared
        shared.remove()
        transaction.rollback()


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ("commit", ["test", "handler"]),
        ("commit, then more", ["test", "handler"]),
        ("forget", ["test"]),
        ("rollback", ["test"]),
        ("close", ["test"]),
        ("commit, then raise", ["test", "handler"]),
        ("raise", ["test"]),
        ("broken", ["test"]),
    ],
)
def test_a_handler_with_sessions_of_its_own_keeps_what_it_commits(
    shared: scoped_session[Session], how: str, left: list[str]
) -> None:
    registry = Jobs(tables)

    @registry.handler("commits")
    def commits() -> None:
        shared.add(Order(state="handler"))
        shared.flush()
        if how.startswith("commit"):
            shared.commit()
        if how == "commit, then more":
            shared.add(Order(state="more"))
            shared.flush()
        if how in ("rollback", "close"):
            getattr(shared, how)()
        if how == "broken":
            shared.execute(text("SELECT 1 / 0"))
        if how.endswith("raise"):
            raise DeclinedError

    shared.add(Order(state="test"))
    job_id = registry.enqueue(shared, "commits").id
    (ran,) = drain(shared, registry, raise_errors=False)
    failed = how == "broken" or how.endswith("raise")
    assert (ran.job.id, ran.status) == (job_id, "ready" if failed else "done")
    assert states(shared()) == left
    shared.commit()


def test_a_job_that_was_taken_from_the_run_is_said_so(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("lapses")
    def lapses(session: Session) -> None:
        session.add(Order())
        session.execute(update(Job).values(claim_no=Job.claim_no + 1))

    with pytest.raises(RunError, match="no longer this run's"):
        run_job(session, registry, registry.enqueue(session, "lapses"))
    assert states(session) == []


def test_a_connection_is_refused_with_the_way_out(engine: Engine) -> None:
    with engine.connect() as connection, pytest.raises(TypeError, match="create_savepoint"):
        drain(connection, jobs)


def test_nothing_is_committed(session: Session, engine: Engine) -> None:
    made = order(session)
    jobs.enqueue(session, pay, {"order_id": made.id})
    drain(session, jobs)
    session.commit()
    with engine.connect() as other:
        assert other.scalar(select(func.count()).select_from(Order)) == 0
        assert other.scalar(select(func.count()).select_from(Job)) == 0


# --- draining -----------------------------------------------------------------------------------


def test_every_job_that_is_due_is_run_in_the_order_of_a_worker(session: Session) -> None:
    for value, options in {
        "third": {"priority": 0},
        "first": {"priority": 5},
        "fourth": {"priority": 0},
        "second": {"priority": 2, "queue": "mail"},
        "later": {"delay": 60},
        "last": {"priority": -1},
    }.items():
        jobs.enqueue(session, note, {"value": value}, **options)  # type: ignore[arg-type]
    ran = drain(session, jobs)
    assert calls == ["first", "second", "third", "fourth", "last"]
    assert [one.result for one in ran] == calls
    assert [one.payload for one in enqueued(session)] == [{"value": "later"}]
    assert drain(session, jobs) == []


def test_only_the_given_queues_are_drained(session: Session) -> None:
    jobs.enqueue(session, note, {"value": 1})
    jobs.enqueue(session, note, {"value": 2}, queue="mail")
    drain(session, jobs, queues=["mail"])
    assert calls == [2]


def test_jobs_of_unknown_handlers_are_left_alone(session: Session) -> None:
    jobs.enqueue(session, note)
    assert drain(session, Jobs(tables)) == []
    assert len(enqueued(session, note)) == 1


def test_what_handlers_enqueue_is_run_too(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("count_down")
    def count_down(n: int, session: Session) -> None:
        if n:
            registry.enqueue(session, "count_down", {"n": n - 1})

    registry.enqueue(session, "count_down", {"n": 3})
    assert [one.job.payload for one in drain(session, registry)] == [
        {"n": 3},
        {"n": 2},
        {"n": 1},
        {"n": 0},
    ]


def test_an_endless_chain_is_ended_with_a_clear_error(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("again")
    def again(session: Session) -> None:
        registry.enqueue(session, "again")

    registry.enqueue(session, "again")
    with pytest.raises(RunError, match=r"7 jobs were run \('again' 7 times\), and job \d+ 'again'"):
        drain(session, registry, limit=7)
    assert len(enqueued(session, "again", status="done")) == 7


def test_a_limit_that_is_just_enough_is_enough(session: Session) -> None:
    jobs.enqueue_many(session, note, [{}, {}])
    assert len(drain(session, jobs, limit=2)) == 2


def test_a_failure_waits_for_its_retry(session: Session) -> None:
    made = order(session)
    jobs.enqueue(session, pay, {"order_id": made.id, "fail_until": 1})
    (ran,) = drain(session, jobs, raise_errors=False)
    assert (ran.status, made.state) == ("ready", "new")


def test_time_moves_on_within_one_transaction(session: Session) -> None:
    made = order(session)
    first = jobs.enqueue(session, pay, {"order_id": made.id, "fail_until": 2}).id
    jobs.enqueue(session, note, {"value": "in a minute and a half"}, delay=90)
    jobs.enqueue(session, note, {"value": "tomorrow"}, delay=86_400)

    ran = drain(session, jobs, advance=dt.timedelta(hours=1), raise_errors=False)

    assert [(one.job.handler, one.attempt) for one in ran] == [
        ("pay", 1),
        ("pay", 2),
        ("note", 1),
        ("pay", 3),
    ]
    assert made.state == "paid at 3"
    failed = session.scalars(select(Failure).where(Failure.job_id == first).order_by(Failure.id))
    times = [one.failed_at for one in failed]
    assert dt.timedelta(seconds=60) <= times[1] - times[0] < dt.timedelta(seconds=90)
    found = row(session, first)
    assert dt.timedelta(seconds=60) <= found.finished_at - times[1] < dt.timedelta(seconds=90)
    assert [one.payload["value"] for one in enqueued(session)] == ["tomorrow"]


def test_time_moves_as_far_as_asked_and_no_further(session: Session) -> None:
    jobs.enqueue(session, fail)
    assert [one.attempt for one in drain(session, jobs, advance=60, raise_errors=False)] == [1, 2]
    assert drain(session, jobs, advance=59, raise_errors=False) == []


def test_what_a_handler_enqueues_for_later_counts_from_the_time_moved_to(session: Session) -> None:
    registry = Jobs(tables)

    @registry.handler("hourly")
    def hourly(session: Session) -> None:
        registry.enqueue(session, "hourly", delay=3600)
        registry.enqueue_many(session, "child", [{}])

    @registry.handler("child")
    def child() -> None: ...

    registry.enqueue(session, "hourly")
    ran = drain(session, registry, advance=dt.timedelta(hours=3, minutes=5))
    assert [one.job.handler for one in ran] == ["hourly", "child"] * 4
    (left,) = enqueued(session)
    assert left.handler == "hourly"
    assert left.delay == dt.timedelta(hours=1)
    created = [one.job.created_at for one in ran]
    assert created[-1] - created[1] == dt.timedelta(hours=3)
    registry.enqueue(session, "child", delay=5)
    assert enqueued(session, "child")[0].delay == dt.timedelta(seconds=5)


def test_time_does_not_move_on_for_jobs_that_nobody_can_run(session: Session) -> None:
    jobs.enqueue(session, note, delay=60)
    registry = Jobs(tables)
    registry.handler("other")(lambda: None)
    assert drain(session, registry, advance=3600) == []


def test_a_job_that_another_transaction_holds_is_passed_over(engine: Engine) -> None:
    with Session(engine) as setup:
        held, free = jobs.enqueue_many(setup, note, [{"value": "held"}, {"value": "free"}])
        setup.commit()
    try:
        with engine.connect() as other, rolled_back(engine) as session:
            other.execute(select(tables.jobs).where(tables.jobs.c.id == held.id).with_for_update())
            assert [one.job.id for one in drain(session, jobs)] == [free.id]
    finally:
        with Session(engine) as cleaning:
            cleaning.execute(tables.jobs.delete())
            cleaning.commit()


# --- coroutines ---------------------------------------------------------------------------------


def test_a_coroutine_runs_on_a_loop_of_the_calls_own(session: Session) -> None:
    (ran,) = jobs.enqueue_many(session, fetch, [{"url": "a"}])
    assert run_job(session, jobs, ran.id).result == "A"
    assert calls == [("a", threading.current_thread().name)]


def test_a_coroutines_error_is_a_failed_attempt(session: Session) -> None:
    job_id = jobs.enqueue(session, fetch, {"url": "bad"}).id
    with pytest.raises(DeclinedError):
        run_job(session, jobs, job_id)
    error = row(session, job_id).last_error
    assert error.splitlines()[1].endswith("in fetch")


def test_no_thread_and_no_task_outlives_the_call(session: Session) -> None:
    before = set(threading.enumerate())
    jobs.enqueue(session, leave_work_behind)
    drain(session, jobs)
    loop, thread, task = calls
    assert set(threading.enumerate()) == before
    assert not thread.is_alive()
    assert task.cancelled()
    assert loop.is_closed()


def test_one_drain_has_one_loop(session: Session) -> None:
    jobs.enqueue_many(session, leave_work_behind, [{}, {}])
    drain(session, jobs)
    assert calls[0] is calls[3]


def test_the_threads_event_loop_stays_what_it_was(session: Session) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        run_job(session, jobs, jobs.enqueue(session, fetch, {"url": "a"}))
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_coroutine_in_a_coroutine_test_is_refused_before_its_claim(session: Session) -> None:
    job_id = jobs.enqueue(session, fetch, {"url": "a"}).id

    async def test() -> None:
        with pytest.raises(RunError, match="give the call an AsyncSession, and await it"):
            drain(session, jobs)

    asyncio.run(test())
    assert row(session, job_id).attempts == 0


# --- like a worker ------------------------------------------------------------------------------


def comparable(found: Any) -> dict[str, Any]:
    """Return a row's values, times as whether there is one, and without what names the worker."""
    values = dict(found._mapping)
    for name, value in values.items():
        if isinstance(value, dt.datetime):
            values[name] = "a time"
    for name in ("id", "job_id", "locked_by", "worker"):
        values.pop(name, None)
    return values


def test_the_rows_are_those_that_a_worker_leaves(engine: Engine) -> None:
    """All columns of all kinds of ends, beside a real worker's on committed jobs."""

    def add_all(session: Session) -> None:
        jobs.enqueue(session, note, {"value": {"a": [1.5, "x"]}}, priority=3, tenant="acme")
        jobs.enqueue(session, fail, unique_key="k")
        jobs.enqueue(session, fail, max_attempts=1, idempotency_key="i")
        jobs.enqueue(session, fetch, {"url": "a"})
        jobs.enqueue(session, fetch, {"url": "bad"})
        for what in ("retry", "snooze", "discard"):
            jobs.enqueue(session, control, {"what": what, "delay": 3600})
        jobs.enqueue(session, misbehave, {"how": "rollback"})
        jobs.enqueue(session, misbehave, {"how": "commit"})

    def all_rows(session: Session) -> list[list[dict[str, Any]]]:
        return [
            [comparable(row) for row in session.execute(select(table).order_by(*order))]
            for table, order in (
                (tables.jobs, [tables.jobs.c.id]),
                (tables.failures, [tables.failures.c.job_id]),
            )
        ]

    with rolled_back(engine) as session:
        add_all(session)
        drain(session, jobs, raise_errors=False)
        by_the_kit = all_rows(session)
    try:
        with Session(engine) as session:
            add_all(session)
            session.commit()
        run_all(engine, jobs)
        with Session(engine) as session:
            by_a_worker = all_rows(session)
    finally:
        with Session(engine) as session:
            for table in (tables.failures, tables.jobs, Order.__table__):
                session.execute(table.delete())  # type: ignore[attr-defined]
            session.commit()
    assert by_the_kit == by_a_worker


def test_the_claim_of_one_job_is_that_of_a_worker(session: Session) -> None:
    one, two = jobs.enqueue_many(session, note, [{"value": 1}, {"value": 1}], tenant="acme")
    connection: Connection = session.connection()
    now = ledger.clock(connection)
    first = ledger.claim_due(connection, tables, one.id, queue="default", handler="note", now=now)
    second = ledger.claim(connection, tables, two.id, now=now)
    assert first is not None
    assert second is not None
    assert replace(first, id=0) == replace(second, id=0)
    assert comparable(row(session, one.id)) == comparable(row(session, two.id))


def test_an_integrity_error_of_the_tests_own_does_not_hide(session: Session) -> None:
    session.add(Line(order_id=-1))
    with pytest.raises(IntegrityError):
        drain(session, jobs)
