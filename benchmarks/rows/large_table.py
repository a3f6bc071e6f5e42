"""Drain with many finished rows in the table, many jobs for later, or many queues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from sqlalchemy import ColumnElement, Text, cast, func

from benchmarks import quantiles, seeding
from benchmarks.draining import Drained, DrainOptions, drain
from benchmarks.figures import Curve, Figure, Result, Target
from benchmarks.server import Database, Server


@dataclass(frozen=True)
class Options(DrainOptions):
    """With the rows that are in the table before, and the number of queues."""

    repetitions: int = 2
    rows: int = 1_000_000
    queues: int = 100


QUICK = Options(jobs=1_000, repetitions=1, rows=10_000, queues=10)

EMPTY = "an empty table"


def measure(server: Server, options: Options) -> Result:
    names = [f"queue_{number}" for number in range(options.queues)]
    served = [part for name in names for part in ("--queue", name)]

    def over_queues(number: ColumnElement[int]) -> Sequence[ColumnElement[Any]]:
        queue = func.concat("queue_", cast(number % options.queues, Text))
        return [queue.label("sa_jobs_queue")]

    finished = {f"{rows:,} finished rows": rows for rows in (options.rows // 10, options.rows)}
    cases: dict[str, tuple[Callable[[Database], None], Sequence[str], Any]] = {
        EMPTY: (lambda database: None, (), _one_queue),
        **{
            case: (functools.partial(seeding.finished, rows=rows), (), _one_queue)
            for case, rows in finished.items()
        },
        f"{options.rows:,} jobs for later": (
            lambda database: seeding.scheduled(database, options.rows),
            (),
            _one_queue,
        ),
        f"{options.queues} queues": (lambda database: None, served, over_queues),
    }
    templates = {}
    for case, (seed, _, _) in cases.items():
        templates[case] = server.fresh()
        seed(templates[case])
        templates[case].settle()
    runs: dict[str, list[Drained]] = {case: [] for case in cases}
    for _ in range(options.repetitions):
        for case, (_, served_queues, per_job) in cases.items():
            database = server.fresh(like=templates[case])
            filled = database.fill(options.jobs, options=per_job)
            database.analyze()
            runs[case].append(
                drain(server, database, filled, [*options.for_worker, *served_queues])
            )
            server.drop(database)
    empty = [run.rate for run in runs[EMPTY]]
    sizes = {EMPTY: 0, **finished}
    return Result(
        [
            Figure(
                f"drain, {case}",
                median(run.rate for run in runs[case]),
                "jobs/s",
                EMPTY,
                median(empty),
                quantiles.median_ratio([run.rate for run in runs[case]], empty),
                Target(">=", 0.95),
            )
            for case in cases
            if case != EMPTY
        ],
        [f"{case}: {run}" for case in cases for run in runs[case]],
        [
            Curve(
                "drain, finished rows",
                [(rows, median(run.rate for run in runs[case])) for case, rows in sizes.items()],
            )
        ],
    )


def _one_queue(number: ColumnElement[int]) -> Sequence[ColumnElement[Any]]:
    return ()
