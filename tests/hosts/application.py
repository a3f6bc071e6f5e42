"""Host applications: directories with models, and a migration chain of their owner's."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import dedent

from tests.hosts.environments import Environment
from tests.support.commands import Ended

CLEAN = "No new upgrade operations detected."

# Where a host's one line goes, and where the models that it adds later go.
HERE = "# here\n"

MODELS = """\
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    pass


# here


class Invoice(Base):
    __tablename__ = "invoices"
    id: Mapped[int] = mapped_column(primary_key=True)
"""

LATER = """\


class Receipt(Base):
    __tablename__ = "receipts"
    id: Mapped[int] = mapped_column(primary_key=True)
"""

FLASK_FILES = {
    "shop/__init__.py": """\
        import os

        from flask import Flask

        from shop.extensions import db, migrate


        def create_app():
            app = Flask(__name__)
            app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE_URL"]
            db.init_app(app)
            migrate.init_app(app, db)
            from shop import models

            return app
        """,
    "shop/extensions.py": """\
        from flask_migrate import Migrate
        from flask_sqlalchemy import SQLAlchemy

        db = SQLAlchemy()
        migrate = Migrate()
        """,
    "shop/models.py": """\
        from shop.extensions import db

        # here


        class Invoice(db.Model):
            __tablename__ = "invoices"
            id = db.Column(db.Integer, primary_key=True)
        """,
}

FLASK_LATER = """\


class Receipt(db.Model):
    __tablename__ = "receipts"
    id = db.Column(db.Integer, primary_key=True)
"""


@dataclass(frozen=True)
class Layout:
    """What a host is made of; the default is a plain one, by Alembic's own template.

    `env` are the edits of env.py that its owner made before, as pairs of old and new text;
    `attach` is what adopting adds to the models.
    """

    files: dict[str, str] = field(default_factory=lambda: {"models.py": MODELS})
    attach: str = "sa_jobs.attach(Base)"
    later: str = LATER
    metadata: str = "models.Base.metadata"
    template: str = "generic"
    driver: str = "psycopg"
    env: tuple[tuple[str, str], ...] = ()

    @property
    def models(self) -> str:
        return next(name for name in self.files if name.endswith("models.py"))


PLAIN = Layout()


@dataclass(frozen=True)
class FlaskLayout(Layout):
    """A host with Flask-Migrate; the default one has an application factory."""

    files: dict[str, str] = field(default_factory=lambda: FLASK_FILES)
    attach: str = "sa_jobs.attach(db.Model)"
    later: str = FLASK_LATER
    init: tuple[str, ...] = ()


FLASK = FlaskLayout()


@dataclass
class Host:
    """A host application in a directory of its own, and its commands."""

    directory: Path
    environment: Environment
    url: str
    layout: Layout = PLAIN
    variables: dict[str, str] = field(default_factory=dict)
    _owned: dict[Path, bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        """Write the application, and let Alembic or Flask-Migrate make its environment."""
        self.variables.setdefault("SHOP_DATABASE_URL", self.url)
        for name, text in self.layout.files.items():
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        if isinstance(self.layout, FlaskLayout):
            self.ok("init", *self.layout.init)
        else:
            self.ok("init", "--template", self.layout.template, "migrations")
            url = self.url.replace("+psycopg:", f"+{self.layout.driver}:").replace("%", "%%")
            self.edit("alembic.ini", ("driver://user:pass@localhost/dbname", url))
            self.edit(
                "migrations/env.py",
                ("from alembic import context", "from alembic import context\n\nimport models"),
                ("target_metadata = None", f"target_metadata = {self.layout.metadata}"),
            )
        self.edit("migrations/env.py", *self.layout.env)
        for pattern in ("alembic.ini", "pyproject.toml", "migrations/*.*"):
            for path in self.directory.glob(pattern):
                self._owned[path] = path.read_bytes()

    @property
    def program(self) -> tuple[str, ...]:
        """The host's command, as arguments of Python."""
        if isinstance(self.layout, FlaskLayout):
            return ("-m", "flask", "--app", "shop", "db")
        return ("-m", "alembic")

    @property
    def revisions(self) -> list[Path]:
        """The files of the host's chain."""
        return sorted(self.directory.glob("migrations/versions/*.py"))

    def edit(self, name: str, *edits: tuple[str, str]) -> None:
        """Replace pieces of one of the host's files."""
        path = self.directory / name
        text = path.read_text()
        for old, new in edits:
            assert old in text, f"{old!r} is not in {name}:\n{text}"
            text = text.replace(old, new)
        path.write_text(text)

    def adopt(self) -> None:
        """Add the one line beside the models."""
        self.edit(self.layout.models, (HERE, f"{self.layout.attach}\n"))
        path = self.directory / self.layout.models
        path.write_text("import sa_jobs\n" + path.read_text())

    def add_model(self) -> None:
        """Add a model of the host's own, with the table `receipts`."""
        with (self.directory / self.layout.models).open("a") as file:
            file.write(self.layout.later)

    def run(self, *arguments: str) -> Ended:
        """Run `alembic` or `flask db`, and return how it ended."""
        return self.environment.run(
            *self.program, *arguments, directory=self.directory, variables=self.variables
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `alembic` or `flask db`."""
        return self.environment.start(
            "python", *self.program, *arguments, directory=self.directory, variables=self.variables
        )

    def ok(self, *arguments: str) -> str:
        """Run `alembic` or `flask db`, which must succeed, and return all that it wrote."""
        ended = self.run(*arguments)
        assert ended.code == 0, f"{' '.join(arguments)}: {ended.out}{ended.error}"
        return ended.out + ended.error

    def python(self, program: str, *arguments: str) -> str:
        """Run a program of the host's, which must succeed, and return what it printed."""
        ended = self.environment.run(
            "-c", dedent(program), *arguments, directory=self.directory, variables=self.variables
        )
        assert ended.code == 0, ended.out + ended.error
        return ended.out

    def command(self, *arguments: str) -> str:
        """Run a command that the environment has, which must succeed; return all it wrote."""
        ended = self.environment.command(
            *arguments, directory=self.directory, variables=self.variables
        )
        assert ended.code == 0, f"{' '.join(arguments)}: {ended.out}{ended.error}"
        return ended.out + ended.error

    def migrate(self, message: str) -> str:
        """Let autogenerate write a revision, and return its text."""
        before = set(self.revisions)
        if isinstance(self.layout, FlaskLayout):
            self.ok("migrate", "-m", message)
        else:
            self.ok("revision", "--autogenerate", "-m", message)
        (added,) = set(self.revisions) - before
        return added.read_text()

    def upgrade(self) -> str:
        """Run `alembic upgrade head` or `flask db upgrade`, and return what it wrote."""
        return self.ok("upgrade", *(() if isinstance(self.layout, FlaskLayout) else ("head",)))

    def check(self) -> None:
        """Run `alembic check` or `flask db check`, which must find nothing."""
        assert CLEAN in self.ok("check")

    def in_environment(self, environment: Environment) -> Host:
        """Return the host as it is after the package was upgraded."""
        upgraded = object.__new__(Host)
        upgraded.__dict__.update(self.__dict__, environment=environment)
        return upgraded

    def assert_untouched(self) -> None:
        """Env.py, its template and the configuration are what they were before adopting."""
        assert {path: path.read_bytes() for path in self._owned} == self._owned


def with_models(layout: Layout, models: str, **changes: object) -> Layout:
    """Return the layout with other models."""
    files = {**layout.files, layout.models: models}
    return replace(layout, files=files, **changes)  # type: ignore[arg-type]
