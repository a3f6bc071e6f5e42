"""The public names as users write them. Checked by mypy, never run."""

from __future__ import annotations

import datetime as dt
import warnings
from collections.abc import Awaitable, Mapping
from typing import Any

from sqlalchemy import Connection, Engine, MetaData, select
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session
from typing_extensions import assert_type

from sa_jobs import (
    AutocommitWarning,
    ClaimedJob,
    Discard,
    DuplicateJobError,
    Enqueued,
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
from sa_jobs.models import Failure, Job

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


def run(engine: Engine) -> Any:
    worker = Worker(engine, jobs, queues=["default", "mail"], concurrency=4)
    worker.stop()
    return worker
