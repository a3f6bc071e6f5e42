"""Other queues beside sa-jobs: their dated figures, or a run of the peers' harness with both.

The harness is a folder with `server.sh`, `driver.py` and `report.py`, set up as its README says; a
runner in it drives one queue, and `benchmarks/sa_jobs_.py` is the one for this package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import table
from benchmarks.figures import Figure, Target

RUNNER = Path(__file__).with_name("sa_jobs_.py")
OURSELVES = "sa_jobs"
MEASURED_ON = "2026-11-29"
MACHINE = "2 cores shared by client and server, PostgreSQL 15.18, Python 3.12, durable commits"

# The best of each kind of work; the harness has more.
NAMES = ("graphile", "pgqueuer_asyncpg", "pgboss", "awa", "dramatiq_pg")
WORKLOADS = ("W1", "W2", "W3", "W3x2", "W4")


@dataclass(frozen=True)
class Peer:
    """What one queue reaches, in jobs per second, milliseconds and bytes; None: not measured."""

    name: str
    enqueue: float | None
    enqueue_many: float | None
    drain: float | None
    drain_two: float | None
    p50: float | None
    p99: float | None
    wal: float | None


DATED = (
    Peer("pgqueuer_asyncpg", 2_321, 61_090, 19_323, 28_811, 1.76, 6.21, 2_509),
    Peer("graphile", 1_189, 59_503, 34_465, 43_432, 1.02, 8.90, 1_022),
    Peer("pgboss", 1_120, 45_931, 18_207, 21_390, 2.26, 7.30, 1_781),
    Peer("awa", 767, 72_394, 6_817, 6_539, 4.52, 25.37, 1_097),
    Peer("oban", 1_714, 4_681, 2_423, 4_042, 7.99, 20.01, 1_549),
    Peer("chancy", 1_241, 4_317, 3_765, 4_884, 1.46, 3.76, 1_631),
    Peer("procrastinate", 1_078, 17_757, 769, 871, 1.73, 4.48, 2_693),
    Peer("pgqueuer_psycopg", 2_065, 51_323, 12_733, 18_206, 2.12, 53.48, 2_509),
    Peer("saq", 1_549, 2_876, 892, 1_072, 2.78, 5.62, 3_806),
    Peer("soniq", 963, 24_117, 561, 564, 7.52, 11.20, 1_870),
    Peer("dramatiq_postgres", 1_394, 1_388, 2_088, 1_980, 0.96, 1.46, 1_494),
    Peer("absurd", 2_167, 3_509, 1_200, 2_004, 25.64, 51.99, 2_326),
    Peer("dramatiq_pg", 1_576, 1_680, 1_329, 1_149, 0.80, 1.43, 1_333),
    Peer("rq_redis", 2_416, 11_173, 233, 413, 1.38, 2.25, None),
    Peer("celery_redis", 2_283, 2_371, 1_041, 1_727, 1.10, 2.29, None),
)

_COLUMNS: dict[str, Callable[[Peer], float | None]] = {
    "enqueue one /s": lambda peer: peer.enqueue,
    "enqueue many /s": lambda peer: peer.enqueue_many,
    "drain /s": lambda peer: peer.drain,
    "drain, 2 workers /s": lambda peer: peer.drain_two,
    "pick-up p50 ms": lambda peer: peer.p50,
    "pick-up p99 ms": lambda peer: peer.p99,
    "WAL B/job": lambda peer: peer.wal,
}


def in_markdown(peers: Sequence[Peer]) -> str:
    """Return the peers' table, the fastest drain first."""
    ordered = sorted(peers, key=lambda peer: peer.drain or 0.0, reverse=True)
    lines = [
        [
            peer.name,
            *(
                "" if (value := get(peer)) is None else table.number(value)
                for get in _COLUMNS.values()
            ),
        ]
        for peer in ordered
    ]
    return table.markdown(["queue", *_COLUMNS], lines, [False] + [True] * len(_COLUMNS))


def measure(harness: Path, *, names: Sequence[str] = NAMES, repetitions: int = 3) -> list[Peer]:
    """Run the harness with sa-jobs and other queues in it, and return the medians of each."""
    for needed in ("server.sh", "driver.py", "common.py"):
        if not (harness / needed).exists():
            raise FileNotFoundError(f"{harness} has no {needed}: it is not the peers' harness")
    home = Path(os.environ.get("PB_HOME", "/tmp/pb"))
    with tempfile.TemporaryDirectory(prefix="sa-jobs-peers-") as directory:
        # A copy, to which the runner is added.
        copy = Path(directory) / "peers"
        shutil.copytree(harness, copy)
        shutil.copy(RUNNER, copy)
        records = Path(directory) / "results.jsonl"
        environment = {
            **os.environ,
            "PB_HOME": str(home),
            "PB_RESULTS": str(records),
            "SA_JOBS_PYTHON": sys.executable,
        }
        subprocess.run([copy / "server.sh"], check=True, env=environment)
        subprocess.run(
            [
                home / "v312" / "bin" / "python",
                copy / "driver.py",
                "--reps",
                str(repetitions),
                OURSELVES,
                *names,
                *WORKLOADS,
            ],
            check=True,
            env=environment,
        )
        return summary([json.loads(line) for line in records.read_text().splitlines()])


def summary(records: Sequence[dict[str, Any]]) -> list[Peer]:
    """Return the medians of the harness's records, of each queue."""

    def middle(name: str, workload: str, key: str) -> float | None:
        values = [
            record[key]
            for record in records
            if record["peer"] == name
            and record["wl"] == workload
            and record.get(key) is not None
            and record.get("complete", True)
        ]
        return median(values) if values else None

    return [
        Peer(
            name,
            middle(name, "W1", "rate"),
            middle(name, "W2", "rate"),
            middle(name, "W3", "rate"),
            middle(name, "W3x2", "rate"),
            middle(name, "W4", "p50"),
            middle(name, "W4", "p99"),
            middle(name, "W3", "wal_job"),
        )
        for name in dict.fromkeys(record["peer"] for record in records)
    ]


def figures(peers: Sequence[Peer]) -> list[Figure]:
    """Return sa-jobs against its peers of the same run, as far as both were measured."""
    found: list[Figure] = []

    def against(
        what: str,
        unit: str,
        get: Callable[[Peer], float | None],
        target: Target,
        *names: str,
    ) -> None:
        ours = [get(peer) for peer in peers if peer.name == OURSELVES]
        theirs = [
            (value, peer.name)
            for peer in peers
            if peer.name != OURSELVES
            and (not names or peer.name in names)
            and (value := get(peer)) is not None
        ]
        if theirs and ours and ours[0] is not None:
            value, name = max(theirs)
            found.append(Figure(what, ours[0], unit, name, value, target=target))

    def drain(peer: Peer) -> float | None:
        return peer.drain

    against("drain, 1 worker", "jobs/s", drain, Target(">=", 1.3), "graphile")
    against("drain, 1 worker", "jobs/s", drain, Target(">=", 2.3), "pgqueuer_asyncpg")
    against("drain, 2 workers", "jobs/s", lambda peer: peer.drain_two, Target(">=", 1.2))
    against("enqueue one", "jobs/s", lambda peer: peer.enqueue, Target(">=", 1.0))
    against("enqueue many", "jobs/s", lambda peer: peer.enqueue_many, Target(">=", 1.8))
    against("WAL per job", "B", lambda peer: peer.wal, Target("<=", 1.4), "graphile")
    return found
