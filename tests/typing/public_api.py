"""The public names as users write them. Checked by mypy, never run."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, select
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
)
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session
from typing_extensions import assert_type

from sa_jobs import (
    Around,
    AutocommitWarning,
    ClaimedJob,
    Discard,
    DuplicateJobError,
    Enqueued,
    Enqueuing,
    JobContext,
    Jobs,
    Retry,
    Row,
    Snooze,
    Tables,
    Worker,
    attach,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    equal_jitter,
    exponential,
    fixed,
    full_jitter,
    retry,
)
from sa_jobs.enqueue import Cancelled, Retried
from sa_jobs.hooks import AttemptEnd
from sa_jobs.models import Failure, Job
from sa_jobs.testing import (
    EnqueuedJob,
    Ran,
    assert_enqueued,
    drain,
    enqueued,
    refute_enqueued,
    rolled_back,
    run_job,
)

jobs = Jobs()


class Base(DeclarativeBase):
    pass


# --- the tables ---------------------------------------------------------------------------------

tables = attach(Base)
assert_type(tables, Tables)
assert_type(attach(MetaData(), name="mail_jobs", schema="mail"), Tables)
assert_type(Jobs(tables), Jobs)


def read_jobs(session: Session) -> None:
    for job in session.scalars(select(Job).where(Job.status == "dead")):
        assert_type(job.id, int)
        assert_type(job.queue, str)
        assert_type(job.tenant, str | None)
        assert_type(job.run_at, dt.datetime)
        assert_type(job.finished_at, dt.datetime | None)
    for queue in session.scalars(select(tables.Job.queue)):
        assert_type(queue, str)
    for error in session.scalars(select(Failure.error)):
        assert_type(error, str)


# --- handlers -----------------------------------------------------------------------------------


@jobs.handler
def send_receipt(invoice_id: int, session: Session, ctx: JobContext) -> None:
    assert_type(ctx.job, ClaimedJob)
    assert_type(ctx.attempt, int)
    assert_type(ctx.cancelled, bool)
    assert_type(ctx.wait(1.5), bool)
    ctx.progress({"page": 1})
    ctx.log.info("sent", extra={"invoice": invoice_id})


@jobs.handler(
    "reports.nightly",
    queue="reports",
    priority=-5,
    max_attempts=8,
    backoff=full_jitter(base=2, cap=dt.timedelta(minutes=5)),
    timeout=dt.timedelta(minutes=1),
)
async def nightly(day: str, session: AsyncSession) -> dict[str, int]:
    if day == "never":
        raise Discard("no such day")
    if day == "later":
        raise Retry(dt.timedelta(hours=1), "the data is not there yet")
    if day == "tomorrow":
        raise Snooze(60)
    return {"rows": 1}


@jobs.handler("plain", backoff=lambda attempt: attempt * 1.5, timeout=60)
def plain(x: int = 0) -> int:
    return x


# A decorated function is still itself.
assert_type(plain(1), int)
assert_type(jobs.names, list[str])

policies = [full_jitter(), equal_jitter(1, 60), exponential(cap=60), fixed(seconds=5)]
assert_type(fixed(5)(1), float)


# --- enqueue ------------------------------------------------------------------------------------


def in_a_session(session: Session, scoped: scoped_session[Session], connection: Connection) -> None:
    enqueued = enqueue(
        session,
        "send_receipt",
        {"invoice_id": 1842},
        queue="mail",
        priority=5,
        delay=dt.timedelta(minutes=5),
        max_attempts=3,
        tenant="acme",
        idempotency_key="invoice:1842:send-receipt",
        on_conflict="replace",
    )
    assert_type(enqueued, Enqueued)
    assert_type(enqueued.id, int)
    assert_type(enqueued.created, bool)
    assert_type(enqueue(scoped, send_receipt, run_at=dt.datetime.now(dt.timezone.utc)), Enqueued)
    assert_type(enqueue(connection, "send_receipt", unique_key="k", tables=tables), Enqueued)
    assert_type(
        enqueue_many(session, "send_receipt", [{"invoice_id": 1}, Row({"invoice_id": 2})]),
        list[Enqueued],
    )
    row = Row({"invoice_id": 3}, queue="mail", delay=dt.timedelta(hours=1), unique_key="k")
    assert_type(row.payload, Mapping[str, Any] | None)
    assert_type(row.delay, float | dt.timedelta | None)
    assert_type(row.unique_key, str | None)
    assert_type(
        enqueue_many(session, "send_receipt", [row, None], on_conflict="replace"), list[Enqueued]
    )
    assert_type(enqueue_from_select(session, "send_receipt", select(Job.id)), int)
    assert_type(cancel(session, enqueued.id), Cancelled)
    assert_type(retry(session, enqueued.id, delay=5), Retried)
    try:
        enqueue(session, "send_receipt", idempotency_key="k", on_conflict="raise")
    except DuplicateJobError as error:
        assert_type(error.id, int)
    warnings.filterwarnings("ignore", category=AutocommitWarning)


async def in_an_async_session(
    session: AsyncSession,
    scoped: async_scoped_session[AsyncSession],
    connection: AsyncConnection,
) -> None:
    assert_type(enqueue(session, "send_receipt"), Awaitable[Enqueued])
    assert_type(await enqueue(session, send_receipt, {"invoice_id": 1}), Enqueued)
    assert_type(await enqueue(scoped, "send_receipt", priority=1), Enqueued)
    assert_type(await enqueue(connection, "send_receipt"), Enqueued)
    assert_type(await enqueue_many(session, "send_receipt", [{}]), list[Enqueued])
    assert_type(await enqueue_from_select(session, "send_receipt", select(Job.id)), int)
    assert_type(await cancel(session, 1), Cancelled)
    assert_type(await retry(session, 1), Retried)


def through_the_registry(session: Session) -> None:
    assert_type(jobs.enqueue(session, send_receipt, {"invoice_id": 1}, delay=5), Enqueued)
    assert_type(jobs.enqueue_many(session, "plain", [{"x": 1}]), list[Enqueued])
    assert_type(jobs.enqueue_from_select(session, plain, select(Job.id.label("x"))), int)
    assert_type(jobs.cancel(session, 1), Cancelled)
    assert_type(jobs.retry(session, 1), Retried)


async def through_the_registry_async(session: AsyncSession) -> None:
    assert_type(await jobs.enqueue(session, send_receipt, {"invoice_id": 1}), Enqueued)
    assert_type(await jobs.enqueue_many(session, "plain", [{"x": 1}]), list[Enqueued])
    assert_type(await jobs.cancel(session, 1), Cancelled)


def what_the_checker_refuses(session: Session) -> None:
    enqueue("postgresql://", "send_receipt")  # type: ignore[call-overload]
    enqueue(session, "send_receipt", {"a": 1}, que="mail")  # type: ignore[call-overload]
    enqueue(session, "send_receipt", on_conflict="ignore")  # type: ignore[call-overload]
    enqueue(session, "send_receipt", priority="high")  # type: ignore[call-overload]
    enqueue_many(session, "send_receipt", [5])  # type: ignore[list-item]
    Row(que="mail")  # type: ignore[call-arg]
    Row({}, priority="high")  # type: ignore[arg-type]
    row = Row({})
    row.queue = "mail"  # type: ignore[misc]
    jobs.enqueue(session, 5)  # type: ignore[call-overload]
    jobs.handler("x", backoff=5)  # type: ignore[call-overload]
    Enqueued(1, True).id = 2  # type: ignore[misc]


# --- the worker ---------------------------------------------------------------------------------


# --- around and beside handlers -----------------------------------------------------------------


@jobs.before
def begin(ctx: JobContext) -> None:
    assert_type(ctx.job.meta, dict[str, Any])


@jobs.after
async def end(ctx: JobContext, end: AttemptEnd) -> None: ...


@jobs.after
def end_as_text(ctx: JobContext, end: str) -> None: ...


@jobs.on_failure
@jobs.on_dead
def report(ctx: JobContext, error: BaseException) -> None: ...


@jobs.on_enqueue
def add_meta(enqueuing: Enqueuing) -> None:
    assert_type(enqueuing.count, int | None)
    enqueuing.meta["request"] = 7


told: Callable[[JobContext, BaseException], None] = report


def enqueue_with_meta(session: Session) -> None:
    assert_type(jobs.enqueue(session, "send", meta={"request": 7}), Enqueued)
    assert_type(enqueue(session, "send", meta={"request": 7}), Enqueued)
    assert_type(enqueue_many(session, "send", [{}], meta={"a": [None]}), list[Enqueued])


@contextmanager
def tenant_scope(job: ClaimedJob) -> Generator[None, None, None]:
    assert_type(job.tenant, str | None)
    yield


around: Around = tenant_scope


def run(engine: Engine) -> Any:
    Worker(engine, jobs, around=tenant_scope)
    Worker(engine, jobs, around=lambda job: nullcontext(job.id))
    worker = Worker(engine, jobs, queues=["default", "mail"], concurrency=4)
    worker.stop()
    return worker


# --- tests --------------------------------------------------------------------------------------


def in_a_test(engine: Engine, connection: Connection, scoped: scoped_session[Session]) -> None:
    with rolled_back(engine, expire_on_commit=False) as session:
        assert_type(session, Session)
        noon = dt.datetime.now(dt.timezone.utc)
        found = assert_enqueued(
            session,
            send_receipt,
            {"invoice_id": 1842},
            queue="mail",
            priority=5,
            run_at=(None, noon),
            delay=(60, dt.timedelta(hours=1)),
            tenant="acme",
            unique_key="u",
            idempotency_key="i",
            count=1,
            tables=tables,
        )
        assert_type(found, list[EnqueuedJob])
        assert_type(found[0].run_at, dt.datetime)
        assert_type(found[0].delay, dt.timedelta)
        assert_enqueued(connection, "send_receipt", run_at=noon, delay=60, status=None)
        refute_enqueued(scoped, send_receipt, {"invoice_id": 1})
        assert_type(enqueued(session), list[EnqueuedJob])
        assert_type(enqueued(session, send_receipt, status="dead"), list[EnqueuedJob])
        ran = run_job(session, jobs, found[0], raise_errors=False)
        assert_type(ran, Ran)
        assert_type(ran.job, EnqueuedJob)
        assert_type(ran.status, str)
        assert_type(ran.error, BaseException | None)
        assert_type(run_job(scoped, jobs, 1), Ran)
        assert_type(
            drain(session, jobs, queues=["mail"], limit=5, advance=dt.timedelta(hours=1)),
            list[Ran],
        )
        assert_enqueued(session, send_receipt, que="mail")  # type: ignore[call-overload]
        drain(session, jobs, limit="5")  # type: ignore[call-overload]


async def in_an_async_test(engine: AsyncEngine, scoped: async_scoped_session[AsyncSession]) -> None:
    async with rolled_back(engine) as session:
        assert_type(session, AsyncSession)
        assert_type(await assert_enqueued(session, send_receipt), list[EnqueuedJob])
        assert_type(await refute_enqueued(scoped, send_receipt), None)
        assert_type(await enqueued(session), list[EnqueuedJob])
        assert_type(await run_job(session, jobs, 1), Ran)
        assert_type(await drain(scoped, jobs, advance=60), list[Ran])
