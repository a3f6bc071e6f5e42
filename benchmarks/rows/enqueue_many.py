"""Enqueue many jobs in one transaction: enqueue_many with their ids, and enqueue_from_select."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from sqlalchemy import select
from sqlalchemy.orm import Session

from benchmarks import quantiles
from benchmarks.figures import Figure, Result, Target
from benchmarks.limits import Limits
from benchmarks.server import Database, Server, numbers
from sa_jobs import Row, enqueue_from_select, enqueue_many


@dataclass(frozen=True)
class Options:
    """How many jobs one call has, and how often it is measured."""

    jobs: int = 50_000
    rounds: int = 5


QUICK = Options(jobs=2_000, rounds=1)

# Of the jobs with keys, one in ten has a key that is taken.
_TAKEN = 10


def measure(server: Server, options: Options) -> Result:
    limits = Limits.of(server)
    rates: dict[str, list[float]] = {}
    reached = []
    for _ in range(options.rounds):
        database = server.fresh()
        for name, way in _WAYS.items():
            rates.setdefault(name, []).append(options.jobs / way(database, options.jobs))
        reached.append(limits.enqueue_many(options.jobs))
        server.drop(database)
    targets = {
        "enqueue_many": Target(">=", 130_000, "value"),
        "enqueue_from_select": Target(">=", 250_000, "value"),
    }
    return Result(
        [
            Figure(
                name,
                median(rates[name]),
                "jobs/s",
                "L2, 1 connection",
                median(reached),
                quantiles.median_ratio(rates[name], reached),
                targets.get(name),
            )
            for name in _WAYS
        ],
        [
            f"{options.jobs:,} jobs in one transaction; with keys, one in {_TAKEN} is there before",
            "the targets in jobs/s are those of the machine of the dated figures",
        ],
    )


def _payloads(database: Database, jobs: int) -> float:
    engine = database.engine()
    with Session(engine) as session:
        began = time.perf_counter()
        added = enqueue_many(session, "noop", [{"i": i} for i in range(jobs)])
        session.commit()
        seconds = time.perf_counter() - began
    engine.dispose()
    _check(sum(job.created for job in added), jobs)
    return seconds


def _keyed(database: Database, jobs: int) -> float:
    engine = database.engine()
    with Session(engine) as session:
        enqueue_many(session, "noop", [_row(i) for i in range(0, jobs, _TAKEN)])
        session.commit()
    with Session(engine) as session:
        began = time.perf_counter()
        added = enqueue_many(session, "noop", [_row(i) for i in range(jobs)])
        session.commit()
        seconds = time.perf_counter() - began
    engine.dispose()
    _check(sum(job.created for job in added), jobs - len(range(0, jobs, _TAKEN)))
    return seconds


def _row(number: int) -> Row:
    return Row({"i": number}, idempotency_key=f"benchmark:{number}")


def _select(database: Database, jobs: int) -> float:
    engine = database.engine()
    with Session(engine) as session:
        began = time.perf_counter()
        added = enqueue_from_select(session, "noop", select(numbers(0, jobs)))
        session.commit()
        seconds = time.perf_counter() - began
    engine.dispose()
    _check(added, jobs)
    return seconds


def _check(added: int, expected: int) -> None:
    if added != expected:
        raise RuntimeError(f"{added} jobs were added, not {expected}")


_WAYS = {
    "enqueue_many": _payloads,
    "enqueue_many, idempotency keys": _keyed,
    "enqueue_from_select": _select,
}
