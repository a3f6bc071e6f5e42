"""Statements that write many rows, all at once: none runs into a deadlock with another.

The fixture of the database fails a test that the server had to break a deadlock for.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from sqlalchemy import Connection, Engine, func, select, text

from sa_jobs import Jobs, Row, cancel, claims, enqueue_many, retry
from sa_jobs.models import DEFAULT_TABLES
from tests.support.running import running

SECONDS = 6.0


def test_workers_and_operators_get_by_without_deadlocks(engine: Engine) -> None:
    jobs = Jobs()
    handlers_run = threading.Semaphore(0)

    @jobs.handler("naps", max_attempts=2, backoff=lambda attempt: 0.1)
    def naps(number: int) -> None:
        handlers_run.release()
        time.sleep(0.02)
        if number % 3 == 0:
            raise ValueError(number)

    errors: list[BaseException] = []
    end = time.monotonic() + SECONDS

    def loop(work: Callable[[Connection, random.Random], None]) -> None:
        chance = random.Random(work.__name__)
        try:
            while time.monotonic() < end:
                with engine.begin() as connection:
                    work(connection, chance)
        except BaseException as error:
            errors.append(error)

    def some(connection: Connection, status: str) -> list[int]:
        table = DEFAULT_TABLES.jobs
        found = select(table.c.id).where(table.c.status == status).order_by(func.random())
        return list(connection.execute(found.limit(10)).scalars())

    def enqueue_in_any_order(connection: Connection, chance: random.Random) -> None:
        keys = chance.sample(range(2_000), 20)
        rows = [Row({"number": key}, idempotency_key=f"key-{key}") for key in keys]
        enqueue_many(connection, "naps", rows)

    def cancel_some(connection: Connection, chance: random.Random) -> None:
        for job_id in some(connection, chance.choice(("ready", "running"))):
            with engine.begin() as own:
                cancel(own, job_id)

    def retry_some(connection: Connection, chance: random.Random) -> None:
        for job_id in some(connection, chance.choice(("dead", "cancelled"))):
            with engine.begin() as own:
                retry(own, job_id)

    def reclaim_all(connection: Connection, chance: random.Random) -> None:
        connection.execute(
            text(
                "UPDATE sa_jobs SET leased_until = now() - interval '1 s' WHERE id IN"
                " (SELECT id FROM sa_jobs WHERE status = 'running' ORDER BY id LIMIT 3"
                " FOR NO KEY UPDATE SKIP LOCKED)"
            )
        )
        claims.reclaim(connection)

    works = [enqueue_in_any_order, enqueue_in_any_order, cancel_some, retry_some, reclaim_all]
    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    options = {"concurrency": 20, "buffer": 30, "heartbeat": 0.3}
    with running(engine, jobs, **options), running(engine, jobs, **options):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert errors == []
    # Much was under way.
    assert all(handlers_run.acquire(blocking=False) for _ in range(100))
