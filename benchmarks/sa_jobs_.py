"""The runner of sa-jobs for the peers' harness, beside whose `common.py` a copy of it is put.

Its commands are those of the other runners there: meta, setup, enqueue1 N, bulk N, worker,
producer N MS.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from common import DSN, Timer, hit, main, produce
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import Session

from sa_jobs import Jobs, enqueue, enqueue_many, migrations

CONCURRENCY = int(os.environ.get("PB_CONC", "100"))

jobs = Jobs()


@jobs.handler("noop")
def noop(i: int) -> None:
    hit(i)


def engine() -> Engine:
    return create_engine(DSN.replace("postgresql://", "postgresql+psycopg://"))


def setup() -> None:
    migrations.apply(engine())


def one(database: Engine, number: int) -> None:
    with Session(database) as session:
        enqueue(session, "noop", {"i": number})
        session.commit()


def enqueue1(count: int) -> dict[str, Any]:
    database = engine()
    one(database, 0)
    with Timer() as timer:
        for number in range(count):
            one(database, number)
    return {"s": timer.s}


def bulk(count: int) -> dict[str, Any]:
    with Session(engine()) as session, Timer() as timer:
        enqueue_many(session, "noop", [{"i": number} for number in range(count)])
        session.commit()
    return {"s": timer.s}


def worker() -> None:
    # The command itself, in this process, so that the harness's signals reach it.
    folder = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
    os.environ["SA_JOBS_DATABASE_URL"] = DSN
    command = [sys.executable, "-m", "sa_jobs", "worker", "sa_jobs_:jobs"]
    options = ["--concurrency", str(CONCURRENCY), "--log-level", "warning"]
    os.execv(sys.executable, [*command, *options])


def producer(count: int, milliseconds: int) -> Any:
    database = engine()
    one(database, 0)
    return produce(count, milliseconds, lambda number: one(database, number))


def meta() -> dict[str, Any]:
    return {
        "settings": {
            "concurrency": CONCURRENCY,
            "log_level": "warning",
            "keeps": "finished rows",
            "bulk": "enqueue_many",
        },
        "unfinished_sql": "select exists (select from sa_jobs where status = 'ready')"
        " or exists (select from sa_jobs where status = 'running')",
        "seed_done_sql": "insert into sa_jobs (queue, handler, payload, status, attempts, claim_no,"
        " finished_at) select 'default', 'noop', '{\"i\": 1}', 'done', 1, 1, now()"
        " from generate_series(1, :n)",
        "n3": 50_000,
        "cap": 60,
    }


if __name__ == "__main__":
    main(
        meta=meta,
        setup=setup,
        enqueue1=enqueue1,
        bulk=bulk,
        worker=worker,
        producer=producer,
    )
