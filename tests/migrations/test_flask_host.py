"""A Flask application with Flask-Migrate, as its developer runs it: `flask db ...`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sa_jobs import migrations
from tests.migrations.schema import ROOT, marker, objects, pg_dump, run_psql

pytestmark = pytest.mark.acceptance

HEAD = migrations.revisions()[-1].revision

APP = """\
import os

from flask import Flask
from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sa_jobs


class Base(DeclarativeBase):
    pass


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
tables = sa_jobs.attach(db.Model)


class Order(db.Model):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


def create_app():
    app = Flask(__name__)
    app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["DATABASE_URL"]
    db.init_app(app)
    migrate.init_app(app, db)
    return app
"""


@dataclass
class FlaskHost:
    """An application in a directory of its own."""

    directory: Path
    url: str

    def db(self, *arguments: str) -> str:
        """Run `flask db ...`, and return what it prints."""
        completed = subprocess.run(
            [sys.executable, "-m", "flask", "--app", "app:create_app", "db", *arguments],
            cwd=self.directory,
            env={**os.environ, "DATABASE_URL": self.url, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    def newest_revision(self) -> str:
        files = sorted(self.directory.glob("migrations/versions/*.py"), key=os.path.getmtime)
        return files[-1].read_text()


@pytest.fixture
def host(tmp_path: Path, empty_database: str) -> FlaskHost:
    pytest.importorskip("flask_migrate")
    (tmp_path / "app.py").write_text(APP)
    host = FlaskHost(tmp_path, empty_database)
    host.db("init")
    return host


def test_its_own_commands_are_all_it_takes(
    host: FlaskHost, empty_database: str, another_database: str
) -> None:
    before = (host.directory / "migrations/env.py").read_text()

    host.db("migrate", "-m", "add job queue")
    host.db("upgrade")

    source = host.newest_revision()
    assert f"sa_jobs.migrations.upgrade({HEAD!r}, from_=None, schema=None" in source
    assert "create_table('orders'" in source
    assert "create_table('sa_jobs" not in source
    assert marker(empty_database) == [HEAD]
    assert "No new upgrade operations detected" in host.db("check")
    assert "No changes in schema detected" in host.db("migrate")
    assert host.db("heads").count("(head)") == 1
    assert (host.directory / "migrations/env.py").read_text() == before

    script = "".join(
        line + "\n"
        for line in host.db("upgrade", "--sql").splitlines()
        if not line.startswith("INFO")
    )
    assert "%%" not in script
    run_psql(another_database, script)
    assert pg_dump(another_database) == pg_dump(empty_database)

    host.db("downgrade", "base")
    assert objects(empty_database) == set()


def test_a_revision_may_be_written_without_a_database(host: FlaskHost, empty_database: str) -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "sa_jobs", "migrations", "new"],
        cwd=host.directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "migrations/versions/" in completed.stdout
    host.db("upgrade")
    assert marker(empty_database) == [HEAD]
