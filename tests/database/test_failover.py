"""A server that lets nobody write or nobody in, and the way to another one."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker, WorkerError
from sa_jobs.worker import recovery
from tests.support.faults import kill_backends
from tests.support.looking import failures, job, wait_until_done
from tests.support.postgres import Cluster
from tests.support.proxy import Proxy
from tests.support.running import SHORT, RunningWorker, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    return jobs


def add(engine: Engine, jobs: Jobs, handler: str) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler).id


@contextmanager
def read_only(cluster: Cluster) -> Iterator[None]:
    """Let the server refuse all writes for the block, as one that has become a standby does."""
    engine = create_engine(cluster.url(), poolclass=NullPool, isolation_level="AUTOCOMMIT")

    def set_to(value: str) -> None:
        with engine.connect() as connection:
            connection.execute(text("SET default_transaction_read_only = off"))
            connection.execute(text(f"ALTER SYSTEM SET default_transaction_read_only = {value}"))
            connection.execute(text("SELECT pg_reload_conf()"))

    set_to("on")
    try:
        yield
    finally:
        set_to("DEFAULT")


def test_a_read_only_server_is_a_lost_connection(
    cluster: Cluster, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    def backend(role: str) -> int | None:
        with engine.connect() as connection:
            pid: int | None = connection.execute(
                text(
                    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = :name"
                ),
                {"name": f"sa-jobs {role}"},
            ).scalar()
            return pid

    held = add(engine, jobs, "waits")
    with running(engine, jobs, lease=30, heartbeat=1):
        wait_until(lambda: job(engine, held).status == "running", "it runs")
        roles = ("claim", "heartbeat", "sweep")
        wait_until(lambda: all(backend(role) for role in roles), "all connections are there")
        before = {role: backend(role) for role in roles}
        with read_only(cluster):
            for role in roles:
                # The next one is there for as long as it takes to see that it is read-only, too.
                wait_until(
                    lambda role=role: backend(role) != before[role],  # type: ignore[misc]
                    f"{role} looks for another server",
                )
            go.set()
        wait_until_done(engine, held, seconds=15)
        wait_until_done(engine, add(engine, jobs, "noop"), seconds=15)

    assert (job(engine, held).attempts, failures(engine, held)) == (1, [])
    lines = [line for line in caplog.messages if "trying again" in line]
    assert 3 <= len(lines) <= 4
    assert all("read-only transaction" in line for line in lines)


def test_the_next_of_several_hosts_is_taken(engine: Engine, database_url: str, jobs: Jobs) -> None:
    """The first one accepts, and never answers; then it is away altogether."""
    with Proxy(database_url) as first, Proxy(database_url) as second:
        ports = [make_url(proxy.url).port for proxy in (first, second)]
        hosts = "&".join(f"host=127.0.0.1:{port}" for port in ports)
        url = f"postgresql+psycopg://postgres@/{engine.url.database}?{hosts}"
        several = create_engine(f"{url}&target_session_attrs=read-write", poolclass=NullPool)
        with running(several, jobs, lease=30, heartbeat=1, answer=1.0):
            wait_until_done(engine, add(engine, jobs, "noop"))
            assert first.count("sa-jobs claim") == 1
            first.refuse()
            first.cut()
            wait_until_done(engine, add(engine, jobs, "noop"), seconds=15)
            assert second.count("sa-jobs claim") == 1

    with socket.create_server(("127.0.0.1", 0)) as silent:
        hosts = f"host=127.0.0.1:{silent.getsockname()[1]}&host={engine.url.host}:{engine.url.port}"
        url = f"postgresql+psycopg://postgres@/{engine.url.database}?{hosts}"
        several = create_engine(url, poolclass=NullPool)
        with running(several, jobs, lease=30, heartbeat=1, answer=1.0):
            # 2 s for the first, which is the least that libpq waits for.
            wait_until_done(engine, add(engine, jobs, "noop"), seconds=15)


@pytest.fixture
def refusable(engine: Engine) -> Iterator[tuple[Engine, str]]:
    """An engine for a role of its own that may work on the tables, and the role's name."""
    role = f"role_{engine.url.database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN SUPERUSER"))
    other = create_engine(engine.url.set(username=role), poolclass=NullPool)
    yield other, role
    with engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def refuse(engine: Engine, role: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(f"ALTER ROLE {role} NOLOGIN"))
    kill_backends(str(engine.url), "sa-jobs %")


def test_a_role_that_is_refused_for_a_while_is_waited_for(
    engine: Engine, refusable: tuple[Engine, str], jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    other, role = refusable
    with running(other, jobs):
        wait_until_done(engine, add(engine, jobs, "noop"))
        refuse(engine, role)
        wait_until(lambda: "is not permitted to log in" in caplog.text, "it is refused")
        with engine.begin() as connection:
            connection.execute(text(f"ALTER ROLE {role} LOGIN"))
        wait_until_done(engine, add(engine, jobs, "noop"), seconds=15)


@pytest.mark.parametrize("when", ["while it works", "at the start"])
def test_a_role_that_is_refused_for_too_long_ends_the_worker(
    engine: Engine,
    refusable: tuple[Engine, str],
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    monkeypatch.setattr(recovery, "REFUSED_SECONDS", 2.0)
    other, role = refusable
    if when == "at the start":
        refuse(engine, role)
    worker = RunningWorker(Worker(other, jobs, **SHORT))
    if when == "while it works":
        wait_until_done(engine, add(engine, jobs, "noop"))
        refuse(engine, role)
    worker.join()

    assert isinstance(worker.error, WorkerError)
    assert "the server has refused the worker for" in str(worker.error)
    assert "check the user, the password and the database" in str(worker.error)


@pytest.mark.parametrize("when", ["while it works", "at the start"])
def test_a_listener_that_is_refused_for_too_long_lets_the_worker_poll(
    engine: Engine,
    refusable: tuple[Engine, str],
    jobs: Jobs,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    when: str,
) -> None:
    monkeypatch.setattr(recovery, "REFUSED_SECONDS", 1.0)
    other, role = refusable
    if when == "at the start":
        refuse(engine, role)
    with running(engine, jobs, listen_engine=other) as worker:
        if when == "while it works":
            wait_until(lambda: worker.worker.subscriptions == 1, "it listens")
            refuse(engine, role)
        wait_until(lambda: "it polls instead" in caplog.text, "it says so")
        wait_until_done(engine, add(engine, jobs, "noop"))
    said = [record.message for record in caplog.records if "it polls instead" in record.message]

    assert worker.code == 0
    assert len(said) == 1
    assert "the server has refused the worker for" in said[0]
    assert "--listen-url" in said[0]


def test_a_name_that_no_longer_resolves_is_waited_for(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = create_engine("postgresql+psycopg://nobody@sa-jobs.invalid/nothing")
    worker = RunningWorker(Worker(nowhere, jobs, **SHORT))
    wait_until(lambda: "start: " in caplog.text, "it says so")
    assert worker.stop() == 0
