"""Enqueue one job per transaction, through a Session and through a Connection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from benchmarks import enqueuing, quantiles
from benchmarks.figures import Figure, Result, Target
from benchmarks.limits import INSERT, Limits
from benchmarks.sampling import Meter
from benchmarks.server import Server


@dataclass(frozen=True)
class Options:
    """How many transactions each way has in a round, and how many rounds there are."""

    transactions: int = 1_000
    rounds: int = 9


QUICK = Options(transactions=100, rounds=1)


def measure(server: Server, options: Options) -> Result:
    limits = Limits.of(server)
    limits.renew()
    engine = server.fresh().engine()
    count = options.transactions
    on_session = partial(enqueuing.session_rate, engine)
    on_connection = partial(enqueuing.connection_rate, engine)
    ways: dict[str, Callable[[], float]] = {
        "Session, sa-jobs": lambda: on_session(count, enqueuing.by_sa_jobs),
        "Session, prebuilt INSERT": lambda: on_session(count, enqueuing.by_prebuilt_insert),
        "Session, INSERT built each time": lambda: on_session(count, enqueuing.by_insert),
        "Connection, sa-jobs": lambda: on_connection(count, enqueuing.by_sa_jobs),
        "Connection, prebuilt INSERT": lambda: on_connection(count, enqueuing.by_prebuilt_insert),
        "bare psycopg": lambda: enqueuing.bare_rate(limits.database, count, INSERT),
    }
    for way in ways.values():
        way()  # Compiles and prepares.
    rates: dict[str, list[float]] = {name: [] for name in ways}
    reached = []
    meter = Meter(server)
    for number in range(options.rounds):
        # The first of a round is another one each time.
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            rates[name].append(ways[name]())
        reached.append(limits.enqueue(count))
    others = meter.read().others
    engine.dispose()
    figures = [
        Figure(
            f"enqueue, {caller}",
            median(rates[f"{caller}, sa-jobs"]),
            "jobs/s",
            f"{caller}, prebuilt INSERT",
            median(rates[f"{caller}, prebuilt INSERT"]),
            quantiles.median_ratio(
                rates[f"{caller}, sa-jobs"], rates[f"{caller}, prebuilt INSERT"]
            ),
            Target(">=", 0.9),
        )
        for caller in ("Session", "Connection")
    ]
    figures += [
        Figure(
            f"limit: {name}",
            median(rates[name]),
            "jobs/s",
            "L1, 1 connection",
            median(reached),
            quantiles.median_ratio(rates[name], reached),
        )
        for name in ("Session, INSERT built each time", "bare psycopg")
    ]
    return Result(figures, [f"other processes {others:.2f} cores"])
