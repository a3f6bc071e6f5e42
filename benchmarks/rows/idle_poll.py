"""The server's work for the polls of an idle worker, with many jobs scheduled for later."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks import seeding
from benchmarks.claim_times import ClaimTimes, Seen
from benchmarks.figures import Figure, Result, Target
from benchmarks.server import TIMED_STATEMENTS, Database, Server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready

SETTINGS = TIMED_STATEMENTS


@dataclass(frozen=True)
class Options:
    """The jobs scheduled for later, and for how long and how often the worker polls."""

    rows: int = 1_000_000
    few_rows: int = 10_000
    seconds: int = 10
    poll_ms: int = 50


QUICK = Options(rows=10_000, few_rows=1_000, seconds=1, poll_ms=50)


def measure(server: Server, options: Options) -> Result:
    seen = {}
    for rows in (options.few_rows, options.rows):
        database = server.fresh()
        seeding.scheduled(database, rows)
        database.settle()
        seen[rows] = polls(database, options.seconds, options.poll_ms / 1000)
        server.drop(database)
    few, many = seen[options.few_rows], seen[options.rows]
    return Result(
        [
            Figure(
                f"idle poll, {options.rows:,} jobs for later",
                many.milliseconds / many.calls,
                "ms",
                f"with {options.few_rows:,}",
                few.milliseconds / few.calls,
                target=Target("<=", 1.0, "value"),
            ),
            Figure(
                "pages read by an idle poll",
                many.pages / many.calls,
                "pages",
                f"with {options.few_rows:,}",
                few.pages / few.calls,
                # An index of a hundred times the rows is a level or two higher.
                target=Target("<=", 2.0),
            ),
        ],
        [f"{many.calls} polls in {options.seconds} s"],
    )


def polls(database: Database, seconds: float, poll: float | None = None) -> Seen:
    """Let a worker poll, and return what its claims came to; `poll` is None for its default."""
    options = () if poll is None else ("--poll", str(poll))
    with Starts.make(1) as starts, running_workers(database, starts, options) as workers:
        wait_until_ready(database, workers)
        claims = ClaimTimes(database)
        time.sleep(seconds)
        seen = claims.total()
        for worker in workers:
            worker.check()
    if not seen.calls:
        raise RuntimeError(f"the worker did not poll within {seconds:g} s")
    return seen
