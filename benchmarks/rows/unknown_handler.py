"""Due jobs of a handler that no worker knows, ahead of the backlog."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks import quantiles
from benchmarks.claim_times import Seen
from benchmarks.draining import Drained, DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.rows.idle_poll import polls
from benchmarks.server import TIMED_STATEMENTS, Server

SETTINGS = TIMED_STATEMENTS


@dataclass(frozen=True)
class Options(DrainOptions):
    """With the number of jobs that nobody runs, and the seconds for which a worker then idles."""

    jobs: int = 20_000
    unknown: int = 100_000
    seconds: int = 20


QUICK = Options(jobs=1_000, repetitions=1, unknown=2_000, seconds=2)


def measure(server: Server, options: Options) -> Result:
    runs: dict[bool, list[Drained]] = {False: [], True: []}
    idle: list[Seen] = []
    for _ in range(options.repetitions):
        for ahead in (False, True):
            database = server.fresh()
            if ahead:
                database.fill(options.unknown, "elsewhere")
            filled = database.fill(options.jobs)
            database.analyze()
            runs[ahead].append(drain(server, database, filled, options.for_worker))
            if ahead and not idle:
                database.settle()
                idle.append(polls(database, options.seconds))
            server.drop(database)
    without, behind = ([run.rate for run in runs[ahead]] for ahead in (False, True))
    (seen,) = idle
    return Result(
        [
            Figure(
                f"drain behind {options.unknown:,} jobs of an unknown handler",
                median(behind),
                "jobs/s",
                "the same without",
                median(without),
                quantiles.median_ratio(behind, without),
                Target(">=", 0.9),
            ),
            Figure(
                f"idle poll, {options.unknown:,} due jobs of an unknown handler",
                seen.milliseconds / seen.calls,
                "ms",
                target=Target("<=", 1.0, "value"),
            ),
        ],
        [
            f"{seen.calls} polls in {options.seconds} s, {seen.pages / seen.calls:,.0f} pages each",
            *(
                f"{'behind' if ahead else 'without'}: {run}"
                for ahead in runs
                for run in runs[ahead]
            ),
        ],
    )
