"""What a worker's memory does over many jobs that fail and succeed.

All have a megabyte in a local variable; half raise, half return nearly as much. The worker runs in
this process; its memory, threads, open files and connections are printed as it goes.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
import time
import weakref

import psutil
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker
from sa_jobs.models import metadata
from tests.support.postgres import Cluster, embedded_bin, system_bin

WARM_UP = 1_000
LOCAL_BYTES = 1_000_000
RESULT_CHARACTERS = 990_000
GROWTH_BYTES = 20_000_000

jobs = Jobs()
alive: weakref.WeakSet[Data] = weakref.WeakSet()


class Data:
    def __init__(self) -> None:
        # Not zeros, which the system would give no memory for.
        self.content = bytearray(b"x" * LOCAL_BYTES)
        alive.add(self)


@jobs.handler("fails", max_attempts=1)
def fails(session: Session) -> None:
    data = Data()
    session.execute(text("SELECT 1"))
    raise ValueError(f"with {len(data.content)} bytes at hand")


@jobs.handler("succeeds")
def succeeds() -> str:
    data = Data()
    return data.content[:RESULT_CHARACTERS].decode()


@jobs.handler("fails_async", max_attempts=1)
async def fails_async() -> None:
    data = Data()
    raise ValueError(f"with {len(data.content)} bytes at hand")


@jobs.handler("succeeds_async")
async def succeeds_async() -> str:
    return succeeds()


HANDLERS = ("fails", "succeeds", "fails_async", "succeeds_async")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--server", choices=["embedded", "system"], default="embedded")
    arguments = parser.parse_args()
    programs = embedded_bin() if arguments.server == "embedded" else system_bin()
    if programs is None:
        sys.exit(f"there is no {arguments.server} PostgreSQL")
    logging.getLogger("sa_jobs").setLevel(logging.CRITICAL)
    with Cluster(programs, settings={"max_wal_size": "4GB", "fsync": "off"}) as cluster:
        if not flat(cluster.url(), arguments.jobs, arguments.concurrency):
            sys.exit(1)


def flat(url: str, total: int, concurrency: int) -> bool:
    engine = create_engine(url)
    metadata.create_all(engine)
    worker = Worker(engine, jobs, concurrency=concurrency, lease=300, heartbeat=60)
    thread = threading.Thread(target=worker.run)
    thread.start()
    process = psutil.Process()
    print(f"{'jobs':>7} {'RSS MB':>8} {'threads':>8} {'files':>6} {'connections':>12} {'s':>6}")
    began = time.monotonic()
    after_warm_up = now = 0
    for done in range(WARM_UP, total + 1, WARM_UP):
        work(url)
        now = process.memory_info().rss
        after_warm_up = after_warm_up or now
        print(
            f"{done:7} {now / 1e6:8.1f} {threading.active_count():8} {process.num_fds():6} "
            f"{connections(url):12} {time.monotonic() - began:6.0f}",
            flush=True,
        )
    left = len(alive)
    worker.stop()
    thread.join()
    engine.dispose()
    growth = now - after_warm_up
    print(f"growth after the first {WARM_UP} jobs: {growth / 1e6:+.1f} MB")
    print(f"handlers whose local is still in memory: {left}")
    return growth < GROWTH_BYTES and left == 0


def work(url: str) -> None:
    """Enqueue a round of jobs, wait for their end, and take the rows away."""
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        for handler in HANDLERS:
            jobs.enqueue_many(session, handler, [{}] * (WARM_UP // len(HANDLERS)))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        left = text("SELECT count(*) FROM sa_jobs WHERE status IN ('ready', 'running')")
        while connection.execute(left).scalar():
            time.sleep(0.1)
        ended = text("SELECT status, count(*) AS jobs FROM sa_jobs GROUP BY 1 ORDER BY 1")
        counts = {row.status: row.jobs for row in connection.execute(ended)}
        assert counts == {"dead": WARM_UP // 2, "done": WARM_UP // 2}, counts
        connection.execute(text("TRUNCATE sa_jobs, sa_jobs_failures"))
    engine.dispose()


def connections(url: str) -> int:
    engine = create_engine(url)
    with engine.connect() as connection:
        count: int = connection.execute(
            text(
                "SELECT count(*) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        ).scalar_one()
    engine.dispose()
    return count


if __name__ == "__main__":
    main()
