"""Units of work that commit long after their enqueue, under a held snapshot with dead entries."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from benchmarks import quantiles
from benchmarks.draining import DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.rows.pick_up import waits
from benchmarks.server import Server, held_snapshot
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready
from sa_jobs import enqueue


@dataclass(frozen=True)
class Options:
    """Jobs, producers, the longest time from enqueue to commit, and dead entries before them."""

    jobs: int = 1_000
    producers: int = 8
    longest_ms: int = 500
    dead: int = 200_000


QUICK = Options(jobs=16, producers=8, longest_ms=100, dead=1_000)


def measure(server: Server, options: Options) -> Result:
    database = server.fresh()
    committed: dict[int, float] = {}
    enqueued: dict[int, float] = {}
    with held_snapshot(database), Starts.make(options.jobs) as starts:
        dead = database.fill(options.dead)
        database.analyze()
        drain(server, database, dead, DrainOptions().for_worker)
        with running_workers(database, starts) as workers:
            wait_until_ready(database, workers)
            engine = database.engine()
            producers = [
                threading.Thread(
                    target=_produce, args=(engine, number, options, enqueued, committed)
                )
                for number in range(options.producers)
            ]
            for producer in producers:
                producer.start()
            for producer in producers:
                producer.join()
            engine.dispose()
            waited = waits(starts, committed)
    overtaken = _overtaken(enqueued, committed)
    return Result(
        [
            Figure(
                f"pick-up of jobs committed up to {options.longest_ms} ms late, p99",
                quantiles.percentile(waited, 0.99) * 1000,
                "ms",
                target=Target("<=", 100.0, "value"),
            )
        ],
        [
            f"{options.jobs:,} jobs of {options.producers} producers, {options.dead:,} dead rows",
            quantiles.spread(waited),
            f"{overtaken / options.jobs:.0%} committed after a job that was enqueued later",
        ],
    )


def _produce(
    engine: Engine,
    producer: int,
    options: Options,
    enqueued: dict[int, float],
    committed: dict[int, float],
) -> None:
    chance = random.Random(producer)
    for job in range(producer, options.jobs, options.producers):
        with Session(engine) as session:
            enqueue(session, "noop", {"i": job})
            enqueued[job] = time.monotonic()
            time.sleep(chance.uniform(0.0, options.longest_ms / 1000))
            session.commit()
        committed[job] = time.monotonic()


def _overtaken(enqueued: dict[int, float], committed: dict[int, float]) -> int:
    """Return how many jobs committed after one that was enqueued later."""
    earliest = float("inf")
    count = 0
    for job in sorted(enqueued, key=lambda job: enqueued[job], reverse=True):
        count += committed[job] > earliest
        earliest = min(earliest, committed[job])
    return count
