"""The wheel itself, and what it does in environments that need no host for it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.hosts.application import CLEAN, MODELS, PLAIN, Layout, with_models
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import NEXT_STEP, THIS_STEP, Environments, steps
from tests.migrations.schema import marker, objects, pg_dump

pytestmark = pytest.mark.hosts


def test_the_wheel_holds_the_steps_and_the_package_alone(environments: Environments) -> None:
    with zipfile.ZipFile(environments.wheel()) as wheel:
        names = wheel.namelist()
        (entry_points,) = [name for name in names if name.endswith("/entry_points.txt")]
        groups = wheel.read(entry_points).decode()

    found = [Path(name).stem for name in names if "migrations/versions/sa_jobs_" in name]
    assert sorted(found) == steps()
    (distribution,) = {name.partition("/")[0] for name in names} - {"sa_jobs", "sa_jobs_pytest.py"}
    assert distribution.endswith(".dist-info")
    assert "sa_jobs/py.typed" in names
    # In releases of Alembic before 1.20.1, a plug-in's entry point breaks `import alembic`.
    assert "alembic" not in groups


def test_pip_installs_it_into_a_new_environment(environments: Environments, tmp_path: Path) -> None:
    """With the dependencies that it names itself, as a user has it."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-compile", environments.wheel()], check=True)
    subprocess.run([*pip, "check"], check=True)

    program = "import alembic, sa_jobs; print(sa_jobs.__file__)"
    place = subprocess.check_output([python, "-c", program], text=True, cwd=tmp_path)
    assert place.startswith(str(tmp_path))
    listed = subprocess.check_output(
        [python.with_name("sa-jobs"), "migrations", "list"], text=True, cwd=tmp_path
    )
    assert THIS_STEP in listed


def test_a_host_without_alembic_then_takes_it_up(
    make_host: MakeHost, environments: Environments, empty_database: str
) -> None:
    """The commands of the package need no ini file, and a chain goes on from where they ended."""
    host = make_host()
    host.migrate("invoices")
    host.upgrade()
    url = ("--database-url", empty_database)
    host.command("sa-jobs", "db", "upgrade", *url)
    made = pg_dump(empty_database)
    assert marker(empty_database) == [THIS_STEP]

    host.adopt()
    host.check()

    # A deploy elsewhere needs the revision all the same, which does nothing here.
    host.command("sa-jobs", "migrations", "new", "--directory", "migrations")
    assert len(host.revisions) == 2
    host.upgrade()
    assert pg_dump(empty_database) == made
    host.check()

    host = host.in_environment(environments.get("next"))
    assert f"from_={THIS_STEP!r}" in host.migrate("upgrade job queue")
    host.upgrade()
    assert marker(empty_database) == [NEXT_STEP]
    host.command("sa-jobs", "db", "check", *url)
    host.ok("downgrade", "base")
    assert objects(empty_database) == set()


SQLITE = with_models(
    PLAIN,
    MODELS.replace(
        "# here\n",
        """\
class Elsewhere(DeclarativeBase):
    pass


# here
""",
    ),
    attach="sa_jobs.attach(Elsewhere)",
)


def test_a_sqlite_host_is_unaffected(make_host: MakeHost, tmp_path: Path) -> None:
    """Its other database has the queue, so that the package is at work in its commands."""
    host = make_host(SQLITE, url=f"sqlite:///{tmp_path}/shop.db")
    host.adopt()

    source = host.migrate("invoices")
    host.upgrade()

    assert "create_table('invoices'" in source
    assert "sa_jobs" not in source
    host.check()
    host.ok("downgrade", "base")
    host.upgrade()
    assert CLEAN in host.ok("check")
    host.assert_untouched()


def test_a_newer_revision_of_the_host_than_the_package(
    make_host: MakeHost, environments: Environments, empty_database: str
) -> None:
    """The host was deployed with an older package than its chain was made with."""
    newer = make_host(Layout(), environment=environments.get("next"))
    newer.adopt()
    newer.migrate("add job queue")
    host = newer.in_environment(environments.get())

    ended = host.run("upgrade", "head")

    assert ended.code != 0
    assert f"the step {NEXT_STEP!r} needs a newer sa-jobs" in ended.error.splitlines()[-1]
    assert "Traceback" not in ended.error
    assert objects(empty_database) == set()

    # The database is ahead of the package: that is said too.
    newer.upgrade()
    assert marker(empty_database) == [NEXT_STEP]
    for arguments in (("check",), ("revision", "--autogenerate", "-m", "x")):
        ended = host.run(*arguments)
        assert ended.code != 0
        assert "pip install --upgrade sa-jobs" in ended.error.splitlines()[-1]
        assert "Traceback" not in ended.error
