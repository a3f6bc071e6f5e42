"""Heartbeats that stay in their page: the share of HOT updates while jobs only run."""

from __future__ import annotations

import time
from dataclasses import dataclass

from sqlalchemy.orm import Session

from benchmarks.draining import wait_on
from benchmarks.figures import Figure, Result, Target
from benchmarks.server import Database, Server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers
from sa_jobs import enqueue_many

_UPDATES = (
    "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = 'sa_jobs'::regclass"
)
# A session reports to the statistics no later than that.
_REPORTED_SECONDS = 2.0


@dataclass(frozen=True)
class Options:
    """The jobs that run meanwhile, one in each slot, others that wait, and how often and long."""

    running: int = 100
    waiting: int = 1_000
    seconds: int = 10
    heartbeat_ms: int = 500


QUICK = Options(running=10, waiting=10, seconds=2)


def measure(server: Server, options: Options) -> Result:
    database = server.fresh()
    lasting = options.seconds + 3 * _REPORTED_SECONDS
    jobs = [{"i": number, "seconds": lasting} for number in range(options.running)]
    engine = database.engine()
    with Session(engine) as session:
        enqueue_many(session, "nap", jobs, priority=1)
        session.commit()
    engine.dispose()
    database.fill(options.waiting, "elsewhere")
    database.analyze()
    heartbeat = options.heartbeat_ms / 1000
    worker = (
        *("--concurrency", str(options.running)),
        *("--heartbeat", str(heartbeat), "--lease", str(max(10.0, 4 * heartbeat))),
    )
    with Starts.make(options.running) as starts, running_workers(database, starts, worker) as live:
        wait_on(live, lambda: starts.begun() == options.running)
        time.sleep(_REPORTED_SECONDS)
        before = _updates(database)
        time.sleep(options.seconds)
        after = _updates(database)
        wait_on(live, lambda: _running(database) == 0)
    updates, hot = (end - start for start, end in zip(before, after, strict=True))
    return Result(
        [
            Figure(
                f"rows beaten in their page (HOT), {options.running} jobs running",
                hot / max(1, updates),
                "of all",
                target=Target(">=", 0.9, "value"),
            )
        ],
        [f"{updates:,} rows were beaten in {options.seconds} s, {hot:,} of them HOT"],
    )


def _updates(database: Database) -> tuple[int, int]:
    updates, hot = database.row(_UPDATES)
    return int(updates), int(hot)


def _running(database: Database) -> int:
    return int(database.row("SELECT count(*) FROM sa_jobs WHERE status = 'running'")[0])
