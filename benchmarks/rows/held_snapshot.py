"""Drain while another session holds a snapshot open, from before the enqueue to the end."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks import quantiles
from benchmarks.claim_times import ClaimTimes
from benchmarks.draining import Drained, DrainOptions, drain
from benchmarks.figures import Curve, Figure, Result, Target
from benchmarks.server import TIMED_STATEMENTS, Server, held_snapshot

SETTINGS = TIMED_STATEMENTS


@dataclass(frozen=True)
class Options(DrainOptions):
    """Many jobs, since what slows down does so with the dead entries they leave."""

    jobs: int = 200_000
    repetitions: int = 2


QUICK = Options(jobs=1_000, repetitions=1)


def measure(server: Server, options: Options) -> Result:
    runs: dict[bool, list[Drained]] = {False: [], True: []}
    curves: dict[bool, list[tuple[float, float]]] = {}
    notes = []
    for _ in range(options.repetitions):
        for hold in (False, True):
            database = server.fresh()
            with held_snapshot(database, hold=hold):
                filled = database.fill(options.jobs)
                database.analyze()
                claims = ClaimTimes(database)
                run = drain(server, database, filled, options.for_worker, look=claims.look)
            runs[hold].append(run)
            curves[hold] = claims.curve()
            notes.append(f"{'held' if hold else 'free'}: {run}")
            server.drop(database)
    free, held = runs[False], runs[True]
    return Result(
        [
            Figure(
                "drain under a held snapshot",
                median(run.rate for run in held),
                "jobs/s",
                "the same without",
                median(run.rate for run in free),
                quantiles.median_ratio([run.rate for run in held], [run.rate for run in free]),
                Target(">=", 0.9),
            ),
            Figure(
                "last tenth over first tenth under a held snapshot",
                median(run.last_to_first for run in held),
                "x",
                "the same without",
                median(run.last_to_first for run in free),
                target=Target(">=", 1.0, "value"),
            ),
        ],
        notes,
        [Curve("snapshot held", curves[True]), Curve("no snapshot held", curves[False])],
    )
