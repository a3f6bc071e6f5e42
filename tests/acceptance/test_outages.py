"""The database goes away and comes back: the same process works on, quietly meanwhile."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, NullPool, create_engine
from sqlalchemy.orm import Session

from tests.acceptance.app import jobs
from tests.support.looking import failures, job, starts_of, status, wait_until_done
from tests.support.postgres import Cluster
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

RECOVERY_SECONDS = 15.0
OUTAGE_SECONDS = 15.0


@pytest.fixture
def fresh(engine: Engine) -> Iterator[Engine]:
    """An engine that keeps no connection over a restart."""
    fresh = create_engine(engine.url, poolclass=NullPool)
    yield fresh
    fresh.dispose()


def add(engine: Engine, handler: str, count: int = 1, **payload: object) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, [payload] * count)
    return [entry.id for entry in added]


def works(engine: Engine) -> None:
    """See that a new job is done within the time for a recovery."""
    (job_id,) = add(engine, "quick")
    wait_until_done(engine, job_id, seconds=RECOVERY_SECONDS)
    assert job(engine, job_id).attempts == 1


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_the_same_process_works_on_after_crashes_of_the_server(
    cluster: Cluster, app_database: str, engine: Engine, fresh: Engine
) -> None:
    with WorkerProcess(app_database, lease=15) as worker:
        works(fresh)
        engine.dispose()
        # While it is idle.
        cluster.restart("immediate")
        works(fresh)
        # While jobs run.
        held = add(fresh, "sleep", 4, seconds=3.0)
        wait_until(lambda: all(starts_of(fresh, job_id) for job_id in held), "all have started")
        cluster.restart("immediate")
        works(fresh)
        for job_id in held:
            wait_until_done(fresh, job_id, seconds=RECOVERY_SECONDS)
        # Again and again.
        held += add(fresh, "sleep", 1, seconds=8.0)
        wait_until(lambda: starts_of(fresh, held[-1]), "it has started")
        for _ in range(5):
            cluster.restart("immediate")
            time.sleep(0.5)  # so that connections come back in between
        works(fresh)
        before = job(fresh, held[-1]).leased_until
        if status(fresh, held[-1]) == "running":
            wait_until(lambda: job(fresh, held[-1]).leased_until != before, "its lease is renewed")
        wait_until_done(fresh, held[-1], seconds=RECOVERY_SECONDS)
        assert worker.process.poll() is None
        assert "Traceback" not in worker.log

    assert [job(fresh, job_id).attempts for job_id in held] == [1] * 5
    assert [failures(fresh, job_id) for job_id in held] == [[]] * 5


def test_an_outage_floods_no_log_and_burns_no_cpu(
    cluster: Cluster, app_database: str, engine: Engine, fresh: Engine
) -> None:
    with WorkerProcess(app_database, lease=15) as worker:
        works(fresh)
        (held,) = add(fresh, "sleep", seconds=1.0)
        wait_until(lambda: starts_of(fresh, held), "it has started")
        engine.dispose()
        cluster.stop("immediate")
        try:
            lines, cpu = worker.log.count("\n"), cpu_seconds(worker.pid)
            time.sleep(OUTAGE_SECONDS)
            lines = worker.log.count("\n") - lines
            cpu = cpu_seconds(worker.pid) - cpu
        finally:
            cluster.start()
        works(fresh)
        wait_until_done(fresh, held)
        assert "Traceback" not in worker.log

    # A minute may take 60 lines and a second of CPU time.
    assert lines <= 60 * OUTAGE_SECONDS / 60
    assert cpu < 1.0 * OUTAGE_SECONDS / 60
    # Its end was written late, and is no failure.
    assert (job(fresh, held).attempts, failures(fresh, held)) == (1, [])
