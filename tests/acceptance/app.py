"""The application that acceptance tests run in worker processes.

Each start of a handler is recorded on a connection of its own that commits at once, so that it
counts even where the job's own transaction is lost.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

from sqlalchemy import (
    BigInteger,
    Column,
    DateTime,
    Engine,
    MetaData,
    Table,
    Text,
    create_engine,
    func,
)
from sqlalchemy import insert as sql_insert
from sqlalchemy.orm import Session

from sa_jobs import Discard, JobContext, Jobs, Snooze, fixed
from sa_jobs.urls import database_url

metadata = MetaData()
starts = Table(
    "starts",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
)
effects = Table(
    "effects", metadata, Column("job_id", BigInteger, nullable=False), Column("note", Text)
)

jobs = Jobs()


@cache
def _engine() -> Engine:
    return create_engine(
        database_url(None),
        isolation_level="AUTOCOMMIT",
        max_overflow=50,
        pool_pre_ping=True,
        # Prepared statements clash where there is a pooler.
        connect_args={"prepare_threshold": None},
    )


def mark_start(ctx: JobContext) -> None:
    """Record that an attempt began."""
    with _engine().connect() as connection:
        connection.execute(
            sql_insert(starts).values(job_id=ctx.job.id, attempt=ctx.attempt, pid=os.getpid())
        )


@jobs.handler("quick")
def quick(ctx: JobContext) -> str:
    mark_start(ctx)
    return "quick"


@jobs.handler("sleep")
def sleep(seconds: float, ctx: JobContext) -> None:
    mark_start(ctx)
    time.sleep(seconds)


@jobs.handler("sleep_async")
async def sleep_async(seconds: float, ctx: JobContext) -> None:
    await asyncio.to_thread(mark_start, ctx)
    await asyncio.sleep(seconds)


@jobs.handler("wait_for_cancel")
def wait_for_cancel(ctx: JobContext) -> None:
    mark_start(ctx)
    if ctx.wait(60):
        raise Discard("was asked to stop")


@jobs.handler("ignores_cancel")
def ignores_cancel(ctx: JobContext) -> str:
    mark_start(ctx)
    ctx.wait(60)
    return "went on to its end"


@jobs.handler("fails_when_cancelled", backoff=fixed(0))
def fails_when_cancelled(ctx: JobContext) -> None:
    mark_start(ctx)
    ctx.wait(60)
    raise ValueError("fails by itself")


@jobs.handler("always_fails", max_attempts=4, backoff=lambda attempt: 0.2 * 2**attempt)
def always_fails(ctx: JobContext) -> None:
    mark_start(ctx)
    raise ValueError(f"failure of attempt {ctx.attempt}")


@jobs.handler("kills_its_worker", max_attempts=3)
def kills_its_worker(ctx: JobContext) -> None:
    mark_start(ctx)
    os._exit(137)


@jobs.handler("until")
def until(path: str, ctx: JobContext) -> None:
    mark_start(ctx)
    while not Path(path).exists():
        time.sleep(0.02)


@jobs.handler("is_killed", max_attempts=1)
def is_killed(ctx: JobContext) -> None:
    mark_start(ctx)
    os.kill(os.getpid(), signal.SIGKILL)


@jobs.handler("leaves_a_process")
def leaves_a_process(seconds: float) -> None:
    subprocess.run(["sh", "-c", f"sleep {seconds} &"], check=True)


kept: list[bytearray] = []


@jobs.handler("keeps_memory")
def keeps_memory(mib: int, ctx: JobContext) -> None:
    mark_start(ctx)
    kept.append(bytearray(b"x") * (mib * 1024 * 1024))


@jobs.handler("effect", backoff=fixed(0.1))
def effect(session: Session, ctx: JobContext, seconds: float = 0.0) -> str:
    mark_start(ctx)
    session.execute(sql_insert(effects).values(job_id=ctx.job.id, note="effect"))
    time.sleep(seconds)
    return "effect"


@jobs.handler("fails_after_sleep", backoff=fixed(60))
def fails_after_sleep(seconds: float, ctx: JobContext) -> None:
    mark_start(ctx)
    time.sleep(seconds)
    raise ValueError("late failure")


@jobs.handler("snoozes_once")
def snoozes_once(ctx: JobContext) -> None:
    mark_start(ctx)
    if ctx.job.claim_no == 1:
        raise Snooze(0.1)


@jobs.handler("burns")
def burns(seconds: float, ctx: JobContext) -> None:
    mark_start(ctx)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(number * number for number in range(1000))


@jobs.handler("keeps_the_interpreter")
def keeps_the_interpreter(seconds: int, ctx: JobContext) -> None:
    mark_start(ctx)
    # Unlike CDLL, PyDLL does not let other threads run during the call.
    ctypes.PyDLL(None).sleep(seconds)
