"""Workers of one release while a host goes over to the next one: they go on, or say why not."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time

import pytest
from sqlalchemy import NullPool, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import enqueue
from tests.hosts.application import FLASK, MODELS, PLAIN, Host, Layout, with_models
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import NEXT_STEP, Environment, Environments
from tests.hosts.test_chain import MANY_ROWS
from tests.migrations.schema import execute, marker

pytestmark = pytest.mark.hosts

# A handler whose effect is committed with its job.
JOBS = """\
from sqlalchemy import text
from sqlalchemy.orm import Session

from sa_jobs import Jobs

jobs = Jobs()


@jobs.handler("count", queue="count")
def count(number: int, session: Session) -> None:
    session.execute(text("INSERT INTO effects (number) VALUES (:number)"), {"number": number})
"""


def start_worker(host: Host, environment: Environment) -> subprocess.Popen[str]:
    return environment.start(
        "sa-jobs-worker",
        "shop_jobs:jobs",
        "--database-url",
        host.url,
        directory=host.directory,
        variables={"PYTHONPATH": str(host.directory)},
    )


def test_workers_of_both_releases_work_while_the_tables_are_upgraded(
    make_host: MakeHost, environments: Environments, empty_database: str
) -> None:
    this, following = environments.get(), environments.get("next")
    host = make_host(with_models(PLAIN, MODELS))
    (host.directory / "shop_jobs.py").write_text(JOBS)
    host.adopt()
    host.migrate("add job queue")
    host.upgrade()
    upgraded = host.in_environment(following)
    upgraded.migrate("upgrade job queue")
    # So large that the index is built while jobs are enqueued, claimed and finished.
    execute(empty_database, "CREATE TABLE effects (number bigint)", MANY_ROWS)

    engine = create_engine(empty_database, poolclass=NullPool)
    enough = threading.Event()
    enqueued = 0

    def produce() -> None:
        nonlocal enqueued
        while not enough.is_set():
            with Session(engine) as session:
                enqueue(session, "count", {"number": enqueued}, queue="count")
                session.commit()
            enqueued += 1
            time.sleep(0.005)

    producer = threading.Thread(target=produce)
    producer.start()
    workers = [start_worker(host, this)]
    try:
        wait_for_effects(empty_database, 20)
        upgraded.upgrade()
        assert marker(empty_database) == [NEXT_STEP]
        wait_for_effects(empty_database, enqueued + 20)
        workers.append(start_worker(host, following))
        workers.append(start_worker(host, this))
        wait_for_rows(empty_database, "sa_jobs_workers", 3)
        wait_for_effects(empty_database, enqueued + 20)
        # The old ones leave, the new one stays.
        for worker in (workers[0], workers[2]):
            stop(worker)
        wait_for_effects(empty_database, enqueued + 20)
        enough.set()
        producer.join()
        wait_for_effects(empty_database, enqueued)
        stop(workers[1])
    finally:
        enough.set()
        producer.join()
        for worker in workers:
            worker.kill()
            worker.communicate()

    with engine.connect() as connection:
        numbers = connection.scalars(text("SELECT number FROM effects ORDER BY number")).all()
        assert list(numbers) == list(range(enqueued))
        rest = connection.execute(
            text(
                "SELECT count(*) FILTER (WHERE status <> 'done'), count(*) FILTER"
                " (WHERE attempts <> 1), (SELECT count(*) FROM sa_jobs_failures)"
                " FROM sa_jobs WHERE queue = 'count'"
            )
        ).one()
        assert tuple(rest) == (0, 0, 0)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(PLAIN, "alembic"), (FLASK, "flask db"), (PLAIN, "sa-jobs db")],
    ids=["plain", "flask", "without-a-chain"],
)
def test_a_worker_that_cannot_work_on_the_tables_names_what_to_run(
    layout: Layout,
    kind: str,
    make_host: MakeHost,
    environments: Environments,
    empty_database: str,
) -> None:
    host = make_host(layout)
    (host.directory / "shop_jobs.py").write_text(JOBS)
    host.adopt()
    upgraded = host.in_environment(environments.get("breaking"))

    # Without tables, then with those of the release before.
    for place in (host, upgraded):
        for command in re.findall(rf"`({kind} [^`]*)`", refused(place)):
            run(place, command)

    worker = start_worker(upgraded, upgraded.environment)
    try:
        wait_for_rows(empty_database, "sa_jobs_workers", 1)
        stop(worker)
    finally:
        worker.kill()
        worker.communicate()
    assert marker(empty_database) == [NEXT_STEP]

    # A worker of the release before has to be replaced.
    assert "run `pip install --upgrade sa-jobs`" in refused(host)


def refused(host: Host) -> str:
    """Start a worker, which must end at once, and return what it says."""
    worker = start_worker(host, host.environment)
    out, error = worker.communicate(timeout=60)
    assert worker.returncode == 1, (out, error)
    (line,) = error.splitlines()
    return line


def run(host: Host, command: str) -> None:
    """Run a command that an error named."""
    program, *arguments = command.split()
    if program == "sa-jobs":
        host.command(program, *arguments, "--database-url", host.url)
    else:
        # As a module, with the application that FLASK_APP would name.
        host.ok(*arguments[1 if program == "flask" else 0 :])


def wait_for_effects(url: str, count: int) -> None:
    """Wait until that many jobs have had their effect."""
    wait_for_rows(url, "effects", count)


def wait_for_rows(url: str, table: str, count: int) -> None:
    """Wait until a table has that many rows."""
    with create_engine(url, poolclass=NullPool).connect() as connection:
        for _ in range(2400):
            if (connection.scalar(text(f"SELECT count(*) FROM {table}")) or 0) >= count:
                return
            connection.rollback()
            time.sleep(0.05)
    raise AssertionError(f"{table} never had {count} rows")


def stop(worker: subprocess.Popen[str]) -> None:
    """Stop a worker, which must end well."""
    worker.send_signal(signal.SIGTERM)
    output = worker.communicate(timeout=60)
    assert worker.returncode == 0, output
