"""What PostgreSQL itself gives on this machine: a minimal table, through pgbench or bare psycopg.

L1: one row per commit. L2: 1 000 rows per statement. L4: claim a batch, finish it, each in its own
transaction. L6: from a notifying commit to a listener that has claimed the row.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.server import Database, Server

_TABLE = """\
DROP TABLE IF EXISTS minimal;
CREATE TABLE minimal (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    priority smallint NOT NULL DEFAULT 0,
    status smallint NOT NULL DEFAULT 0,
    run_at timestamptz NOT NULL DEFAULT now(),
    worker int,
    attempt smallint NOT NULL DEFAULT 0,
    started_at timestamptz,
    finished_at timestamptz,
    task text NOT NULL,
    payload jsonb NOT NULL
);
CREATE INDEX ON minimal (priority, id) WHERE status = 0"""

INSERT = """INSERT INTO minimal (task, payload) VALUES ('noop', '{"i": 1}')"""

_INSERT_MANY = """\
INSERT INTO minimal (task, payload)
SELECT 'noop', jsonb_build_object('i', i) FROM generate_series(1, {rows}) AS i;
"""

_CLAIM = """\
WITH candidate AS (
    SELECT id FROM minimal WHERE status = 0 ORDER BY priority, id LIMIT {batch}
    FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE minimal SET status = 1, worker = 1, attempt = attempt + 1, started_at = now()
    FROM candidate WHERE minimal.id = candidate.id
    RETURNING minimal.id, task, payload
)
"""

_CLAIM_AND_FINISH = (
    _CLAIM
    + """\
SELECT array_agg(id)::text AS ids, count(payload) AS n FROM claimed \\gset
UPDATE minimal SET status = 2, finished_at = now() WHERE id = ANY(:ids::bigint[]) AND status = 1;
"""
)


@dataclass(frozen=True)
class Limits:
    """The minimal table in a database of its own on the measured server."""

    server: Server
    database: Database

    @classmethod
    def of(cls, server: Server) -> Limits:
        """Make the database, in place of one that is there."""
        return cls(server, server.empty("limits"))

    def enqueue(self, transactions: int, *, clients: int = 1) -> float:
        """L1: return the rows per second of single inserts, each committed."""
        self.renew()
        script = f"{INSERT};"
        return pgbench(
            self.server,
            self.database,
            script,
            clients=clients,
            transactions=transactions // clients,
        )

    def enqueue_many(self, rows: int) -> float:
        """L2: return the rows per second of inserts of 1 000 rows."""
        self.renew()
        script = _INSERT_MANY.format(rows=1_000)
        rounds = max(1, rows // 1_000)
        return 1_000 * pgbench(self.server, self.database, script, transactions=rounds)

    def drain(self, jobs: int, *, clients: int = 1, batch: int = 100) -> float:
        """L4: return the jobs per second of claims and finishes of `batch` jobs."""
        self.renew(jobs)
        rounds = max(1, jobs // batch // clients)
        script = _CLAIM_AND_FINISH.format(batch=batch)
        return batch * pgbench(
            self.server, self.database, script, clients=clients, transactions=rounds
        )

    def pick_up(self, samples: int, interval: float) -> list[float]:
        """L6: return the seconds from each commit to the row in the listener's hands."""
        self.renew()
        claim = _CLAIM.format(batch=10) + "SELECT id, payload FROM claimed"
        finish = "UPDATE minimal SET status = 2, finished_at = now() WHERE id = ANY(%s)"
        seen: dict[int, float] = {}
        ready = threading.Event()
        ended = threading.Event()

        def serve() -> None:
            with self.database.connect() as connection:
                connection.execute("LISTEN minimal")
                connection.execute(claim)
                ready.set()
                while len(seen) < samples and not ended.is_set():
                    for _ in connection.notifies(timeout=1, stop_after=1):
                        pass
                    rows = connection.execute(claim).fetchall()
                    moment = time.monotonic()
                    seen.update((payload["i"], moment) for _, payload in rows)
                    if rows:
                        connection.execute(finish, [[job for job, _ in rows]])

        server = threading.Thread(target=serve, daemon=True)
        server.start()
        ready.wait()
        committed = []
        insert = (
            "WITH added AS (INSERT INTO minimal (task, payload) VALUES ('noop', %s::jsonb)"
            " RETURNING id) SELECT pg_notify('minimal', '') FROM added"
        )
        with self.database.connect() as connection:
            for job in range(samples):
                connection.execute(insert, [f'{{"i": {job}}}'])
                committed.append(time.monotonic())
                time.sleep(interval)
        server.join(5)
        ended.set()
        return [seen[job] - moment for job, moment in enumerate(committed) if job in seen]

    def renew(self, rows: int = 0) -> None:
        """Make the table anew, with so many rows to claim."""
        self.database.execute(_TABLE)
        if rows:
            self.database.execute(_INSERT_MANY.format(rows=rows))
        self.database.analyze()


def pgbench(
    server: Server,
    database: Database,
    script: str,
    *,
    clients: int = 1,
    transactions: int | None = None,
    seconds: int | None = None,
    settings: Mapping[str, str] | None = None,
) -> float:
    """Return the transactions per second of a script, so many on each client, or for so long."""
    length = f"--time={seconds}" if transactions is None else f"--transactions={transactions}"
    with tempfile.TemporaryDirectory(prefix="sa-jobs-pgbench-") as directory:
        file = Path(directory) / "script.sql"
        file.write_text(script)
        ended = subprocess.run(
            [
                server.program("pgbench"),
                "--no-vacuum",
                "--protocol=prepared",
                f"--file={file}",
                f"--client={clients}",
                f"--jobs={min(clients, os.cpu_count() or 1)}",
                length,
                "--host=127.0.0.1",
                f"--port={server.cluster.port}",
                "--username=postgres",
                database.name,
            ],
            env={
                **os.environ,
                "PGOPTIONS": " ".join(
                    f"-c {name}={value}" for name, value in (settings or {}).items()
                ),
            },
            capture_output=True,
            text=True,
            check=False,
        )
    found = re.search(r"^tps = ([\d.]+)", ended.stdout, re.MULTILINE)
    if ended.returncode or found is None:
        raise RuntimeError(f"pgbench failed:\n{ended.stdout}\n{ended.stderr}")
    return float(found[1])
