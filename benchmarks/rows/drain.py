"""Drain no-op jobs with one worker process; finished rows are kept, commits are durable."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks import quantiles
from benchmarks.draining import DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.limits import Limits
from benchmarks.server import Server


@dataclass(frozen=True)
class Options(DrainOptions):
    """With the handlers to drain, separated by commas."""

    handlers: str = "noop,noop_coroutine"


QUICK = Options(jobs=1_000, repetitions=1, handlers="noop")


def measure(server: Server, options: Options) -> Result:
    return with_workers(server, options, 1, Target(">=", 0.6))


def with_workers(server: Server, options: Options, workers: int, target: Target | None) -> Result:
    """Drain with so many worker processes; the limit beside it has as many connections."""
    limits = Limits.of(server)
    handlers = options.handlers.split(",")
    rates: dict[str, list[float]] = {handler: [] for handler in handlers}
    reached: list[float] = []
    notes = []
    for _ in range(options.repetitions):
        reached.append(limits.drain(options.jobs, clients=workers))
        for handler in handlers:
            database = server.fresh()
            filled = database.fill(options.jobs, handler)
            database.analyze()
            run = drain(server, database, filled, options.for_worker, workers=workers)
            rates[handler].append(run.rate)
            notes.append(f"{handler}: {run}")
            server.drop(database)
    processes = f"{workers} worker process{'es' if workers > 1 else ''}"
    figures = [
        Figure(
            f"drain, {processes}, {handler}",
            median(rates[handler]),
            "jobs/s",
            f"L4, batch 100, {workers} connection{'s' if workers > 1 else ''}",
            median(reached),
            quantiles.median_ratio(rates[handler], reached),
            target,
        )
        for handler in handlers
    ]
    return Result(figures, notes)
