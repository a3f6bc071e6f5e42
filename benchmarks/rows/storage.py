"""WAL per job over its whole life, and the bytes that a finished job takes in table and indexes.

Jobs are enqueued and drained in rounds, with a VACUUM after each, as autovacuum does it in earnest:
the room that the versions of earlier jobs leave is used by later ones.
"""

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
    """How many jobs there are in a round, and how many rounds; one repetition does."""

    jobs: int = 10_000
    repetitions: int = 1
    rounds: int = 5


QUICK = Options(jobs=300, rounds=2)


def measure(server: Server, options: Options) -> Result:
    database = server.fresh()
    empty = database.jobs_bytes()
    enqueuing = working = 0
    grown, vacuumed = [], []
    for number in range(options.rounds):
        began = database.wal_position()
        filled = database.fill(options.jobs)
        enqueued = database.wal_position()
        if not number:
            database.execute("ANALYZE")
        analyzed = database.wal_position()
        drain(server, database, filled, options.for_worker)
        enqueuing += enqueued - began
        working += database.wal_position() - analyzed
        grown.append(database.jobs_bytes() - empty)
        database.execute("VACUUM ANALYZE sa_jobs")
        vacuumed.append(database.jobs_bytes() - empty)
    database.execute("VACUUM FULL sa_jobs")
    live = database.jobs_bytes() - empty
    jobs = options.jobs * options.rounds
    first = options.jobs
    return Result(
        [
            Figure(
                "WAL per job, enqueued by enqueue_from_select",
                (enqueuing + working) / jobs,
                "B",
                target=Target("<=", 1450, "value"),
            ),
            Figure(
                "table and indexes per finished job, before any VACUUM",
                grown[0] / first,
                "B",
                target=Target("<=", 650, "value"),
            ),
            Figure(
                f"table and indexes per finished job, after {options.rounds} rounds with VACUUM",
                vacuumed[-1] / jobs,
                "B",
                "live rows alone (VACUUM FULL)",
                live / jobs,
                target=Target("<=", 400, "value"),
            ),
        ],
        [
            f"{jobs:,} jobs; of the WAL {enqueuing / jobs:.0f} B are the enqueue's",
            "bytes per finished job after the VACUUM of each round: "
            + ", ".join(
                f"{size / (number * first):.0f}" for number, size in enumerate(vacuumed, start=1)
            ),
        ],
    )
