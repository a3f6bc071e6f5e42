"""WAL per job over its whole life, and the bytes that a finished job takes in table and indexes."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.draining import DrainOptions, drain
from benchmarks.figures import Figure, Result, Target
from benchmarks.server import Server

# Full-page images depend on how often there is a checkpoint, not on the queue; and no vacuum but
# the one that is measured.
SETTINGS = {"full_page_writes": "off", "autovacuum": "off"}


@dataclass(frozen=True)
class Options(DrainOptions):
    """It is measured in one drain: sizes hardly vary."""

    repetitions: int = 1


QUICK = Options(jobs=1_000)


def measure(server: Server, options: Options) -> Result:
    database = server.fresh()
    empty = database.jobs_bytes()
    before = database.wal_position()
    filled = database.fill(options.jobs)
    enqueued = database.wal_position()
    database.execute("ANALYZE")
    analyzed = database.wal_position()
    drain(server, database, filled, options.for_worker)
    drained = database.wal_position()
    grown = database.jobs_bytes() - empty
    database.execute("VACUUM sa_jobs")
    vacuumed = database.jobs_bytes() - empty
    database.execute("VACUUM FULL sa_jobs")
    live = database.jobs_bytes() - empty
    jobs = options.jobs
    return Result(
        [
            Figure(
                "WAL per job, enqueued by enqueue_from_select",
                (enqueued - before + drained - analyzed) / jobs,
                "B",
                target=Target("<=", 1450, "value"),
            ),
            Figure(
                "table and indexes per finished job, before VACUUM",
                grown / jobs,
                "B",
                target=Target("<=", 650, "value"),
            ),
            Figure(
                "table and indexes per finished job, after VACUUM",
                vacuumed / jobs,
                "B",
                "live rows alone (VACUUM FULL)",
                live / jobs,
                target=Target("<=", 400, "value"),
            ),
        ],
        [f"{jobs:,} jobs; of the WAL {(enqueued - before) / jobs:.0f} B are the enqueue's"],
    )
