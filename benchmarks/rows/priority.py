"""A job of high priority that arrives behind a backlog, also under a held snapshot."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks import quantiles
from benchmarks.draining import DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.rows.pick_up import delays
from benchmarks.server import Server, held_snapshot
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready


@dataclass(frozen=True)
class Options:
    """The jobs that wait, how many urgent ones come, and the milliseconds between these.

    Under the held snapshot as many jobs as wait have been run before, whose dead entries stay. A
    job of the backlog takes its slot for 2 ms.
    """

    backlog: int = 100_000
    samples: int = 200
    interval_ms: int = 50
    concurrency: int = 8


QUICK = Options(backlog=4_000, samples=10, interval_ms=20)


def measure(server: Server, options: Options) -> Result:
    figures, notes = [], []
    draining = DrainOptions(jobs=options.backlog)
    worker = ("--concurrency", str(options.concurrency))
    for hold in (False, True):
        database = server.fresh()
        with (
            held_snapshot(database, hold=hold),
            Starts.make(options.samples + options.backlog) as starts,
        ):
            if hold:
                dead = database.fill(options.backlog)
                drain(server, database, dead, draining.for_worker)
            database.fill(options.backlog, "nap", first=options.samples)
            database.analyze()
            with running_workers(database, starts, worker) as workers:
                wait_until_ready(database, workers)
                waited = delays(
                    database,
                    starts,
                    range(options.samples),
                    options.interval_ms / 1000,
                    priority=10,
                )
                run = len(starts.in_order()) - options.samples
        if run >= options.backlog:
            raise RuntimeError("the backlog was too small: it was empty before the end")
        figures.append(
            Figure(
                f"urgent job behind {options.backlog:,}{', snapshot held' if hold else ''}, p99",
                quantiles.percentile(waited, 0.99) * 1000,
                "ms",
                target=Target("<=", 100.0, "value"),
            )
        )
        notes.append(
            f"{'held' if hold else 'free'}: {quantiles.spread(waited)}; "
            f"{run:,} of the backlog were run meanwhile"
        )
        server.drop(database)
    return Result(figures, notes)
