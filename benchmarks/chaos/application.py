"""The application: orders with their jobs, and a handler of every kind.

All handlers take the same payload: the order's name, the job's number in it, and for how many
seconds to work. Each returns the number of its claim, which the finish stores as the result; each
leaves an effect that names the claim too. In a transactional handler the effect commits with the
finish.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from functools import cache

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Insert,
    MetaData,
    Table,
    Text,
    create_engine,
    insert,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from benchmarks.chaos.ledger import VARIABLE, Ledger
from sa_jobs import JobContext, Jobs, Snooze, fixed
from sa_jobs.urls import database_url

metadata = MetaData()
# One row per transaction: two of them may place the order of one name, whose jobs have keys then.
orders = Table(
    "orders",
    metadata,
    Column("token", Text, primary_key=True),
    Column("name", Text, nullable=False),
    Column("jobs", BigInteger, nullable=False),
)
# Without a constraint: that there are no two of a job is for the queue to see to.
effects = Table(
    "effects",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("claim_no", BigInteger, nullable=False),
)

jobs = Jobs()

# What an outage costs is attempts, so those who are to end well have many.
MANY = 1000
SHORT = fixed(0.3)


@cache
def _ledger() -> Ledger:
    return Ledger(os.environ[VARIABLE])


@cache
def _engine() -> Engine:
    return create_engine(database_url(None), pool_pre_ping=True, max_overflow=50)


def _start(ctx: JobContext) -> int:
    _ledger().handler_starts(ctx)
    return ctx.job.claim_no


def _effect(ctx: JobContext) -> None:
    with _engine().begin() as connection:
        connection.execute(_insert_effect(ctx))


def _insert_effect(ctx: JobContext) -> Insert:
    return insert(effects).values(job_id=ctx.job.id, claim_no=ctx.job.claim_no)


@jobs.handler("plain", max_attempts=MANY, backoff=SHORT)
def plain(order: str, number: int, seconds: float, ctx: JobContext) -> int:
    claim_no = _start(ctx)
    time.sleep(seconds)
    _effect(ctx)
    return claim_no


@jobs.handler("coroutine", max_attempts=MANY, backoff=SHORT)
async def coroutine(order: str, number: int, seconds: float, ctx: JobContext) -> int:
    claim_no = await asyncio.to_thread(_start, ctx)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(_effect, ctx)
    return claim_no


@jobs.handler("transactional", max_attempts=MANY, backoff=SHORT)
def transactional(
    order: str, number: int, seconds: float, ctx: JobContext, session: Session
) -> int:
    claim_no = _start(ctx)
    session.execute(_insert_effect(ctx))
    time.sleep(seconds)
    return claim_no


@jobs.handler("transactional_coroutine", max_attempts=MANY, backoff=SHORT)
async def transactional_coroutine(
    order: str, number: int, seconds: float, ctx: JobContext, session: AsyncSession
) -> int:
    claim_no = await asyncio.to_thread(_start, ctx)
    await session.execute(_insert_effect(ctx))
    await asyncio.sleep(seconds)
    return claim_no


@jobs.handler("fails_at_first", max_attempts=MANY, backoff=SHORT)
def fails_at_first(
    order: str, number: int, seconds: float, ctx: JobContext, session: Session
) -> int:
    """Leave an effect that must be rolled back, twice."""
    claim_no = _start(ctx)
    session.execute(_insert_effect(ctx))
    time.sleep(seconds)
    if ctx.attempt <= 2:
        raise ValueError(f"failure of attempt {ctx.attempt}")
    return claim_no


@jobs.handler("snoozes", max_attempts=MANY, backoff=SHORT)
def snoozes(order: str, number: int, seconds: float, ctx: JobContext, session: Session) -> int:
    claim_no = _start(ctx)
    session.execute(_insert_effect(ctx))
    time.sleep(seconds)
    if ctx.job.claim_no <= 2:
        raise Snooze(0.2)
    return claim_no


@jobs.handler("hurried", max_attempts=MANY, backoff=SHORT, timeout=0.5)
def hurried(order: str, number: int, seconds: float, ctx: JobContext, session: Session) -> int:
    """End in the same instant as the time does."""
    claim_no = _start(ctx)
    session.execute(_insert_effect(ctx))
    time.sleep(random.uniform(0.45, 0.55) if ctx.attempt <= 3 else 0)
    return claim_no


@jobs.handler("contested", max_attempts=MANY, backoff=SHORT)
def contested(order: str, number: int, seconds: float, ctx: JobContext, session: Session) -> int:
    """End in the same instant as somebody cancels it."""
    claim_no = _start(ctx)
    session.execute(_insert_effect(ctx))
    time.sleep(seconds)
    _cancel_and_retry_soon(ctx)
    return claim_no


@jobs.handler("contested_failure", max_attempts=4, backoff=SHORT)
def contested_failure(order: str, number: int, seconds: float, ctx: JobContext) -> int:
    """Fail in the same instant as somebody cancels it, and tries it again."""
    _start(ctx)
    time.sleep(seconds)
    _cancel_and_retry_soon(ctx)
    raise ValueError(f"failure of attempt {ctx.attempt}")


@jobs.handler("fails", max_attempts=3, backoff=SHORT)
def fails(order: str, number: int, seconds: float, ctx: JobContext) -> int:
    _start(ctx)
    time.sleep(seconds)
    raise ValueError(f"failure of attempt {ctx.attempt}")


@jobs.handler("kills_its_worker", max_attempts=2, backoff=SHORT)
def kills_its_worker(order: str, number: int, seconds: float, ctx: JobContext) -> int:
    _start(ctx)
    os._exit(POISON_CODE)


POISON_CODE = 137
POISON = "kills_its_worker"

# What may end dead: everything else has attempts enough.
MAY_DIE = frozenset({"fails", "contested_failure", POISON})
TRANSACTIONAL = frozenset(handler.name for handler in jobs if handler.signature.session is not None)


def _cancel_and_retry_soon(ctx: JobContext) -> None:
    threading.Thread(target=_cancel_and_retry, args=(ctx.job.id,), daemon=True).start()


def _cancel_and_retry(job_id: int) -> None:
    time.sleep(random.uniform(0, 0.01))
    for what, act in (("cancel", jobs.cancel), ("retry", jobs.retry)):
        if what == "retry" and random.random() < 0.5:
            return
        _ledger().request(job_id, what)
        try:
            with _engine().begin() as connection:
                act(connection, job_id)
        except DBAPIError:
            return  # The database is away.
