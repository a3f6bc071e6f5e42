"""What jobs carry beside their payload, by every way in, and what hooks add to it."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, literal, select
from sqlalchemy.orm import Session

from sa_jobs import (
    Enqueuing,
    InvalidJobError,
    InvalidJobTypeError,
    JobContext,
    Jobs,
    enqueue,
    enqueue_from_select,
    enqueue_many,
)
from sa_jobs.meta import MAX_META_BYTES
from sa_jobs.models import Job, metadata
from tests.database.callers import Caller
from tests.support.jobs import all_jobs
from tests.support.looking import job
from tests.support.running import run_all

META = {"request_id": "r-1", "depth": [1, {"a": None}], "price": 0.5, "umlaut": "ä"}


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()

    @jobs.handler("send")
    def send(number: int = 0) -> None: ...

    return jobs


def two_numbers() -> Any:
    one, two = (select(literal(number).label("number")) for number in (1, 2))
    return one.union_all(two)


def test_every_way_in_stores_it_in_each_job(caller: Caller, connection: Connection) -> None:
    caller(enqueue, "send", {"number": 0}, meta=META)
    caller(enqueue, "send", {"number": 0}, meta=META, idempotency_key="a")
    caller(enqueue_many, "send", [{"number": 1}, {"number": 2}], meta=META)
    assert caller(enqueue_from_select, "send", two_numbers(), meta=META) == 2
    caller.commit()
    assert [row.meta for row in all_jobs(connection)] == [META] * 6


def test_without_it_a_job_has_none(caller: Caller, connection: Connection) -> None:
    caller(enqueue, "send", {"number": 0})
    caller(enqueue, "send", {"number": 0}, meta={})
    caller(enqueue_many, "send", [{"number": 1}], meta=None)
    assert caller(enqueue_from_select, "send", two_numbers()) == 2
    caller.commit()
    assert [row.meta for row in all_jobs(connection)] == [{}] * 5


def test_on_sqlite_it_is_stored_too(jobs: Jobs) -> None:
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    with Session(engine) as session:
        jobs.enqueue(session, "send", meta=META)
        jobs.enqueue_many(session, "send", [{}], meta=META)
        jobs.enqueue(session, "send")
        stored = list(session.scalars(select(Job.meta).order_by(Job.id)))
    engine.dispose()
    assert stored == [META, META, {}]


def test_a_registry_takes_it_and_a_handler_reads_it(engine: Engine, jobs: Jobs) -> None:
    seen: list[Any] = []

    @jobs.handler("look")
    def look(ctx: JobContext) -> None:
        ctx.job.meta.clear()
        seen.append(ctx.job.meta)
        ctx.progress("half")

    with Session(engine) as session, session.begin():
        jobs.enqueue(session, look, meta=META)
        jobs.enqueue_many(session, look, [{}], meta={"many": True})
    run_all(engine, jobs, concurrency=1)
    assert seen == [META, {"many": True}]


def test_progress_is_kept_beside_it(engine: Engine, jobs: Jobs) -> None:
    @jobs.handler("slow")
    def slow(ctx: JobContext) -> None:
        ctx.progress("half")
        # Until a heartbeat has taken it.
        while ctx._progress is not None:
            ctx.wait(0.05)

    with Session(engine) as session, session.begin():
        one = jobs.enqueue(session, slow, meta=META).id
    run_all(engine, jobs, heartbeat=0.1)
    assert job(engine, one).meta == {**META, "progress": "half"}


def test_a_job_that_exists_keeps_what_it_has(caller: Caller, connection: Connection) -> None:
    for choice in ("existing", "replace"):
        for meta in ({"first": True}, {"second": True}):
            caller(enqueue, "send", unique_key=choice, on_conflict=choice, meta=meta)
    caller.commit()
    assert [row.meta for row in all_jobs(connection)] == [{"first": True}] * 2


@pytest.mark.parametrize(
    ("meta", "error", "message"),
    [
        ([], InvalidJobTypeError, "meta must be a dict of JSON values, not list"),
        ("text", InvalidJobTypeError, "meta must be a dict of JSON values, not str"),
        ({"a": {"b": object()}}, InvalidJobTypeError, "meta['a']['b'] is of type"),
        ({1: "a"}, InvalidJobTypeError, "meta"),
        ({"progress": 1}, InvalidJobError, "meta has the key 'progress'"),
        ({"a": "x" * MAX_META_BYTES}, InvalidJobError, f"{MAX_META_BYTES}"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_any_sql(
    engine: Engine, jobs: Jobs, meta: Any, error: type[Exception], message: str
) -> None:
    jobs.on_enqueue(lambda enqueuing: None)
    with Session(engine) as session:
        for add in (
            lambda: enqueue(session, "send", meta=meta),
            lambda: enqueue_many(session, "send", [{}], meta=meta),
            lambda: enqueue_from_select(session, "send", two_numbers(), meta=meta),
            lambda: jobs.enqueue(session, "send", meta=meta),
        ):
            with pytest.raises(error, match=re.escape(message)):
                add()
        assert not session.in_transaction()


# --- hooks of on_enqueue ------------------------------------------------------------------------


def test_a_hook_adds_to_each_job_of_a_call(engine: Engine, jobs: Jobs) -> None:
    seen: list[tuple[str, str, int | None]] = []

    @jobs.on_enqueue
    def add(enqueuing: Enqueuing) -> None:
        seen.append((enqueuing.handler, enqueuing.queue, enqueuing.count))
        enqueuing.meta["call"] = len(seen)

    with Session(engine) as session, session.begin():
        jobs.enqueue(session, "send", queue="mail", meta={"own": True})
        jobs.enqueue_many(session, "send", [{"number": 1}, {"number": 2}])
        jobs.enqueue_from_select(session, "send", two_numbers())
        # It knows no registry.
        enqueue(session, "send")
    assert seen == [("send", "mail", 1), ("send", "default", 2), ("send", "default", None)]
    with engine.connect() as connection:
        stored = [row.meta for row in all_jobs(connection)]
    assert stored == [
        {"own": True, "call": 1},
        *[{"call": 2}] * 2,
        *[{"call": 3}] * 2,
        {},
    ]


def test_the_caller_s_dict_is_left_as_it_is(engine: Engine, jobs: Jobs) -> None:
    @jobs.on_enqueue
    def add(enqueuing: Enqueuing) -> None:
        enqueuing.meta["added"] = True

    own = {"own": True}
    with Session(engine) as session:
        jobs.enqueue(session, "send", meta=own)
    assert own == {"own": True}


def test_a_hook_that_fails_or_adds_what_cannot_be_stored_changes_nothing(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @jobs.on_enqueue
    def good(enqueuing: Enqueuing) -> None:
        enqueuing.meta["good"] = True

    @jobs.on_enqueue
    def raises(enqueuing: Enqueuing) -> None:
        enqueuing.meta.clear()
        raise RuntimeError("no request")

    @jobs.on_enqueue
    def odd(enqueuing: Enqueuing) -> None:
        enqueuing.meta["odd"] = object()

    caplog.set_level(logging.ERROR, "sa_jobs.hooks")
    with Session(engine) as session, session.begin():
        first, second = (jobs.enqueue(session, "send", meta={"own": 1}) for _ in range(2))
    for one in (first, second):
        assert job(engine, one.id).meta == {"own": 1, "good": True}
    assert len(caplog.records) == 2
    assert "raises failed" in caplog.messages[0]
    assert "odd failed" in caplog.messages[1]
    assert "meta['odd']" in caplog.messages[1]


def test_a_call_that_is_refused_calls_no_hook(engine: Engine, jobs: Jobs) -> None:
    called: list[Enqueuing] = []
    jobs.on_enqueue(called.append)
    with Session(engine) as session:
        with pytest.raises(InvalidJobError):
            jobs.enqueue(session, "send", {"unknown": 1})
        with pytest.raises(LookupError):
            jobs.enqueue(session, "absent")
    assert called == []


def test_a_hook_that_enqueues_calls_no_hook_by_that(engine: Engine, jobs: Jobs) -> None:
    with Session(engine) as session, session.begin():

        @jobs.on_enqueue
        def audit(enqueuing: Enqueuing) -> None:
            jobs.enqueue(session, "send", {"number": 1})

        jobs.enqueue(session, "send")
        jobs.enqueue(session, "send")
    with engine.connect() as connection:
        assert [row.payload for row in all_jobs(connection)] == [{"number": 1}, {}] * 2
