"""Producers of small transactions with live workers, NOTIFY on against NOTIFY off."""

from __future__ import annotations

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


@dataclass(frozen=True)
class Options:
    """The producers, the seconds of a round, and the slots of each worker."""

    producers: int = 8
    seconds: int = 5
    rounds: int = 5
    concurrency: int = 100


QUICK = Options(seconds=1, rounds=1)


def measure(server: Server, options: Options) -> Result:
    figures, notes = [], []
    for count, bound in _TARGETS.items():
        database = server.fresh()
        rates: dict[str, list[float]] = {"on": [], "off": []}
        backlogs = []
        worker = ("--concurrency", str(options.concurrency))
        with (
            Starts.make(1) as starts,
            running_workers(database, starts, worker, count=count) as workers,
        ):
            wait_until_ready(database, workers)
            for number in range(options.rounds):
                # Which comes first changes, and the workers are through with the last one's jobs.
                for setting in ("on", "off") if number % 2 else ("off", "on"):
                    rates[setting].append(
                        pgbench(
                            server,
                            database,
                            _INSERT,
                            clients=options.producers,
                            seconds=options.seconds,
                            settings={"sa_jobs.notify": setting},
                        )
                    )
                    backlogs.append(_unfinished(database))
                    _empty(database)
        figures.append(
            Figure(
                f"{options.producers} producers, {count} workers, NOTIFY on",
                median(rates["on"]),
                "jobs/s",
                "NOTIFY off",
                median(rates["off"]),
                quantiles.median_ratio(rates["on"], rates["off"]),
                Target(">=", bound),
            )
        )
        notes.append(f"{count} workers: {max(backlogs):,} jobs at most were left after a round")
        server.drop(database)
    return Result(figures, notes)


def _unfinished(database: Database) -> int:
    query = "SELECT count(*) FROM sa_jobs WHERE status IN ('ready', 'running')"
    return int(database.row(query)[0])


def _empty(database: Database) -> None:
    """Take away what the workers have not claimed yet, so that each round begins alike."""
    database.execute("DELETE FROM sa_jobs WHERE status = 'ready'")
