"""Resident memory of a worker, above that of a process that only imports what it needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.draining import DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.sampling import memory
from benchmarks.server import Server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers, wait_until_ready

# What a worker cannot do without; the process says that it is through, and waits to be ended.
_IMPORTS = "import click, psycopg, sqlalchemy.orm; print(flush=True); input()"


@dataclass(frozen=True)
class Options(DrainOptions):
    """The drain of the busy worker."""

    repetitions: int = 1


QUICK = Options(jobs=1_000)


def measure(server: Server, options: Options) -> Result:
    with _imported() as process:
        floor = memory([process.pid])
    database = server.fresh()
    with Starts.make(1) as starts, running_workers(database, starts) as workers:
        wait_until_ready(database, workers)
        idle = memory([worker.pid for worker in workers])
    filled = database.fill(options.jobs)
    database.analyze()
    busy = drain(server, database, filled, options.for_worker).peak_memory
    return Result(
        [
            Figure(
                f"memory of {name} worker above the imports",
                measured - floor,
                "MiB",
                "the imports alone",
                floor,
                target=Target("<=", bound, "value"),
            )
            for name, measured, bound in (("an idle", idle, 12.0), ("a busy", busy, 40.0))
        ],
        [f"idle {idle:.1f} MiB, busy {busy:.1f} MiB, imports {floor:.1f} MiB in all"],
    )


@contextmanager
def _imported() -> Iterator[subprocess.Popen[str]]:
    """Run a process that has imported everything, and end it at the end of the block."""
    with subprocess.Popen(
        [sys.executable, "-c", _IMPORTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.communicate("\n")
