"""What notifications cost the host's commits: transactions a second with and without, printed.

64 sessions insert a row of the host's and enqueue, in one transaction; then with the job in one of
ten transactions. Once with a real worker, which sleeps only when it has found nothing for a while;
once in the worst case, as if a worker were always asleep, so that each transaction notifies.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from sa_jobs import Jobs, presence
from sa_jobs.models import DEFAULT_TABLES, metadata
from tests.support.postgres import Cluster, embedded_bin, system_bin
from tests.support.workers import WorkerProcess

APP = "benchmarks.notify_cost:jobs"

jobs = Jobs()
jobs.handler("noop")(lambda: None)

HOST_ROW = "INSERT INTO orders (email) VALUES ('somebody@example.org');\n"
JOB = "INSERT INTO sa_jobs (queue, handler, payload) VALUES ('default', 'noop', '{}');\n"
ALWAYS = f"BEGIN;\n{HOST_ROW}{JOB}COMMIT;\n"
# pgbench gives each transaction a number at random.
ONE_IN_TEN = (
    f"\\set number random(1, 10)\nBEGIN;\n{HOST_ROW}\\if :number = 1\n{JOB}\\endif\nCOMMIT;\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--transactions", type=int, default=300, help="of each session")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server", choices=["embedded", "system"], default="embedded")
    arguments = parser.parse_args()
    programs = embedded_bin() if arguments.server == "embedded" else system_bin()
    if programs is None:
        sys.exit(f"there is no {arguments.server} PostgreSQL")
    with Cluster(programs) as cluster:
        url = cluster.create_database("host")
        engine = create_engine(url)
        metadata.create_all(engine)
        with engine.begin() as connection:
            connection.execute(
                text("CREATE TABLE orders (id bigserial PRIMARY KEY, email text NOT NULL)")
            )
        engine.dispose()
        size = (cluster.bin_directory, url, arguments.sessions, arguments.transactions)
        for title, script in (("a job in each", ALWAYS), ("in one of ten", ONE_IN_TEN)):
            for worker, surroundings in (("real worker", worked), ("always asleep", asleep)):
                rates: dict[str, list[float]] = {"off": [], "on": []}
                with surroundings(url):
                    for _ in range(arguments.rounds):
                        for notify, found in rates.items():
                            empty(url)
                            found.append(measured(*size, script, notify))
                off, on = (statistics.median(rates[notify]) for notify in ("off", "on"))
                print(
                    f"{title}, {worker}: {off:,.0f}/s with notify off, {on:,.0f}/s on, "
                    f"{on / off:.0%}",
                    flush=True,
                )


def measured(
    programs: Path, url: str, sessions: int, transactions: int, script: str, notify: str
) -> float:
    """Return the transactions a second that pgbench does."""
    place = make_url(url)
    with tempfile.NamedTemporaryFile("w", suffix=".sql") as file:
        file.write(script)
        file.flush()
        done = subprocess.run(
            [
                programs / "pgbench",
                "--no-vacuum",
                "--protocol=prepared",
                f"--client={sessions}",
                "--jobs=2",
                f"--transactions={transactions}",
                f"--file={file.name}",
                str(place.database),
            ],
            env={
                **os.environ,
                "PGHOST": str(place.host),
                "PGPORT": str(place.port),
                "PGUSER": str(place.username),
                "PGOPTIONS": f"-c sa_jobs.notify={notify}",
            },
            capture_output=True,
            text=True,
            check=True,
        )
    rate = re.search(r"tps = ([\d.]+)", done.stdout)
    assert rate is not None, done.stdout
    return float(rate[1])


@contextmanager
def worked(url: str) -> Iterator[None]:
    """Run the jobs on a worker."""
    with WorkerProcess(url, "--poll", "1", app=APP) as worker:
        worker.wait_until_ready()
        yield


@contextmanager
def asleep(url: str) -> Iterator[None]:
    """Hold the queue's gate open, as a worker does that sleeps, and let one listen."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as holder, WorkerProcess(url, "--poll", "1", app=APP) as worker:
        holder.execute(presence.open_gates(DEFAULT_TABLES), {"queues": ["default"]})
        worker.wait_until_ready()
        yield
    engine.dispose()


def empty(url: str) -> None:
    execute(url, "TRUNCATE orders, sa_jobs CASCADE")


def execute(url: str, statement: str) -> None:
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(statement))
    engine.dispose()


if __name__ == "__main__":
    main()
