"""How soon a worker process starts what was enqueued, and what it does while it cannot."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import enqueue, enqueue_many
from tests.support.gates import wait_until_asleep
from tests.support.looking import starts_of, status, wait_until_done
from tests.support.proxy import Proxy
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.concurrency, pytest.mark.slow]


def add(engine: Engine, handler: str) -> int:
    with Session(engine) as session, session.begin():
        return enqueue(session, handler).id


def test_of_a_thousand_jobs_under_load_hardly_one_starts_late(app_database: str) -> None:
    """Each of four clients waits for its job before it enqueues the next one.

    Meanwhile the same worker runs the jobs of another queue, which come in bursts.
    """
    engine = create_engine(app_database, pool_size=6)
    stop = threading.Event()

    def burden() -> None:
        while not stop.wait(0.3):
            with Session(engine) as session, session.begin():
                enqueue_many(session, "quick", [{}] * 25, queue="bulk")

    def rounds(client: int) -> list[float]:
        taken = []
        for _ in range(250):
            job_id = add(engine, "quick")
            wait_until_done(engine, job_id)
            with engine.connect() as connection:
                taken.append(
                    connection.execute(
                        text(
                            "SELECT extract(epoch FROM s.at - j.created_at)::float FROM sa_jobs j"
                            " JOIN starts s ON s.job_id = j.id WHERE j.id = :id"
                        ),
                        {"id": job_id},
                    ).scalar_one()
                )
        return taken

    options = ("--poll", "60", "--queue", "default", "--queue", "bulk")
    with (
        WorkerProcess(app_database, *options) as worker,
        ThreadPoolExecutor(5) as threads,
    ):
        worker.wait_until_ready()
        loading = threads.submit(burden)
        try:
            latencies = sorted(one for part in threads.map(rounds, range(4)) for one in part)
        finally:
            stop.set()
        loading.result()
    engine.dispose()

    late = [seconds for seconds in latencies if seconds >= 1.0]
    assert len(latencies) == 1000
    assert len(late) < 10, f"p99 is {latencies[989]:.3f} s, the longest is {latencies[-1]:.3f} s"


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@pytest.mark.parametrize("since", ["its start", "later"])
def test_a_worker_without_a_database_is_calm_and_then_awake(
    app_database: str, engine: Engine, since: str
) -> None:
    with (
        Proxy(app_database) as proxy,
        ExitStack() as stack,
    ):
        if since == "its start":
            proxy.refuse()
        worker = stack.enter_context(WorkerProcess(proxy.url, "--poll", "60"))
        if since == "later":
            worker.wait_until_ready()
            wait_until_asleep(engine)
            proxy.refuse()
            proxy.cut()
        wait_until(lambda: "trying again" in worker.log, "it says that it cannot connect")
        process = psutil.Process(worker.pid)
        began, used = time.monotonic(), cpu_seconds(process)
        in_the_gap = add(engine, "quick")
        time.sleep(3)
        share = (cpu_seconds(process) - used) / (time.monotonic() - began)
        assert status(engine, in_the_gap) == "ready"
        proxy.refuse(False)
        wait_until_done(engine, in_the_gap, seconds=15)
        wait_until_asleep(engine)
        awake = add(engine, "quick")
        wait_until_done(engine, awake)
        (start,) = starts_of(engine, awake)
        with engine.connect() as connection:
            enqueued_at = connection.execute(
                text("SELECT created_at FROM sa_jobs WHERE id = :id"), {"id": awake}
            ).scalar_one()
        assert (start.at - enqueued_at).total_seconds() <= 2
        assert worker.process.poll() is None
    assert share < 0.2
