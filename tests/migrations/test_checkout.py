"""The commands of alembic.ini, as someone who works on the library runs them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.migrations.schema import ROOT, create_all, execute, marker, objects, pg_dump, run_script

pytestmark = pytest.mark.acceptance

CUSTOM_OPTIONS = ("-x", "schema=queue", "-x", "name=q")


def alembic(
    *arguments: str, url: str | None, directory: Path = ROOT, variable: str = "SA_JOBS_DATABASE_URL"
) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("SA_JOBS_DATABASE_URL", "DATABASE_URL")
    }
    if url is not None:
        environment[variable] = url
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "alembic", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=directory,
        env=environment,
    )


def succeed(*arguments: str, url: str | None, variable: str = "SA_JOBS_DATABASE_URL") -> str:
    """Run the command and return what it prints."""
    completed = alembic(*arguments, url=url, variable=variable)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


@pytest.mark.parametrize(
    "options", [(), ("-x", "schema=queue", "-x", "name=q"), ("-x", "schema=public")]
)
def test_up_check_down(options: tuple[str, ...], empty_database: str) -> None:
    succeed(*options, "upgrade", "head", url=empty_database)
    assert "No new upgrade operations" in succeed(*options, "check", url=empty_database)
    assert "(head)" in succeed(*options, "current", url=empty_database)
    succeed(*options, "downgrade", "base", url=empty_database)
    assert objects(empty_database) == set()


def test_check_sees_a_change(empty_database: str) -> None:
    succeed("upgrade", "head", url=empty_database)
    execute(
        empty_database,
        "ALTER TABLE sa_jobs DROP COLUMN tenant",
        "ALTER TABLE sa_jobs ALTER attempts SET DEFAULT 1",
        "DROP INDEX sa_jobs_dead_idx",
        "CREATE TABLE own (id int)",
    )

    completed = alembic("check", url=empty_database)

    assert completed.returncode != 0
    for name in ("tenant", "attempts", "sa_jobs_dead_idx"):
        assert name in completed.stdout + completed.stderr
    assert "own" not in completed.stdout + completed.stderr


def test_the_url_is_found_where_the_documentation_says(
    empty_database: str, another_database: str
) -> None:
    application = empty_database.replace("postgresql+psycopg://", "postgres://")
    succeed("upgrade", "head", url=application, variable="DATABASE_URL")
    assert marker(empty_database)

    other = another_database.replace("+psycopg", "+asyncpg")
    succeed("-x", f"url={other}", "upgrade", "head", url=application)
    assert pg_dump(another_database) == pg_dump(empty_database)


def test_without_a_url_one_line_says_what_to_set() -> None:
    completed = alembic("upgrade", "head", url=None)
    assert completed.returncode != 0
    assert "Traceback" not in completed.stderr
    assert "set SA_JOBS_DATABASE_URL or DATABASE_URL" in completed.stdout + completed.stderr


@pytest.mark.parametrize("options", [(), CUSTOM_OPTIONS])
def test_scripts_need_no_database_and_equal_the_commands(
    options: tuple[str, ...], empty_database: str, another_database: str
) -> None:
    up = succeed(*options, "upgrade", "head", "--sql", url=None)
    down = succeed(*options, "downgrade", "head:base", "--sql", url=None)
    succeed(*options, "upgrade", "head", url=another_database)

    run_script(empty_database, up)
    assert pg_dump(empty_database) == pg_dump(another_database)
    run_script(empty_database, down)
    assert objects(empty_database) == set()


def test_the_packaged_environment_needs_no_ini_file(tmp_path: Path, empty_database: str) -> None:
    ini = tmp_path / "alembic.ini"
    ini.write_text("[alembic]\nscript_location = sa_jobs:migrations\npath_separator = os\n")
    completed = alembic("-c", str(ini), "upgrade", "head", url=empty_database, directory=tmp_path)
    assert completed.returncode == 0, completed.stderr
    assert marker(empty_database)


def test_a_new_step_is_written_in_the_form_of_the_others(
    tmp_path: Path, empty_database: str
) -> None:
    for name in ("alembic", "sa_jobs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "alembic.ini", tmp_path)
    create_all(empty_database)
    execute(empty_database, "ALTER TABLE sa_jobs DROP COLUMN tenant")

    for command in (
        ("stamp", "head"),
        ("revision", "--autogenerate", "--rev-id", "sa_jobs_9999", "-m", "Add the tenant."),
    ):
        completed = alembic(*command, url=empty_database, directory=tmp_path)
        assert completed.returncode == 0, completed.stderr

    source = (tmp_path / "sa_jobs/migrations/versions/sa_jobs_9999.py").read_text()
    assert source.startswith('"""Add the tenant."""\n')
    assert 'revision = "sa_jobs_9999"\ndown_revision = "sa_jobs_0' in source
    assert "    # op.add_column('sa_jobs'" in source
    compile(source, "step", "exec")
