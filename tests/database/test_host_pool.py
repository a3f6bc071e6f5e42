"""The connections in the host's pool: nothing of ours stays on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import Jobs, cancel, enqueue, enqueue_many, retry, stats
from sa_jobs.cli import main
from sa_jobs.worker.worker import Worker
from tests.support.jobs import add
from tests.support.running import SHORT, running
from tests.support.waiting import wait_until

POOL_SIZE = 3


@pytest.fixture
def jobs() -> Jobs:
    """Handlers of which one works through the host's own pool."""
    jobs = Jobs()

    @jobs.handler("counts")
    def counts(session: Session) -> int:
        return int(session.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one())

    jobs.handler("fails", max_attempts=1)(lambda: 1 / 0)
    return jobs


@pytest.fixture
def host(database_url: str) -> Iterator[Engine]:
    """A host's engine, small, with settings of the host's own on each connection."""
    engine = create_engine(
        database_url,
        pool_size=POOL_SIZE,
        max_overflow=0,
        pool_timeout=20,
        connect_args={
            "application_name": "the host",
            "options": "-c statement_timeout=54321 -c lock_timeout=4321 -c TimeZone=Asia/Tokyo",
        },
    )
    yield engine
    engine.dispose()


def sessions(engine: Engine) -> dict[tuple[int, str], Any]:
    """Check out every connection of the pool; return by process and kind what there is to each."""
    with ExitStack() as stack:
        connections = [stack.enter_context(engine.connect()) for _ in range(POOL_SIZE)]
        found: dict[tuple[int, str], Any] = {}
        for connection in connections:
            driver: Any = connection.connection.driver_connection
            asked: dict[str, Any] = {
                name: connection.execute(text(query)).all() for name, query in LEFT.items()
            }
            asked["driver"] = (
                driver.autocommit,
                driver.isolation_level,
                driver.prepare_threshold,
                driver.read_only,
            )
            found |= {(driver.info.backend_pid, name): rows for name, rows in asked.items()}
        return found


LEFT = {
    "listening": "SELECT pg_listening_channels()",
    # Those of plpgsql come with the first trigger that runs.
    "settings": """
        SELECT string_agg(name || '=' || setting, E'\\n' ORDER BY name) FROM pg_settings
        WHERE name NOT LIKE 'plpgsql.%'
    """,
    "ours": "SELECT nullif(current_setting('sa_jobs.notify', true), '')",
    "locks": "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()",
    "isolation": "SHOW transaction_isolation",
    "temporary": "SELECT relname FROM pg_class WHERE relpersistence = 't'",
}


def worker_started_and_stopped(host: Engine, jobs: Jobs) -> None:
    with running(host, jobs, concurrency=POOL_SIZE) as worker:
        wait_until(lambda: worker.worker.subscriptions, "it listens")
        with Session(host) as session, session.begin():
            jobs.enqueue_many(session, "counts", [{}] * 6)
            jobs.enqueue(session, "fails")
        wait_until(lambda: all_ended(host), "all jobs end")


def one_shot_drain(host: Engine, jobs: Jobs) -> None:
    with Session(host) as session, session.begin():
        jobs.enqueue_many(session, "counts", [{}] * 6)
    assert Worker(host, jobs, **{**SHORT, "concurrency": POOL_SIZE}).run_until_empty() == 0


def calls_in_the_hosts_sessions(host: Engine, jobs: Jobs) -> None:
    with Session(host) as session, session.begin():
        first = enqueue(session, "counts", idempotency_key="k")
        enqueue(session, "counts", idempotency_key="k")
        enqueue_many(session, "counts", [{}] * 3)
        cancel(session, first.id)
        retry(session, first.id)
        stats.queue_depths(session)
    with Session(host) as session:
        enqueue(session, "counts")
        session.rollback()
    with Session(host, twophase=True) as session:
        enqueue(session, "counts")
        session.commit()


def commands(host: Engine, jobs: Jobs) -> None:
    with host.connect() as connection:
        dead, ready = (str(add(connection, status=status)) for status in ("dead", "ready"))
    url = ("--database-url", host.url.render_as_string(hide_password=False))
    for command in (
        ("status",),
        ("enqueue", "counts"),
        ("list",),
        ("show", dead),
        ("retry", dead),
        ("cancel", ready),
        ("db", "check"),
        ("db", "current"),
        ("db", "upgrade"),
        ("db", "build-indexes"),
        ("db", "downgrade", "--to", "sa_jobs_0002"),
        ("db", "upgrade", "--concurrently", "always"),
    ):
        assert main([*command, *url]) == 0, command
    for command in (("migrations", "list"), ("migrations", "sql")):
        assert main(list(command)) == 0, command


def all_ended(host: Engine) -> bool:
    with host.connect() as connection:
        left = text("SELECT count(*) FROM sa_jobs WHERE status IN ('ready', 'running')")
        return not connection.execute(left).scalar_one()


@pytest.mark.parametrize(
    "use",
    [worker_started_and_stopped, one_shot_drain, calls_in_the_hosts_sessions, commands],
)
def test_nothing_of_ours_is_left_on_the_hosts_connections(
    host: Engine, jobs: Jobs, use: Callable[[Engine, Jobs], None], tmp_path: Path
) -> None:
    before = sessions(host)
    assert {kind: rows for (_, kind), rows in before.items() if kind == "listening"} == {
        "listening": []
    }

    use(host, jobs)

    assert sessions(host) == before
