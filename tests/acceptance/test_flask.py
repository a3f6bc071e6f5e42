"""A Flask application in real processes: its workers, a server that forks, and the reloader."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text

from sa_jobs import stats
from sa_jobs.models import Job
from tests.support.commands import ROOT
from tests.support.waiting import wait_until

pytest.importorskip("flask_sqlalchemy")

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

BIN = Path(sys.executable).parent

SHOP = """
import os
import signal
import time

from flask import Flask, current_app
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import text
from sqlalchemy.orm import DeclarativeBase, Session

from sa_jobs import Jobs, attach
from sa_jobs.flask import SAJobs


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
jobs = Jobs(attach(db.Model))
extension = SAJobs(jobs, db)


@jobs.handler("send", queue="mail")
def send(number: int, session: Session) -> str:
    assert session is db.session()
    return f"{current_app.name} sent {number}"


@jobs.handler("wait", queue="mail")
def wait(seconds: float) -> None:
    time.sleep(seconds)


def backend() -> int:
    return db.session.execute(text("SELECT pg_backend_pid()")).scalar_one()


def create_app() -> Flask:
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE_URL"]
    app.config.from_prefixed_env()
    db.init_app(app)
    extension.init_app(app)

    @app.post("/enqueue/<int:number>")
    def enqueue(number: int) -> dict[str, int]:
        seen = {backend()}
        for each in range(number):
            jobs.enqueue(db.session, send, {"number": each})
            seen.add(backend())
            db.session.commit()
        (only,) = seen
        return {"pid": os.getpid(), "backend": only}

    @app.post("/leave")
    def leave() -> dict[str, int]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"pid": os.getpid()}

    return app
"""


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The directory of the application."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


class Program:
    """A process of its own group, killed with all that it has started at the end of the block."""

    def __init__(self, *command: str, directory: Path, url: str, **variables: str) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        unset = ("SA_JOBS_DATABASE_URL", "DATABASE_URL")
        kept = {name: value for name, value in os.environ.items() if name not in unset}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=directory,
            env={**kept, "PYTHONPATH": str(ROOT), "SHOP_DATABASE_URL": url, **variables},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if kind is not None:
            sys.stderr.write(self.log)
        self._log.close()

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return os.pread(self._log.fileno(), 10_000_000, 0).decode()

    def wait_for(self, pattern: str, *, count: int = 1) -> list[Any]:
        """Wait until it has written something so often, and return what was found."""

        def found() -> list[Any]:
            matches = re.findall(pattern, self.log)
            assert len(matches) >= count or self.process.poll() is None, self.log
            return matches if len(matches) >= count else []

        return wait_until(found, f"{pattern!r} is written", seconds=60)

    def stop(self) -> int:
        """Ask it to end, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def post(port: str, path: str) -> dict[str, int]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: dict[str, int] = json.load(answer)
        return found


@contextmanager
def connected(engine: Engine) -> Iterator[Any]:
    with engine.connect() as connection:
        yield connection
        connection.rollback()


def results(engine: Engine) -> set[str]:
    with connected(engine) as connection:
        return set(connection.execute(select(Job.result).where(Job.status == "done")).scalars())


def workers(engine: Engine) -> int:
    with connected(engine) as connection:
        return len(stats.live_workers(connection))


def add(engine: Engine, number: int, **columns: object) -> None:
    with engine.begin() as connection:
        for each in range(number):
            values = {"queue": "mail", "handler": "send", "payload": {"number": each}, **columns}
            connection.execute(Job.__table__.insert().values(values))  # type: ignore[attr-defined]


def test_flask_jobs_worker_has_the_settings_and_options_that_win_and_drains(
    shop: Path, database_url: str, engine: Engine
) -> None:
    add(engine, 3)
    settings = {
        "FLASK_SA_JOBS_CONCURRENCY": "3",
        "FLASK_SA_JOBS_QUEUES": '["mail", "reports"]',
        # Whatever the environment names, the database is the application's.
        "DATABASE_URL": "postgresql://nobody@localhost:1/nowhere",
    }
    command = ("flask", "--app", "shop", "jobs", "worker", "--concurrency", "2")
    with Program(*command, directory=shop, url=database_url, **settings) as worker:
        worker.wait_for("serves queues mail, reports with 2 slots")
        wait_until(lambda: len(results(engine)) == 3, "all jobs are done")
        add(engine, 1, handler="wait", payload={"seconds": 2})
        wait_until(lambda: count(engine, "running") == 1, "the last one runs")
        assert worker.stop() == 0

    assert results(engine) >= {"shop sent 0", "shop sent 1", "shop sent 2"}
    assert count(engine, "done") == 4


def count(engine: Engine, status: str) -> int:
    with connected(engine) as connection:
        query = text("SELECT count(*) FROM sa_jobs WHERE status = :status")
        return int(connection.execute(query, {"status": status}).scalar_one())


def test_processes_of_a_worker_find_the_application_by_its_factory(
    shop: Path, database_url: str, engine: Engine
) -> None:
    """Without a URL, which is the application's to know, and with its settings."""
    add(engine, 20)
    command = ("sa_jobs", "worker", "shop:create_app", "--processes", "2")
    with Program(
        *command, directory=shop, url=database_url, FLASK_SA_JOBS_CONCURRENCY="2"
    ) as supervisor:
        supervisor.wait_for("serves queues mail with 2 slots", count=2)
        wait_until(lambda: count(engine, "done") == 20, "all jobs are done")
        wait_until(lambda: workers(engine) == 2, "both workers are seen")
        assert supervisor.stop() == 0


def test_a_wrong_setting_is_one_line_and_usage(shop: Path, database_url: str) -> None:
    ended = subprocess.run(
        [BIN / "sa-jobs-worker", "shop:create_app"],
        cwd=shop,
        env={
            **os.environ,
            "SHOP_DATABASE_URL": database_url,
            "FLASK_SA_JOBS_LEASE": "0",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines()[-1].startswith(
        "sa-jobs-worker: app.config, SA_JOBS_LEASE: lease must be from 1 to 86400 seconds"
    )
    assert "Traceback" not in ended.stderr


GUNICORN = """
bind = ["127.0.0.1:0"]
preload_app = True
workers = 4


def child_exit(server, worker):
    from preloaded import app, shop
    with app.app_context():
        print(f"the parent is at {shop.backend()} now", flush=True)
"""

PRELOADED = """
import shop

app = shop.create_app()
with app.app_context():
    print(f"the parent is at {shop.backend()} first", flush=True)
"""


def test_children_of_a_server_that_preloads_have_connections_of_their_own(
    shop: Path, database_url: str, engine: Engine
) -> None:
    pytest.importorskip("gunicorn")
    (shop / "preloaded.py").write_text(PRELOADED)
    (shop / "gunicorn.conf.py").write_text(GUNICORN)
    backends: dict[int, set[int]] = defaultdict(set)
    enqueued = 0
    with Program("gunicorn", "preloaded:app", directory=shop, url=database_url) as server:
        (port,) = server.wait_for(r"Listening at: http://127\.0\.0\.1:(\d+)")
        (parent,) = map(int, server.wait_for(r"the parent is at (\d+) first"))
        server.wait_for("Booting worker", count=4)

        def all_have_answered(children: int) -> bool:
            nonlocal enqueued
            with ThreadPoolExecutor(8) as clients:
                for answer in clients.map(lambda _: post(port, "/enqueue/25"), range(16)):
                    backends[answer["pid"]].add(answer["backend"])
                    enqueued += 25
            return len(backends) >= children

        wait_until(lambda: all_have_answered(4), "all four have answered", seconds=60)
        # One leaves early: what it had inherited must not go with it, and another takes its place.
        post(port, "/leave")
        (now,) = map(int, server.wait_for(r"the parent is at (\d+) now"))
        assert now == parent
        server.wait_for("Booting worker", count=5)
        wait_until(lambda: all_have_answered(5), "the new one has answered", seconds=60)
        assert server.stop() == 0
        assert "Error" not in server.log
        assert "Exception" not in server.log

    seen = [backend for each in backends.values() for backend in each]
    assert len(seen) == len(backends)
    assert len({*seen, parent}) == len(backends) + 1
    assert count(engine, "ready") == enqueued >= 800


def test_the_debug_reloader_restarts_an_application_that_enqueues(
    shop: Path, database_url: str, engine: Engine
) -> None:
    command = ("flask", "--app", "shop", "run", "--debug", "--port", "0")
    with Program(*command, directory=shop, url=database_url) as server:
        (port,) = server.wait_for(r"Running on http://127\.0\.0\.1:(\d+)")
        first = post(port, "/enqueue/2")
        (shop / "shop.py").write_text(SHOP + "\n# changed\n")
        # The port stays as it is.
        server.wait_for("Debugger is active", count=2)
        second = post(port, "/enqueue/3")

    assert first["pid"] != second["pid"]
    assert first["backend"] != second["backend"]
    assert count(engine, "ready") == 5
