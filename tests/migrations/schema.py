"""What the tests of the migrations ask a database, and the small host that they migrate with."""

from __future__ import annotations

import functools
import io
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import Script
from sqlalchemy import MetaData, NullPool, create_engine, text
from sqlalchemy.engine import make_url

from sa_jobs import ddl
from sa_jobs.models import attach
from tests.support.postgres import embedded_bin, system_bin

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Place:
    """Where a queue's tables are, as `attach()` and the migrations take it."""

    schema: str | None = None
    name: str = "sa_jobs"

    @property
    def options(self) -> dict[str, Any]:
        return {"schema": self.schema, "name": self.name}

    def table(self, suffix: str = "") -> str:
        return (f'"{self.schema}".' if self.schema else "") + f'"{self.name}{suffix}"'


DEFAULT = Place()
CUSTOM = Place("queue", "q")
CASED = Place("Queue", "ourJobs")
LONGEST = Place(None, "j" * 39)

# Every kind of name that a host may ask SQLAlchemy and Alembic to make up.
NAMING_CONVENTION = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


def create_all(url: str, place: Place = DEFAULT, metadata: MetaData | None = None) -> None:
    """Create the tables from the models."""
    metadata = MetaData() if metadata is None else metadata
    attach(metadata, **place.options)
    with create_engine(url, poolclass=NullPool).begin() as connection:
        metadata.create_all(connection)


def execute(url: str, *statements: str) -> None:
    """Run statements in one transaction."""
    with create_engine(url, poolclass=NullPool).begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def run_script(url: str, script: str) -> None:
    """Run a script as psql would, statement by statement in the transactions it begins."""
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        # Without arguments, psycopg sends the text as it is.
        connection.execute(script.encode())


def run_psql(url: str, script: str) -> None:
    """Run a script as a database administrator does: each statement by itself."""
    directory = embedded_bin() or system_bin()
    assert directory is not None
    subprocess.run(
        [directory / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-f", "-", libpq(url)],
        input=script,
        text=True,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def libpq(url: str) -> str:
    """Return the URL as libpq's programs take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


def pg_dump(url: str) -> str:
    """Return the whole schema of a database, Alembic's own tables left out."""
    program, options = _pg_dump_program(_server_major(url))
    completed = subprocess.run(
        [program, *options, "--schema-only", "--no-owner", "-T", "*.*alembic_version", libpq(url)],
        capture_output=True,
        text=True,
        check=True,
        env={name: value for name, value in os.environ.items() if not name.startswith("PG")},
    )
    return completed.stdout


@functools.cache
def _pg_dump_program(server_major: int) -> tuple[str, tuple[str, ...]]:
    # It must not be older than the server.
    for directory in (system_bin(), embedded_bin()):
        if directory is None:
            continue
        program = str(directory / "pg_dump")
        version = subprocess.check_output([program, "--version"], text=True)
        major = re.search(r"\d+", version)
        if major is not None and int(major[0]) >= server_major:
            manual = subprocess.check_output([program, "--help"], text=True)
            # Newer releases write a random key into the dump, unless they are given one.
            known = "--restrict-key" in manual
            return program, ("--restrict-key=x",) if known else ()
    raise RuntimeError(f"there is no pg_dump for PostgreSQL {server_major}")


def _server_major(url: str) -> int:
    with psycopg.connect(libpq(url)) as connection:
        return connection.info.server_version // 10000


def objects(url: str) -> set[str]:
    """Return all that users have made in a database, Alembic's own tables left out."""
    with psycopg.connect(libpq(url)) as connection:
        rows = connection.execute(
            """
            SELECT kind || ' ' || space.nspname || '.' || found.name
            FROM (
                SELECT 'relation ' || relkind::text AS kind, relnamespace AS space, relname AS name
                FROM pg_class
                UNION ALL SELECT 'function', pronamespace, proname FROM pg_proc
                UNION ALL SELECT 'type', typnamespace, typname FROM pg_type
            ) AS found
            JOIN pg_namespace AS space ON space.oid = found.space
            WHERE space.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')
            AND found.name NOT LIKE '%alembic_version%'
            """
        )
        return {name for (name,) in rows}


def schemas(url: str) -> set[str]:
    """Return the schemas that are not the server's own."""
    with psycopg.connect(libpq(url)) as connection:
        rows = connection.execute(
            "SELECT nspname FROM pg_namespace"
            " WHERE nspname <> 'information_schema' AND nspname NOT LIKE 'pg\\_%'"
        )
        return {name for (name,) in rows}


def marker(url: str, place: Place = DEFAULT) -> list[str]:
    """Return the rows of the step marker."""
    with psycopg.connect(libpq(url)) as connection:
        rows = connection.execute(f"SELECT revision FROM {place.table('_step')}".encode())
        return [revision for (revision,) in rows]


def checkout_config(url: str | None, place: Place = DEFAULT) -> Config:
    """Return the configuration of the environment at the top of the checkout."""
    config = Config(str(ROOT / "alembic.ini"), stdout=io.StringIO(), output_buffer=io.StringIO())
    config.attributes["sa_jobs"] = {"url": url, **place.options}
    return config


def written(config: Config) -> str:
    """Return the script that a command with `sql=True` has written."""
    assert isinstance(config.output_buffer, io.StringIO)
    return config.output_buffer.getvalue()


@dataclass
class Host:
    """An application with Alembic's own template, whose chain calls our steps."""

    directory: Path
    url: str
    place: Place = DEFAULT
    # What env.py calls target_metadata, once target() was called.
    metadata: Any = None
    _last: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        ini = self.directory.with_suffix(".ini")
        command.init(Config(str(ini), stdout=io.StringIO()), str(self.directory))

    def target(self, metadata: Any, *options: str) -> None:
        """Give env.py the metadata, and `context.configure()` further arguments, online."""
        self.metadata = metadata
        self.edit_env(
            ("target_metadata = None", 'target_metadata = config.attributes["metadata"]'),
            *(
                (
                    "connection=connection, target_metadata=target_metadata\n",
                    f"connection=connection, target_metadata=target_metadata, {option}\n",
                )
                for option in options
            ),
        )

    def edit_env(self, *edits: tuple[str, str]) -> None:
        """Replace pieces of env.py."""
        env = self.directory / "env.py"
        source = env.read_text()
        for old, new in edits:
            assert old in source, old
            source = source.replace(old, new)
        env.write_text(source)

    def autogenerate(self) -> str:
        """Run `alembic revision --autogenerate`, and return the file's text."""
        script = command.revision(self.config(), "generated", autogenerate=True)
        assert isinstance(script, Script)
        self._last = script.revision
        return Path(script.path).read_text()

    def check(self) -> None:
        """Run `alembic check`, which raises a CommandError where it finds something."""
        command.check(self.config())

    def add_naming_convention(self) -> None:
        """Give the host's metadata a naming convention, which Alembic applies in operations."""
        env = self.directory / "env.py"
        source = env.read_text()
        assert "target_metadata = None" in source
        env.write_text(
            source.replace(
                "target_metadata = None",
                "from sqlalchemy import MetaData\n"
                f"target_metadata = MetaData(naming_convention={NAMING_CONVENTION!r})",
            )
        )

    def add_revision(self, up: str, down: str = "pass") -> str:
        """Add a revision at the end of the chain, and return its id."""
        revision = f"host_{len(list(self.directory.glob('versions/*.py'))) + 1}"
        (self.directory / "versions" / f"{revision}.py").write_text(
            "from alembic import op\n"
            "import sa_jobs.migrations\n"
            f"revision = {revision!r}\n"
            f"down_revision = {self._last!r}\n"
            "def upgrade():\n"
            f"    {up}\n"
            "def downgrade():\n"
            f"    {down}\n"
        )
        self._last = revision
        return revision

    def add_steps(self, to: str = ddl.STEP, from_: str | None = None, **options: Any) -> str:
        """Add the revision that takes our tables from one step to another."""
        place = {**self.place.options, **options}
        arguments = "".join(f", {key}={value!r}" for key, value in place.items())
        back = "".join(f", {key}={value!r}" for key, value in self.place.options.items())
        return self.add_revision(
            f"sa_jobs.migrations.upgrade({to!r}, from_={from_!r}{arguments})",
            f"sa_jobs.migrations.downgrade({from_!r}, from_={to!r}{back})",
        )

    def upgrade(self, to: str = "head") -> None:
        """Run `alembic upgrade`."""
        command.upgrade(self.config(), to)

    def downgrade(self, to: str = "base") -> None:
        """Run `alembic downgrade`."""
        command.downgrade(self.config(), to)

    def upgrade_script(self, to: str = "head") -> str:
        """Return what `alembic upgrade --sql` writes."""
        config = self.config()
        command.upgrade(config, to, sql=True)
        return written(config)

    def downgrade_script(self, from_to: str) -> str:
        """Return what `alembic downgrade --sql` writes."""
        config = self.config()
        command.downgrade(config, from_to, sql=True)
        return written(config)

    def run(self, *arguments: str) -> str:
        """Run `alembic` in a process of its own, and return what it prints."""
        ini = self.directory.with_suffix(".ini")
        url = self.url.replace("%", "%%")
        text = re.sub("(?m)^sqlalchemy.url = .*$", f"sqlalchemy.url = {url}", ini.read_text())
        ini.write_text(text)
        completed = subprocess.run(
            [sys.executable, "-m", "alembic", "-c", str(ini), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert completed.returncode == 0, completed.stdout + completed.stderr
        return completed.stdout + completed.stderr

    def config(self) -> Config:
        """Return the configuration of the host's environment."""
        config = Config(stdout=io.StringIO(), output_buffer=io.StringIO())
        config.set_main_option("script_location", str(self.directory))
        config.set_main_option("path_separator", "os")
        config.set_main_option("sqlalchemy.url", self.url.replace("%", "%%"))
        config.attributes["metadata"] = self.metadata
        return config
