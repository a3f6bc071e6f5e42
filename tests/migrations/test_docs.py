"""The commands of the pages about migrations, run as a reader would, in a host of each kind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy.engine import make_url

from sa_jobs import migrations
from tests.migrations.schema import ROOT, libpq
from tests.migrations.test_flask_host import APP
from tests.support.postgres import embedded_bin, system_bin

pytestmark = pytest.mark.acceptance

FIRST = migrations.revisions()[0].revision
HEAD = migrations.revisions()[-1].revision

MODELS = """\
from sqlalchemy.orm import DeclarativeBase
import sa_jobs

class Base(DeclarativeBase):
    pass

tables = sa_jobs.attach(Base)
"""

ENV = """\
from alembic import context
from sqlalchemy import create_engine
from sa_jobs.urls import database_url
from models import Base

def configure(**options):
    context.configure(target_metadata=Base.metadata, **options)
    with context.begin_transaction():
        context.run_migrations()

if context.is_offline_mode():
    configure(dialect_name="postgresql", literal_binds=True)
else:
    with create_engine(database_url(None)).connect() as connection:
        configure(connection=connection)
"""

# What each page takes for granted: the step of the chain and of the database, None for neither.
PAGES: dict[str, tuple[str | None, str | None]] = {
    "adopt": (None, None),
    "upgrade": (FIRST, FIRST),
    "downgrade": (HEAD, HEAD),
    "offline-sql": (HEAD, None),
    "schema-and-name": (None, None),
    "zero-downtime": (HEAD, FIRST),
    "without-alembic": (None, None),
    "branch-mode": (None, None),
    "troubleshooting": (HEAD, HEAD),
}


@dataclass
class Reader:
    """Somebody in the directory of an application, with a shell."""

    directory: Path
    url: str

    def run(self, command: str) -> str:
        programs = [str(Path(sys.executable).parent)]
        programs += [str(found) for found in (embedded_bin(), system_bin()) if found]
        ended = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=self.directory,
            env={
                **{name: value for name, value in os.environ.items() if "SA_JOBS" not in name},
                "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
                "PYTHONPATH": os.pathsep.join([str(self.directory), str(ROOT)]),
                "FLASK_APP": "app:create_app",
                # What deployments have, and libpq's programs take.
                "DATABASE_URL": libpq(self.url),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, f"$ {command}\n{ended.stdout}{ended.stderr}"
        return ended.stdout + ended.stderr


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """Yield the code blocks of a page, as (language, text)."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    for language, block in re.findall(r"(?ms)^ *```(\w+)\n(.*?)^ *```$", text):
        yield language, textwrap.dedent(block)


def paragraphs(page: str) -> list[str]:
    """Return the paragraphs of a page, and the rows of its tables."""
    return re.split(r"\n\n|\n(?=\|)", (ROOT / "docs" / f"{page}.md").read_text())


def commands(block: str) -> list[str]:
    return [line[2:] for line in block.splitlines() if line.startswith("$ ")]


def is_for_flask(block: str) -> bool:
    return any(command.startswith("flask ") for command in commands(block))


@pytest.fixture
def plain(tmp_path: Path, empty_database: str) -> Reader:
    reader = Reader(tmp_path, empty_database)
    (tmp_path / "models.py").write_text(MODELS)
    reader.run("alembic init migrations")
    (tmp_path / "migrations/env.py").write_text(ENV)
    return reader


@pytest.fixture
def flask(tmp_path: Path, empty_database: str) -> Reader:
    pytest.importorskip("flask_migrate")
    url = make_url(empty_database).set(drivername="postgresql+psycopg")
    reader = Reader(tmp_path, url.render_as_string(False))
    (tmp_path / "app.py").write_text(
        APP.replace('os.environ["DATABASE_URL"]', "database_url(None)").replace(
            "import sa_jobs\n", "import sa_jobs\nfrom sa_jobs.urls import database_url\n"
        )
    )
    reader.run("flask db init")
    return reader


def prepare(reader: Reader, page: str) -> None:
    chain, database = PAGES[page]
    if chain is not None:
        reader.run(f"sa-jobs migrations new --to {chain}")
    if database is not None:
        reader.run(f"sa-jobs db upgrade --to {database}")
        if chain == database:
            upgrade = "flask db" if (reader.directory / "app.py").exists() else "alembic"
            reader.run(f"{upgrade} upgrade head")


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page: str, plain: Reader) -> None:
    prepare(plain, page)
    for language, block in blocks(page):
        named = re.match(r"# (\S+\.\w+)\n", block)
        if language != "console" and named is not None:
            (plain.directory / named[1]).write_text(block)
        elif language == "console" and not is_for_flask(block):
            exported = ""
            for command in commands(block):
                if command.startswith("export "):
                    exported = f"{command}; "
                elif not command.startswith("pip "):
                    plain.run(exported + command)


def test_autogenerate_beside_the_branch_leaves_the_tables_alone(plain: Reader) -> None:
    (ini,) = [block for language, block in blocks("branch-mode") if language == "ini"]
    models, env = plain.directory / "models.py", plain.directory / "migrations/env.py"
    plain.run('alembic revision -m "first" --rev-id first')
    (plain.directory / "alembic.ini").write_text(ini)
    plain.run("alembic upgrade heads")
    generate = "alembic revision --autogenerate --head first --rev-id"
    assert "drop_table" not in plain.run(f"{generate} a && cat migrations/versions/a_*.py")
    plain.run("rm migrations/versions/a_*.py")

    models.write_text(MODELS.replace("tables = sa_jobs.attach(Base)\n", ""))
    env.write_text(
        "import sa_jobs.alembic\n"
        + ENV.replace(
            "Base.metadata,", "Base.metadata, include_name=sa_jobs.alembic.include_name(),"
        )
    )
    assert "drop_table" not in plain.run(f"{generate} b && cat migrations/versions/b_*.py")
    assert "a branch of the chain" in plain.run("sa-jobs migrations check")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(is_for_flask(block) for _, block in blocks(page))]
)
def test_the_commands_for_flask_work(page: str, flask: Reader) -> None:
    prepare(flask, page)
    for _, block in blocks(page):
        if is_for_flask(block):
            for command in commands(block):
                if not command.startswith("pip "):
                    flask.run(command)


def test_a_page_that_calls_the_alembic_module_imports_it() -> None:
    # `import sa_jobs` does not load it, so a call alone would be an AttributeError.
    calling = [line for page in PAGES for line in paragraphs(page) if "sa_jobs.alembic." in line]
    assert len(calling) >= 2
    for paragraph in calling:
        assert "`import sa_jobs.alembic`" in paragraph, paragraph


def test_every_page_about_migrations_is_run() -> None:
    assert {page for page in PAGES if list(blocks(page))} == set(PAGES)
    for page in PAGES:
        for link in re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs" / f"{page}.md").read_text()):
            assert (ROOT / "docs" / link).exists()
