"""Pick-up of a job by an idle worker: from the return of the commit to the handler's start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy.orm import Session

from benchmarks import quantiles
from benchmarks.figures import Figure, Result, Target
from benchmarks.limits import Limits
from benchmarks.sampling import Meter
from benchmarks.server import Database, Server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready
from sa_jobs import enqueue


@dataclass(frozen=True)
class Options:
    """How many jobs there are, and the milliseconds between two of them.

    A worker stays awake for a while after a job. The jobs of the second series come so rarely that
    it sleeps in between.
    """

    samples: int = 300
    interval_ms: int = 50
    asleep_samples: int = 100
    asleep_interval_ms: int = 300


QUICK = Options(samples=10, interval_ms=20, asleep_samples=3, asleep_interval_ms=200)


def measure(server: Server, options: Options) -> Result:
    database = server.fresh()
    total = options.samples + options.asleep_samples
    with Starts.make(total) as starts, running_workers(database, starts) as workers:
        wait_until_ready(database, workers)
        meter = Meter(server, [worker.pid for worker in workers])
        awake = delays(database, starts, range(options.samples), options.interval_ms / 1000)
        asleep = delays(
            database,
            starts,
            range(options.samples, total),
            options.asleep_interval_ms / 1000,
        )
        used = meter.read()
    floor = Limits.of(server).pick_up(options.samples, options.interval_ms / 1000)
    series = {
        f"every {options.interval_ms} ms": awake,
        f"every {options.asleep_interval_ms} ms": asleep,
    }
    figures = [
        Figure(
            f"pick-up, a job {name}, p{share:.0%}".removesuffix("%"),
            quantiles.percentile(measured, share) * 1000,
            "ms",
            f"L6, p{share:.0%}".removesuffix("%"),
            quantiles.percentile(floor, share) * 1000,
            target=Target("<=", bound, "value"),
        )
        for name, measured in series.items()
        for share, bound in ((0.5, 0.8), (0.99, 1.5))
    ]
    return Result(figures, [f"{total} jobs, {used.per_job(total)}"])


def delays(
    database: Database, starts: Starts, jobs: Sequence[int], interval: float, *, priority: int = 0
) -> list[float]:
    """Enqueue jobs one by one, and return the seconds from each commit to the handler's start."""
    engine = database.engine()
    committed = {}
    began = time.monotonic()
    for position, job in enumerate(jobs):
        time.sleep(max(0.0, began + position * interval - time.monotonic()))
        with Session(engine) as session:
            enqueue(session, "noop", {"i": job}, priority=priority)
            session.commit()
        committed[job] = time.monotonic()
    engine.dispose()
    return waits(starts, committed)


def waits(starts: Starts, committed: dict[int, float], *, seconds: float = 30.0) -> list[float]:
    """Return how long after its commit each job started, once all have."""
    deadline = time.monotonic() + seconds
    while missing := [job for job in committed if not starts.get(job)]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(missing)} jobs did not start within {seconds:g} s")
        time.sleep(0.02)
    # A handler may start before its enqueuer has heard of the commit.
    return [max(0.0, starts.get(job) - moment) for job, moment in committed.items()]
