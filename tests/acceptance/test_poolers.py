"""Workers, enqueuers and commands behind PgBouncer."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from sa_jobs import enqueue
from tests.support import pgbouncer
from tests.support.gates import open_gates, wait_until_asleep
from tests.support.looking import effects_of, starts_of, status, unfinished, wait_until_done
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import Server
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.concurrency,
    pytest.mark.skipif(pgbouncer.PROGRAM is None, reason=pgbouncer.MISSING),
]

POLLS = "it polls instead"

# What belongs to a session of the server's, as advisory locks do without xact in their name.
OF_A_SESSION = re.compile(
    r"(execute|statement: (PREPARE|EXECUTE)) _pg3_|PREPARE\b|\bLISTEN\b|pg_(try_)?advisory_lock"
    r"|set_config\([^)]*(false|\$\d)\)|statement: SET (?!LOCAL|TRANSACTION)|execute [^:]*: SET "
)


@contextmanager
def statements_logged(server: Server, engine: Engine, database_url: str) -> Iterator[list[str]]:
    """Give the statements of new connections to the database, once the block is left."""
    name = make_url(database_url).database
    with engine.begin() as connection:
        connection.execute(text(f"ALTER DATABASE {name} SET log_statement = 'all'"))
    start = len(server.cluster.log()) if server.cluster else 0
    lines: list[str] = []
    yield lines
    if server.cluster:
        log = server.cluster.log()[start:].splitlines()
        lines += [line for line in log if f"@{name} " in line]


def enqueue_some(url: str, count: int) -> list[int]:
    """Enqueue jobs one by one, every other one transactional, on an engine fit for a pooler."""
    engine = create_engine(url, connect_args={"prepare_threshold": None})
    ids = []
    for number in range(count):
        with Session(engine) as session, session.begin():
            ids.append(enqueue(session, "effect" if number % 2 else "quick").id)
    engine.dispose()
    return ids


def warnings(worker: WorkerProcess) -> list[str]:
    return [line for line in worker.log.splitlines() if re.search(r"WARNING|ERROR", line)]


def test_four_workers_behind_a_transaction_pooler_run_each_job_once(
    app_database: str, engine: Engine, server: Server
) -> None:
    with (
        statements_logged(server, engine, app_database) as statements,
        PgBouncer(app_database, "transaction", pool_size=5) as pool,
        ExitStack() as stack,
    ):
        workers = [stack.enter_context(WorkerProcess(pool.url)) for _ in range(3)]
        deaf = stack.enter_context(WorkerProcess(pool.url, "--no-listen"))
        for worker in (*workers, deaf):
            worker.wait_until_ready()
        with ThreadPoolExecutor(5) as threads:
            parts = threads.map(lambda _: enqueue_some(pool.url, 100), range(5))
            ids = [job_id for part in parts for job_id in part]
        wait_until(lambda: unfinished(engine) == 0, "all jobs end", seconds=60)
        for worker in workers:
            wait_until(lambda: POLLS in worker.log, "it says that it polls")  # noqa: B023
        assert open_gates(engine) == 0
        assert [worker.stop() for worker in (*workers, deaf)] == [0] * 4
        for worker in workers:
            (warning,) = warnings(worker)
            assert POLLS in warning
        assert warnings(deaf) == []
        assert not re.search("WARNING|ERROR|unclean", pool.log)

    assert len(ids) == 500
    with engine.connect() as connection:
        statuses = connection.execute(
            text("SELECT status, attempts, count(*) FROM sa_jobs GROUP BY 1, 2")
        ).all()
        assert [tuple(row) for row in statuses] == [("done", 1, 500)]
        for table, rows in (("starts", 500), ("effects", 250)):
            counted = text(f"SELECT count(*), count(DISTINCT job_id) FROM {table}")
            assert tuple(connection.execute(counted).one()) == (rows, rows)
    assert [line for line in statements if " ERROR: " in line or " FATAL: " in line] == []
    # PgBouncer itself passes on the names that clients have given themselves.
    assert [
        line
        for line in statements
        if OF_A_SESSION.search(line) and "SET application_name" not in line
    ] == []


def test_the_same_workers_go_on_when_the_pooler_comes_back(
    app_database: str, engine: Engine
) -> None:
    """This one also throws away all that a session has, after each transaction."""
    resets = {"server_reset_query": "DISCARD ALL", "server_reset_query_always": "1"}
    with (
        PgBouncer(app_database, "transaction", settings=resets) as pool,
        WorkerProcess(pool.url) as one,
        WorkerProcess(pool.url) as other,
    ):
        for worker in (one, other):
            worker.wait_until_ready()
        ids = enqueue_some(app_database, 100)
        wait_until(lambda: unfinished(engine) < 80, "they work")
        pool.kill()
        ids += enqueue_some(app_database, 20)
        pool.start()
        wait_until(lambda: unfinished(engine) == 0, "all jobs end", seconds=30)
        assert [one.process.poll(), other.process.poll()] == [None, None]

    assert {status(engine, job_id) for job_id in ids} == {"done"}
    assert {effects_of(engine, job_id) for job_id in ids[1::2]} == {1}


def test_with_a_direct_url_to_listen_on_an_enqueue_wakes_the_worker(
    app_database: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SA_JOBS_LISTEN_URL", app_database)
    with (
        PgBouncer(app_database, "transaction") as pool,
        WorkerProcess(pool.url, "--poll", "60") as worker,
    ):
        starts_at_once(engine, pool.url)
        assert warnings(worker) == []


def test_through_a_session_pooler_an_enqueue_wakes_the_worker(
    app_database: str, engine: Engine
) -> None:
    with (
        PgBouncer(app_database, "session", pool_size=20) as pool,
        WorkerProcess(pool.url, "--poll", "60") as worker,
    ):
        starts_at_once(engine, pool.url)
        assert warnings(worker) == []


def starts_at_once(engine: Engine, url: str) -> None:
    """Enqueue through a pool, and see that each job starts soon."""
    wait_until_asleep(engine)
    for _ in range(5):
        (job_id,) = enqueue_some(url, 1)
        wait_until_done(engine, job_id)
        (start,) = starts_of(engine, job_id)
        with engine.connect() as connection:
            enqueued_at = connection.execute(
                text("SELECT created_at FROM sa_jobs WHERE id = :id"), {"id": job_id}
            ).scalar_one()
        assert (start.at - enqueued_at).total_seconds() <= 2
        time.sleep(0.15)  # until the worker sleeps again


def test_an_url_to_listen_on_that_cannot_work_is_said_without_its_password(
    app_database: str, engine: Engine
) -> None:
    wrong = "postgresql://me:secret@word@127.0.0.1:1/nothing"
    with WorkerProcess(app_database, "--listen-url", wrong) as worker:
        wait_until(lambda: "listen: " in worker.log, "it says so")
        (job_id,) = enqueue_some(app_database, 1)
        wait_until_done(engine, job_id)
        assert worker.stop() == 0
        assert not re.search("secret|word@", worker.log)
        assert len(warnings(worker)) == 1
