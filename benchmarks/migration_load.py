"""What an application notices while its tables are upgraded: the longest insert, printed.

A step's index is built on a table of many jobs, once undisturbed and once after a build that was
killed; a step's column is added while another session holds a row lock. Inserts go on all along.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
from sqlalchemy import create_engine

import sa_jobs
from sa_jobs import migrations
from tests.support.postgres import Cluster, embedded_bin, system_bin

INSERTERS = 3
BEFORE_INDEX, WITH_INDEX = "sa_jobs_0002", "sa_jobs_0003"
BEFORE_COLUMN, WITH_COLUMN = "sa_jobs_0001", "sa_jobs_0002"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--server", choices=["embedded", "system"], default="embedded")
    arguments = parser.parse_args()
    programs = embedded_bin() if arguments.server == "embedded" else system_bin()
    if programs is None:
        sys.exit(f"there is no {arguments.server} PostgreSQL")
    with Cluster(programs, settings={"log_statement": "ddl", "max_wal_size": "4GB"}) as cluster:
        large_table(cluster, arguments.rows)
        killed_build(cluster, arguments.rows)
        held_lock(cluster)


def large_table(cluster: Cluster, rows: int) -> None:
    url = database(cluster, "large", BEFORE_INDEX, rows)
    with inserting(url) as report:
        time.sleep(2)
        report("before")
        seconds = run(url, WITH_INDEX)
        report(f"while the index is built on {rows:,} jobs, in {seconds:.1f} s")
    built = [line for line in cluster.log().splitlines() if "CREATE INDEX CONCURRENTLY" in line]
    print(f"    CREATE INDEX CONCURRENTLY in the server's log: {len(built)}")


def killed_build(cluster: Cluster, rows: int) -> None:
    url = database(cluster, "killed", BEFORE_INDEX, rows)
    with inserting(url) as report:
        migration = start(url, WITH_INDEX)
        wait_until(lambda: indexes(url)[1] > 0)
        migration.send_signal(signal.SIGKILL)
        migration.wait()
        # The server would go on to the end of the statement; so it is cut off there too.
        terminate_builds(url)
        valid, invalid = indexes(url)
        print(f"killed while it builds: {valid} valid indexes, {invalid} invalid")
        seconds = run(url, WITH_INDEX)
        report(f"while it is run again, in {seconds:.1f} s")
    valid, invalid = indexes(url)
    print(f"    afterwards: {valid} valid indexes, {invalid} invalid")


def held_lock(cluster: Cluster) -> None:
    url = database(cluster, "held", BEFORE_COLUMN, 100)
    with inserting(url) as report, psycopg.connect(libpq(url)) as holder:
        holder.execute("SELECT FROM sa_jobs LIMIT 1 FOR UPDATE")
        migration = start(url, WITH_COLUMN)
        began = time.monotonic()
        time.sleep(3)
        holder.rollback()
        held = time.monotonic() - began
        status = migration.wait()
        seconds = time.monotonic() - began
        report(
            f"while a row lock is held for {held:.1f} s, and the migration takes {seconds:.1f} s "
            f"(exit code {status})"
        )


def database(cluster: Cluster, name: str, step: str, rows: int) -> str:
    """Make a database whose tables are at a step and have many finished jobs."""
    url = cluster.create_database(name)
    migrations.apply(create_engine(url), step)
    with psycopg.connect(libpq(url)) as connection:
        connection.execute(
            "INSERT INTO sa_jobs (queue, handler, status, finished_at) SELECT 'mail', 'send',"
            " 'done', now() - i * interval '1 second' FROM generate_series(1, %s) AS i",
            [rows],
        )
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE sa_jobs")
        connection.execute("CHECKPOINT")
    return url


@contextmanager
def inserting(url: str) -> Iterator[Callable[[str], None]]:
    """Enqueue jobs from several threads meanwhile; the function prints what they have seen."""
    done = threading.Event()
    taken: list[float] = []

    def insert() -> None:
        engine = create_engine(url)
        while not done.is_set():
            began = time.perf_counter()
            with engine.begin() as connection:
                sa_jobs.enqueue(connection, "send", {"invoice": 1}, queue="mail")
            taken.append(time.perf_counter() - began)
            time.sleep(0.002)
        engine.dispose()

    def report(when: str) -> None:
        seen = sorted(taken)
        taken.clear()
        p99 = seen[int(len(seen) * 0.99)] * 1000
        print(
            f"{when}:\n    {len(seen):,} inserts, median {seen[len(seen) // 2] * 1000:.1f} ms, "
            f"99 % {p99:.0f} ms, longest {seen[-1] * 1000:.0f} ms"
        )

    threads = [threading.Thread(target=insert) for _ in range(INSERTERS)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        taken.clear()
        yield report
    finally:
        done.set()
        for thread in threads:
            thread.join()


def start(url: str, to: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sa_jobs", "db", "upgrade", "--to", to]
    environment = {**os.environ, "SA_JOBS_DATABASE_URL": url}
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


def run(url: str, to: str) -> float:
    began = time.monotonic()
    if status := start(url, to).wait():
        sys.exit(f"sa-jobs db upgrade ended with {status}")
    return time.monotonic() - began


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        if time.monotonic() > deadline:
            sys.exit("waited for two minutes in vain")
        time.sleep(0.01)


def indexes(url: str) -> tuple[int, int]:
    """Return how many of the indexes that the step makes are valid, and how many are not."""
    with psycopg.connect(libpq(url)) as connection:
        row = connection.execute(
            "SELECT count(*) FILTER (WHERE indisvalid), count(*) FILTER (WHERE NOT indisvalid)"
            " FROM pg_index WHERE indexrelid IN (to_regclass('sa_jobs_finished_idx'),"
            " to_regclass('sa_jobs_failures_failed_at_idx'))"
        ).fetchone()
    assert row is not None
    return row[0], row[1]


def terminate_builds(url: str) -> None:
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'CREATE INDEX%'"
        )


def libpq(url: str) -> str:
    return url.replace("+psycopg", "")


if __name__ == "__main__":
    main()
