"""The testing kit under an AsyncSession: the same calls, awaited."""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Awaitable, Callable

import pytest
from sqlalchemy import Engine, NullPool, func, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session

from sa_jobs import JobContext, Jobs, TransactionError, enqueue, fixed
from sa_jobs.models import Failure, Job
from sa_jobs.testing import (
    RunError,
    assert_enqueued,
    drain,
    enqueued,
    refute_enqueued,
    rolled_back,
    run_job,
)

jobs = Jobs()


class DeclinedError(Exception):
    pass


@jobs.handler(max_attempts=3, backoff=fixed(60))
async def charge(order_id: int, session: AsyncSession, ctx: JobContext, fail_until: int = 0) -> int:
    await jobs.enqueue(session, receipt, {"order_id": order_id})
    if ctx.attempt <= fail_until:
        raise DeclinedError("declined")
    return ctx.attempt


@jobs.handler
def receipt(order_id: int, session: Session) -> str:
    session.execute(text("SELECT 1"))
    return f"receipt for {order_id}"


@jobs.handler
def plain(value: int = 0) -> int:
    return value + 1


@jobs.handler
async def misbehave(how: str, session: AsyncSession) -> None:
    await enqueue(session, "of the handler")
    if how == "rollback":
        await session.rollback()
    elif how == "swallowed error":
        with pytest.raises(DBAPIError):
            await session.execute(text("SELECT 1 / 0"))
    else:
        await getattr(session, how)()


@pytest.fixture(params=["psycopg", "asyncpg"])
def in_a_session(
    engine: Engine, request: pytest.FixtureRequest
) -> Callable[[Callable[[AsyncSession], Awaitable[None]]], None]:
    """Run a coroutine with a session in a transaction that is rolled back."""
    url = engine.url.set(drivername=f"postgresql+{request.param}")

    def run(test: Callable[[AsyncSession], Awaitable[None]]) -> None:
        async def main() -> None:
            async_engine = create_async_engine(url, poolclass=NullPool)
            async with rolled_back(async_engine) as session:
                await test(session)
            await async_engine.dispose()

        asyncio.run(main())
        with engine.connect() as connection:
            assert connection.scalar(select(func.count()).select_from(Job)) == 0

    return run


Runner = Callable[[Callable[[AsyncSession], Awaitable[None]]], None]


def test_a_coroutine_writes_with_the_tests_session(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        job = await jobs.enqueue(session, charge, {"order_id": 7})
        ran = await run_job(session, jobs, job)
        assert (ran.status, ran.result) == ("done", 1)
        (found,) = await assert_enqueued(session, receipt, {"order_id": 7})
        assert [one.result for one in await drain(session, jobs)] == ["receipt for 7"]
        await refute_enqueued(session, receipt)
        assert [one.id for one in await enqueued(session, status="done")] == [job.id, found.id]
        await session.commit()

    in_a_session(test)


def test_a_failure_is_taken_back_and_tried_again_as_time_moves_on(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        await jobs.enqueue(session, charge, {"order_id": 7, "fail_until": 2})
        with pytest.raises(DeclinedError):
            await drain(session, jobs)
        ran = await drain(session, jobs, advance=dt.timedelta(hours=1), raise_errors=False)
        assert [(one.job.handler, one.attempt) for one in ran] == [
            ("charge", 2),
            ("charge", 3),
            ("receipt", 1),
        ]
        assert await session.scalar(select(func.count()).select_from(Failure)) == 2

    in_a_session(test)


@pytest.mark.parametrize("how", ["commit", "close", "reset", "invalidate"])
def test_a_coroutine_cannot_end_the_transaction(in_a_session: Runner, how: str) -> None:
    async def test(session: AsyncSession) -> None:
        await jobs.enqueue(session, misbehave, {"how": how})
        with pytest.raises(TransactionError):
            await drain(session, jobs)
        await refute_enqueued(session, "of the handler")
        await session.commit()

    in_a_session(test)


@pytest.mark.parametrize(("how", "status"), [("rollback", "done"), ("swallowed error", "ready")])
def test_however_a_coroutine_leaves_the_session_it_is_usable(
    in_a_session: Runner, how: str, status: str
) -> None:
    async def test(session: AsyncSession) -> None:
        await jobs.enqueue(session, misbehave, {"how": how})
        (ran,) = await drain(session, jobs, raise_errors=False)
        assert ran.status == status
        await refute_enqueued(session, "of the handler")
        await session.commit()

    in_a_session(test)


def test_an_assertion_says_the_same(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        await jobs.enqueue(session, charge, {"order_id": 7})
        with pytest.raises(AssertionError, match=r"payload\['order_id'\] is 7, not 8"):
            await assert_enqueued(session, charge, {"order_id": 8})
        with pytest.raises(AssertionError, match="expected not to find"):
            await refute_enqueued(session, charge)

    in_a_session(test)


def test_plain_handlers_run_too(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        await jobs.enqueue(session, plain, {"value": 1})
        assert [one.result for one in await drain(session, jobs)] == [2]

    in_a_session(test)


def test_whoever_cancels_the_test_is_not_taken_for_its_handler(in_a_session: Runner) -> None:
    registry = Jobs()

    @registry.handler("waits")
    async def waits() -> None:
        await asyncio.sleep(3600)

    async def test(session: AsyncSession) -> None:
        await registry.enqueue(session, "waits")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(drain(session, registry, raise_errors=False), 0.2)

    in_a_session(test)


def test_a_scoped_session_will_do(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        factory = async_sessionmaker(
            session.bind, join_transaction_mode="create_savepoint", expire_on_commit=False
        )
        scoped = async_scoped_session(factory, scopefunc=asyncio.current_task)
        await jobs.enqueue(scoped, charge, {"order_id": 7})
        assert [one.status for one in await drain(scoped, jobs)] == ["done", "done"]
        await scoped.remove()

    in_a_session(test)


def test_a_connection_is_refused_with_the_way_out(in_a_session: Runner) -> None:
    async def test(session: AsyncSession) -> None:
        connection: AsyncConnection = await session.connection()
        with pytest.raises(TypeError, match="create_savepoint"):
            await drain(connection, jobs)

    in_a_session(test)


def test_a_plain_session_cannot_give_what_a_coroutine_asks_for(session: Session) -> None:
    job = jobs.enqueue(session, charge, {"order_id": 7})
    with pytest.raises(RunError, match="'charge' asks for an AsyncSession: give the call one"):
        run_job(session, jobs, job)
    assert session.get_one(Job, job.id).attempts == 0
