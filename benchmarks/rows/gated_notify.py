"""Producers of small transactions with live workers, NOTIFY on against NOTIFY off."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from benchmarks import quantiles
from benchmarks.figures import Figure, Result, Target
from benchmarks.limits import pgbench
from benchmarks.server import Database, Server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready

# By plain SQL, since eight Python producers would be busy with themselves.
_INSERT = """\
INSERT INTO sa_jobs (queue, handler, payload) VALUES ('default', 'noop', '{"i": 0}');
"""
_TARGETS = {0: 0.9, 1: 0.85, 4: 0.75}
# Long enough for a worker without a job to go to sleep.
_SLEEP_SECONDS = 0.5


@dataclass(frozen=True)
class Options:
    """The producers, the seconds of each half of a round, and the slots of each worker.

    The first half begins while the workers sleep; in the second they have been busy for a while.
    """

    producers: int = 8
    seconds: int = 3
    rounds: int = 3
    concurrency: int = 100


QUICK = Options(seconds=1, rounds=1)

_HALVES = ("at first", "going on")


def measure(server: Server, options: Options) -> Result:
    figures, notes = [], []
    for count, bound in _TARGETS.items():
        database = server.fresh()
        rates: dict[tuple[str, str], list[float]] = {}
        backlogs = []
        worker = ("--concurrency", str(options.concurrency))
        with (
            Starts.make(1) as starts,
            running_workers(database, starts, worker, count=count) as workers,
        ):
            wait_until_ready(database, workers)
            for number in range(options.rounds):
                # Which comes first changes, and no round leaves jobs to the next.
                for setting in ("on", "off") if number % 2 else ("off", "on"):
                    for half in _HALVES:
                        rate = _produce(server, database, options, setting)
                        rates.setdefault((half, setting), []).append(rate)
                    backlogs.append(_unfinished(database))
                    _empty(database)
                    time.sleep(_SLEEP_SECONDS)
        for half in _HALVES:
            on, off = rates[half, "on"], rates[half, "off"]
            figures.append(
                Figure(
                    f"{options.producers} producers, {count} workers, {half}, NOTIFY on",
                    median(on),
                    "jobs/s",
                    "NOTIFY off",
                    median(off),
                    quantiles.median_ratio(on, off),
                    Target(">=", bound),
                )
            )
        notes.append(f"{count} workers: {max(backlogs):,} jobs at most were left after a round")
        server.drop(database)
    return Result(figures, notes)


def _produce(server: Server, database: Database, options: Options, setting: str) -> float:
    return pgbench(
        server,
        database,
        _INSERT,
        clients=options.producers,
        seconds=options.seconds,
        settings={"sa_jobs.notify": setting},
    )


def _unfinished(database: Database) -> int:
    query = "SELECT count(*) FROM sa_jobs WHERE status IN ('ready', 'running')"
    return int(database.row(query)[0])


def _empty(database: Database) -> None:
    """Take away what the workers have not claimed yet, so that each round begins alike."""
    database.execute("DELETE FROM sa_jobs WHERE status = 'ready'")
