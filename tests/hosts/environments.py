"""Fresh Python environments in which hosts live, with the package installed from its wheel."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from tests.hosts.forks import LIBRARIES, run_module
from tests.support.commands import Ended

ROOT = Path(__file__).parents[2]

# What hosts import, beyond the two whose versions a pair names. pytest-alembic's own tests are
# imported by the host, since its collecting of them breaks with pytest 9.2.
_LIBRARIES = (
    "psycopg[binary]",
    "click",
    "msgspec",
    "rich",
    "asyncpg",
    "Flask",
    "Flask-SQLAlchemy",
    "Flask-Migrate",
    "alembic-utils",
    "pytest",
    "pytest-alembic",
)

# A host sees its own database and nothing of ours.
_HIDDEN = re.compile(r"PG|PYTHON|PYTEST|FLASK|ALEMBIC|COV|SA_JOBS|DATABASE_URL")


class Pair(NamedTuple):
    """The releases of SQLAlchemy and Alembic in an environment."""

    sqlalchemy: str
    alembic: str

    def __str__(self) -> str:
        return f"sqlalchemy-{self.sqlalchemy}-alembic-{self.alembic}"

    @property
    def alembic_numbers(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self.alembic.split("."))


def _installed(package: str) -> str:
    return importlib.metadata.version(package)


OURS = Pair(_installed("SQLAlchemy"), _installed("alembic"))
"""The releases that the tests themselves run with: a corner of what is supported."""


Release = Literal["this", "next", "breaking"]
"""This one, or one with a step more: by the last, no other release works on the tables."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the package and everything that hosts import."""

    python: Path

    def run(
        self, *arguments: str, directory: Path, variables: Mapping[str, str] | None = None
    ) -> Ended:
        """Run Python with these arguments in a directory, and return how it ended."""
        if arguments[0] == "-m" and arguments[1] in LIBRARIES:
            return run_module(
                self.python,
                arguments[1:],
                directory=directory,
                variables=_variables(variables),
                seconds=120,
            )
        return self.command("python", *arguments, directory=directory, variables=variables)

    def command(
        self,
        program: str,
        *arguments: str,
        directory: Path,
        variables: Mapping[str, str] | None = None,
    ) -> Ended:
        """Run one of the environment's programs in a directory, and return how it ended."""
        ended = subprocess.run(
            [str(self.python.with_name(program)), *arguments],
            cwd=directory,
            env=_variables(variables),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def start(
        self,
        program: str,
        *arguments: str,
        directory: Path,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start one of the environment's programs in a directory."""
        return subprocess.Popen(
            [str(self.python.with_name(program)), *arguments],
            cwd=directory,
            env=_variables(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _variables(own: Mapping[str, str] | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not _HIDDEN.match(name)}
    return {**kept, "PYTHONUNBUFFERED": "1", **(own or {})}


class Environments:
    """Makes each environment once; several processes of the tests share them.

    `shared` is gone after the run, `kept` stays for the next one: what hosts import is installed
    there, once for each pair of releases.
    """

    def __init__(self, shared: Path, kept: Path) -> None:
        self._shared = shared
        self._kept = kept

    def wheel(self, release: Release = "this") -> Path:
        """Return the wheel of a release of the package."""
        directory = self._shared / f"wheel-{release}"
        with _once(directory) as made:
            if made:
                source = self._shared / f"source-{release}"
                _copy_source(source)
                if release != "this":
                    _make_next_release(source, breaking=release == "breaking")
                _pip("wheel", "--no-deps", f"--wheel-dir={directory}", str(source))
        (wheel,) = directory.glob("*.whl")
        return wheel

    def get(self, release: Release = "this", pair: Pair = OURS) -> Environment:
        """Return the environment with a release of the package and a pair of the libraries."""
        directory = self._shared / f"{release}-{pair}"
        python = directory / "bin" / "python"
        wheel, libraries = self.wheel(release), self._libraries(pair)
        with _once(directory) as made:
            if made:
                venv.create(directory, symlinks=True, with_pip=False)
                options = ("--no-deps", "--no-index", "--no-compile")
                _pip("--python", str(python), "install", *options, str(wheel))
                (site_packages,) = directory.glob("lib/python*/site-packages")
                (site_packages / "libraries.pth").write_text(f"{libraries}\n")
        return Environment(python)

    def _libraries(self, pair: Pair) -> Path:
        wanted = [f"SQLAlchemy[asyncio]=={pair.sqlalchemy}", f"alembic=={pair.alembic}"]
        for name in _LIBRARIES:
            pin = ""
            # The same releases as the tests, where they have it: the oldest of all in that corner.
            with suppress(importlib.metadata.PackageNotFoundError):
                pin = f"=={_installed(name.partition('[')[0])}"
            wanted.append(name + pin)
        key = hashlib.sha256("\n".join([sys.version, *wanted]).encode()).hexdigest()[:16]
        directory = self._kept / f"libraries-{key}"
        with _once(directory) as made:
            if made:
                _pip("install", "--no-compile", f"--target={directory}", *wanted)
        return directory


@contextmanager
def _once(directory: Path) -> Iterator[bool]:
    """Say whether the directory is to be made; nobody else makes it meanwhile.

    A directory whose making failed is made anew the next time.
    """
    done = directory.with_name(directory.name + ".done")
    with directory.with_name(directory.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = not done.exists()
        if missing:
            shutil.rmtree(directory, ignore_errors=True)
        yield missing
        done.touch()


def _pip(*arguments: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{ended.stdout}")


def _copy_source(directory: Path) -> None:
    shutil.copytree(
        ROOT / "sa_jobs", directory / "sa_jobs", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "sa_jobs_pytest.py"):
        shutil.copy(ROOT / name, directory / name)


# --- The next release, with one step more ---------------------------------------------------------

NEXT_VERSION = "99.0.0"

# A column and an index on the jobs: the second is built CONCURRENTLY on a large table.
_NEXT_STEP = '''\
"""Add a column, and an index on the jobs."""

from __future__ import annotations

from sa_jobs.migrations._ddl import Target, applies, undoes
from sa_jobs.migrations._steps import Step

revision = "{revision}"
down_revision = "{down_revision}"
branch_labels = None
depends_on = None

STEP = Step(
    revision,
    down_revision,
    phase="{phase}",
    min_client="{min_client}",
    released_in="{version}",
    summary="Add a column, and an index on the jobs.",
)


def prepare(target: Target) -> None:
    target.create_index("_extra_idx", "(tenant, id)")


@applies(STEP)
def upgrade(target: Target) -> None:
    prepare(target)
    target.alter(f"ALTER TABLE {{target.table()}} ADD COLUMN IF NOT EXISTS extra bigint")


@undoes(STEP)
def downgrade(target: Target) -> None:
    target.alter(f"ALTER TABLE {{target.table()}} DROP COLUMN extra")
    target.alter(f"DROP INDEX {{target.table('_extra_idx')}}")
'''


def steps() -> list[str]:
    """Return the steps of this release."""
    files = (ROOT / "sa_jobs" / "migrations" / "versions").glob("sa_jobs_*.py")
    return sorted(file.stem for file in files)


THIS_STEP = steps()[-1]
NEXT_STEP = f"sa_jobs_{len(steps()) + 1:04d}"


def _make_next_release(source: Path, *, breaking: bool) -> None:
    package = source / "sa_jobs"
    (package / "migrations" / "versions" / f"{NEXT_STEP}.py").write_text(
        _NEXT_STEP.format(
            revision=NEXT_STEP,
            down_revision=THIS_STEP,
            version=NEXT_VERSION,
            phase="contract" if breaking else "expand",
            min_client=NEXT_VERSION if breaking else "0.1.0",
        )
    )
    if breaking:
        usable = f'OLDEST_USABLE = "{NEXT_STEP}"'
        _substitute(package / "migrations" / "__init__.py", r'OLDEST_USABLE = ".*"', usable)
    _substitute(package / "__init__.py", r'__version__ = ".*"', f'__version__ = "{NEXT_VERSION}"')
    _substitute(package / "ddl.py", r'STEP = ".*"', f'STEP = "{NEXT_STEP}"')


def _substitute(file: Path, pattern: str, by: str) -> None:
    text, count = re.subn(f"(?m)^{pattern}$", by, file.read_text())
    if count != 1:
        raise RuntimeError(f"{file.name} has {count} lines like {pattern}")
    file.write_text(text)
