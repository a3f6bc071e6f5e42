"""Draining: real workers run what was enqueued, from the first start to the last commit."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psycopg

from benchmarks import quantiles
from benchmarks.sampling import Meter, Used, memory
from benchmarks.server import Database, Filled, Server
from benchmarks.starts import Starts
from benchmarks.worker import WorkerProcess, running_workers

# By the primary key alone: the ready index may hold very many entries of other jobs, or dead ones.
_FIRST_UNFINISHED = (
    "SELECT id FROM sa_jobs WHERE id BETWEEN %s AND %s AND status IN ('ready', 'running')"
    " ORDER BY id LIMIT 1"
)
_STALL_SECONDS = 60.0
# A drain that is still not at its end is given up, so that the other rows get their turn.
_LONGEST_SECONDS = 300.0
_LOOK_SECONDS = 0.25


@dataclass(frozen=True)
class DrainOptions:
    """How much is drained, how often, and with which settings of the worker."""

    jobs: int = 50_000
    repetitions: int = 3
    concurrency: int = 100
    buffer: int = 400

    @property
    def for_worker(self) -> tuple[str, ...]:
        """The command-line options of the worker."""
        return ("--concurrency", str(self.concurrency), "--buffer", str(self.buffer))


@dataclass(frozen=True)
class Drained:
    """One drain: its rate in jobs per second, over all and in the first and last tenth."""

    jobs: int
    rate: float
    first_tenth: float
    last_tenth: float
    peak_memory: float
    used: Used

    def __str__(self) -> str:
        return (
            f"{self.jobs:,} jobs, {self.rate:,.0f}/s (first tenth {self.first_tenth:,.0f}/s, last"
            f" {self.last_tenth:,.0f}/s); {self.used.per_job(self.jobs)};"
            f" peak memory {self.peak_memory:.0f} MiB"
        )

    @property
    def last_to_first(self) -> float:
        """The speed of the last tenth of the jobs over that of the first."""
        return self.last_tenth / self.first_tenth


def drain(
    server: Server,
    database: Database,
    filled: Filled,
    worker_options: Sequence[str],
    *,
    workers: int = 1,
    look: Callable[[], None] | None = None,
) -> Drained:
    """Run jobs that are enqueued already, with workers that are started for it.

    The payloads count from 0. The time runs from the first handler's start until no unfinished job
    is left in committed state. `look` is called a few times a second meanwhile.
    """
    with (
        Starts.make(filled.jobs) as starts,
        running_workers(database, starts, worker_options, count=workers) as processes,
        database.connect() as connection,
    ):
        progress = Progress(connection, filled)
        wait_on(processes, starts.any_begun)
        times_out = time.monotonic() + _LONGEST_SECONDS
        meter = Meter(server, [process.pid for process in processes])
        peak = looked_at = 0.0
        while (begun := starts.begun()) < filled.jobs:
            wait_on(processes, functools.partial(_has_passed, starts, begun))
            time.sleep(0.01)
            if time.monotonic() - times_out > 0:
                raise RuntimeError(
                    f"{begun:,} of {filled.jobs:,} jobs within {_LONGEST_SECONDS:g} s: measure"
                    " fewer (--jobs), or on a quieter machine"
                )
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                peak = max(peak, memory(process.pid for process in processes))
                progress.all_finished()
                if look is not None:
                    look()
                looked_at = time.monotonic()
        wait_on(processes, progress.all_finished, every=0.005)
        end = time.monotonic()
        used = meter.read()
        peak = max(peak, memory(process.pid for process in processes))
        times = starts.in_order()
    if look is not None:
        look()
    return Drained(
        jobs=filled.jobs,
        rate=filled.jobs / (end - times[0]),
        first_tenth=quantiles.rate_between(times, 0.0, 0.1),
        last_tenth=quantiles.rate_between(times, 0.9, 1.0),
        peak_memory=peak,
        used=used,
    )


def _has_passed(starts: Starts, begun: int) -> bool:
    return starts.begun() > begun


class Progress:
    """Asks how far jobs are; it reads only those that were unfinished when it last asked."""

    def __init__(self, connection: psycopg.Connection[tuple[object, ...]], filled: Filled) -> None:
        self._connection = connection
        self._next: object = filled.first_id
        self._last = filled.last_id

    def all_finished(self) -> bool:
        """Return whether no job is ready or running any more."""
        row = self._connection.execute(_FIRST_UNFINISHED, [self._next, self._last]).fetchone()
        if row is None:
            return True
        self._next = row[0]
        return False


def wait_on(
    processes: Sequence[WorkerProcess],
    condition: Callable[[], bool],
    *,
    every: float = 0.01,
    seconds: float = _STALL_SECONDS,
) -> None:
    """Wait for a condition, as long as the workers live and it does not take too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        for process in processes:
            process.check()
        if time.monotonic() > deadline:
            logs = "\n".join(process.log for process in processes)
            raise RuntimeError(f"waited in vain for {seconds:g} s; the workers say:\n{logs}")
        time.sleep(every)
