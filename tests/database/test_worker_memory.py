"""Nothing of a job outlives it in the worker: its locals, results, threads, files, connections."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sa_jobs import JobContext, Jobs, fixed
from tests.support.looking import unfinished
from tests.support.running import running
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow


class Data:
    """A local of a handler, as large as the ones that hurt."""

    def __init__(self) -> None:
        self.content = bytearray(1_000_000)


@contextmanager
def without_collector() -> Iterator[None]:
    """Show that reference counts alone free what is looked at, as in a process with much else."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.fixture
def references() -> list[weakref.ref[Data]]:
    return []


@pytest.fixture
def jobs(references: list[weakref.ref[Data]]) -> Jobs:
    """Handlers of each kind that fail and succeed, and note their large locals."""
    jobs = Jobs()

    def local() -> Data:
        data = Data()
        references.append(weakref.ref(data))
        return data

    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        data = local()
        raise ValueError(len(data.content))

    @jobs.handler("fails_in_chain", max_attempts=2, backoff=fixed(0))
    def fails_in_chain(ctx: JobContext) -> None:
        data = local()
        try:
            raise ValueError(len(data.content))
        except ValueError as error:
            ctx.log.warning("about to fail: %s", str(error))
            raise RuntimeError("in the end") from error

    @jobs.handler("fails_async", max_attempts=1)
    async def fails_async() -> None:
        data = local()
        raise ValueError(len(data.content))

    @jobs.handler("fails_in_session", max_attempts=1)
    def fails_in_session(session: Session) -> None:
        data = local()
        session.info["data"] = data
        session.execute(text("SELECT 1 / 0"))

    @jobs.handler("fails_in_async_session", max_attempts=1)
    async def fails_in_async_session(session: AsyncSession) -> None:
        data = local()
        session.info["data"] = data
        await session.execute(text("SELECT 1 / 0"))

    @jobs.handler("succeeds")
    def succeeds() -> str:
        data = local()
        return data.content[:900_000].hex()[:990_000]

    @jobs.handler("succeeds_async")
    async def succeeds_async(session: AsyncSession) -> str:
        data = local()
        return data.content[:900_000].hex()[:990_000]

    @jobs.handler("gives_what_cannot_be_stored")
    def gives_what_cannot_be_stored(ctx: JobContext) -> Any:
        data = local()
        ctx.progress(data)
        return [data]

    return jobs


NAMES = [
    "fails",
    "fails_in_chain",
    "fails_async",
    "fails_in_session",
    "fails_in_async_session",
    "succeeds",
    "succeeds_async",
    "gives_what_cannot_be_stored",
]


def test_the_locals_of_a_handler_are_gone_after_the_next_job(
    engine: Engine, jobs: Jobs, references: list[weakref.ref[Data]]
) -> None:
    jobs.handler("next")(lambda: None)

    @jobs.handler("next_async")
    async def next_async() -> None: ...

    def run(*names: str) -> None:
        with Session(engine) as session, session.begin():
            for name in names:
                jobs.enqueue(session, name)
        wait_until(lambda: not unfinished(engine), f"{names} end")

    with running(engine, jobs, concurrency=1):
        run(*NAMES)  # what SQLAlchemy makes once
        for name in NAMES:
            references.clear()
            with without_collector():
                run(name)
                run("next", "next_async")
                # The row is written a moment before the worker has let go of the job.
                wait_until(
                    lambda: [reference() for reference in references] == [None] * len(references),
                    f"the locals of {name} are gone",
                    seconds=5,
                )
            assert references


def test_threads_files_and_connections_stay_as_many(engine: Engine, jobs: Jobs) -> None:
    process = psutil.Process()

    def held() -> tuple[int, int, int]:
        with engine.connect() as connection:
            connections = connection.execute(
                text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
            ).scalar_one()
        return threading.active_count(), process.num_fds(), connections

    def run(rounds: int) -> None:
        with Session(engine) as session, session.begin():
            for name in NAMES:
                jobs.enqueue_many(session, name, [{}] * rounds)
        wait_until(lambda: not unfinished(engine), "all end", seconds=60)

    # One slot of each kind: what is opened when it is first needed is all there after a round.
    with running(engine, jobs, concurrency=1, lease=30.0, heartbeat=5.0):
        run(3)
        before = held()
        run(20)
        wait_until(lambda: held() == before, f"as many as before: {before}, {held()}", seconds=10)
