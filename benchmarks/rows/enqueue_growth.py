"""Enqueue one job per transaction into a table that has many rows already."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks import enqueuing, quantiles, seeding
from benchmarks.figures import Curve, Figure, Result, Target
from benchmarks.server import Server


@dataclass(frozen=True)
class Options:
    """The rows of the largest table (others have a tenth, a hundredth), and what a round is.

    Ten million of them take 4 GB and some minutes.
    """

    rows: int = 2_000_000
    transactions: int = 500
    rounds: int = 9


QUICK = Options(rows=10_000, transactions=100, rounds=1)


def measure(server: Server, options: Options) -> Result:
    sizes = [0, options.rows // 100, options.rows // 10, options.rows]
    engines = {}
    for rows in sizes:
        database = server.fresh()
        seeding.finished(database, rows)
        database.settle()
        engines[rows] = database.engine()
        enqueuing.connection_rate(engines[rows], 100, enqueuing.by_sa_jobs)
    rates: dict[int, list[float]] = {rows: [] for rows in sizes}
    for number in range(options.rounds):
        for rows in sizes if number % 2 else reversed(sizes):
            rates[rows].append(
                enqueuing.connection_rate(engines[rows], options.transactions, enqueuing.by_sa_jobs)
            )
    for engine in engines.values():
        engine.dispose()
    return Result(
        [
            Figure(
                f"enqueue, {rows:,} rows in the table",
                median(rates[rows]),
                "jobs/s",
                "an empty table",
                median(rates[0]),
                quantiles.median_ratio(rates[rows], rates[0]),
                Target(">=", 0.95) if rows == options.rows else None,
            )
            for rows in sizes[1:]
        ],
        curves=[Curve("enqueue, one per transaction", [(r, median(rates[r])) for r in sizes])],
    )
