"""`sa-jobs migrations`: the steps, and the revisions of a host's Alembic chain that run them."""

from __future__ import annotations

import functools
import inspect
import re
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import sa_jobs
from sa_jobs.cli.invocation import meant_tables, was_given
from sa_jobs.cli.output import escaped, print_line, print_table
from sa_jobs.cli.steps import known_step
from sa_jobs.errors import AttachError, MigrationError
from sa_jobs.migrations import revisions, script
from sa_jobs.migrations._place import place_options, place_text
from sa_jobs.migrations._steps import is_id, position
from sa_jobs.migrations.chain import (
    Call,
    calls,
    databases,
    has_branch,
    recorded_call,
    recorded_places,
)
from sa_jobs.models import DEFAULT_NAME
from sa_jobs.names import check_names

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory


@click.group()
def migrations() -> None:
    """Show the steps, and write the revision that runs them in your own Alembic chain.

    No database is needed. `alembic revision --autogenerate` and `flask db migrate` write the same
    revision, from a database.
    """


def _schema_and_name(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def with_checked(schema: str | None, name: str, **rest: Any) -> Any:
        schema, name = meant_tables(schema, name)
        check_names(name, schema, AttachError)
        return command(schema=schema, name=name, **rest)

    for option in (
        click.option("--name", default=DEFAULT_NAME, show_default=True, help="Name of the tables."),
        click.option("--schema", help="Schema of the tables, as attach() has it."),
    ):
        with_checked = option(with_checked)
    return with_checked


def _host(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--directory",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            help="The migrations folder, as Flask-Migrate has it.",
        ),
        click.option(
            "-c",
            "--config",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="Alembic's configuration. Default: alembic.ini, pyproject.toml, migrations/.",
        ),
    ):
        command = option(command)
    return _schema_and_name(command)


@migrations.command()
@_host
@click.option("--head", help="The head to add the revision to, where there are several.")
@click.option("--engine", help="The database of the tables, in a chain (multidb) of several.")
@click.option(
    "--to",
    default="head",
    show_default=True,
    metavar="STEP",
    callback=known_step("head"),
    help="The last step.",
)
@click.option("--remove", is_flag=True, help="Write the revision that drops the tables.")
@click.option("-m", "--message", help="The revision's message.")
def new(
    config: Path | None,
    directory: Path | None,
    schema: str | None,
    name: str,
    head: str | None,
    engine: str | None,
    to: str,
    remove: bool,
    message: str | None,
) -> None:
    """Write the revision that brings the tables to the newest step.

    From the step that the revisions so far name, by your own template, file names and hooks.
    """
    from alembic.util import CommandError, rev_id

    from sa_jobs.alembic import IMPORT, DowngradeOp, UpgradeOp, call_of

    configuration, scripts = _chain(config, directory)
    if _has_branch(scripts, schema, name):
        if remove or to != "head":
            target = "base" if remove else to
            raise MigrationError(
                "the steps are a branch of this chain, which is moved without a new revision: run "
                f"`alembic {'downgrade' if remove else 'upgrade'} sa_jobs@{target}`"
            )
        print_line(
            "nothing to do: the steps are a branch of this chain, and `alembic upgrade "
            "sa_jobs@head` runs them"
        )
        return
    with _reading("Alembic's configuration"):
        engines = databases(configuration, scripts)
    engine = _engine(engines, scripts, engine, schema, name)
    token, function = (f"{engine}_", f"upgrade_{engine}") if engine else ("", None)
    recorded = _recorded(scripts, schema, name, function)
    now = recorded.to if recorded else None
    if now is None and not was_given("schema") and not was_given("name"):
        _refuse_other_places(scripts, schema, name, f"for another queue, say --name {name}")
    last = None if remove else revisions()[-1].revision if to == "head" else to
    if (not remove and position(last) <= position(now)) or last == now:
        print_line(f"nothing to do: the chain brings the tables to {now or 'none'}")
        return
    op: UpgradeOp | DowngradeOp
    if remove:
        op, about = DowngradeOp(last, now, schema=schema, name=name), "remove job queue"
    else:
        op = UpgradeOp(last, now, schema=schema, name=name)
        about = "add job queue" if now is None else f"upgrade job queue to {last}"
    lines: dict[str, Any] = {
        f"{token}upgrades": call_of(op),
        f"{token}downgrades": call_of(op.reverse()),
    }
    with _reading("the new revision"):
        try:
            written = scripts.generate_revision(
                rev_id(), message or about, head=head, config=configuration, imports=IMPORT, **lines
            )
        except CommandError as error:
            hint = " (use --head)" if head is None and len(scripts.get_heads()) > 1 else ""
            raise MigrationError(f"{error}{hint}") from error
    if written is None:
        return
    path = Path(written.path)
    if not list(calls(path)):
        path.unlink()
        raise MigrationError(
            f"the template {Path(scripts.dir) / 'script.py.mako'} has no place for "
            "${upgrades}: let `alembic revision --autogenerate` write the revision instead"
        )
    print_line(escaped(str(path)))


@migrations.command()
@_host
def check(config: Path | None, directory: Path | None, schema: str | None, name: str) -> None:
    """Fail if your chain lacks a step of this release, and say what to run."""
    scripts = _chain(config, directory)[1]
    latest = revisions()[-1].revision
    if _has_branch(scripts, schema, name):
        print_line(
            f"a branch of the chain has the steps up to {latest}, the newest of this release"
        )
        return
    recorded = _recorded(scripts, schema, name)
    now = recorded.to if recorded else None
    if now is None:
        another = f"sa-jobs migrations new{place_options(schema, name) or f' --name {name}'}"
        _refuse_other_places(scripts, schema, name, f"`{another}` makes another queue")
    if position(now) < position(latest):
        raise MigrationError(
            f"the revisions bring the tables to {now or 'none'}, and sa-jobs "
            f"{sa_jobs.__version__} is at {latest}: run `alembic revision --autogenerate`, "
            "`flask db migrate` or `sa-jobs migrations new`"
        )
    print_line(f"the revisions bring the tables to {latest}, the newest step of this release")


@migrations.command("list")
def list_() -> None:
    """Print the steps of this release, oldest first."""
    print_table(
        ("step", "phase", "since", "oldest client", "what it does"),
        [
            (step.revision, step.phase, step.released_in, step.min_client, step.summary)
            for step in revisions()
        ],
    )


@migrations.command()
@_schema_and_name
@click.option(
    "--from",
    "from_",
    metavar="STEP",
    callback=known_step("base", "head"),
    help="Default: base, or head with --down.",
)
@click.option(
    "--to",
    metavar="STEP",
    callback=known_step("base", "head"),
    help="Default: head, or base with --down.",
)
@click.option("--down", is_flag=True, help="The way back.")
@click.option("--concurrently", is_flag=True, help="Build indexes while writes go on.")
def sql(
    schema: str | None,
    name: str,
    from_: str | None,
    to: str | None,
    down: bool,
    concurrently: bool,
) -> None:
    """Print the SQL of steps, for `psql -v ON_ERROR_STOP=1`."""
    first, last = ("head", "base") if down else ("base", "head")
    first, last = from_ or first, to or last
    start, end = _step(first), _step(last)
    if start == end:
        raise click.UsageError(f"there is no step from {first} to {last}, so there is no SQL")
    if (position(end) < position(start)) != down:
        way = "up, and --down is for the way back" if down else "back: say --down"
        raise click.UsageError(f"from {first} to {last} is the way {way}")
    click.echo(
        script(
            end,
            from_=start,
            schema=schema,
            name=name,
            concurrently=True if concurrently else "auto",
        ),
        nl=False,
    )


def _step(given: str) -> str | None:
    if given == "head":
        return revisions()[-1].revision
    return None if given == "base" else given


# Alembic prints the path too, with an ellipsis.
_QUIET = Namespace(quiet=True)


def _chain(config: Path | None, directory: Path | None) -> tuple[Config, ScriptDirectory]:
    from alembic.script import ScriptDirectory

    with _reading("Alembic's configuration"):
        configuration = _configuration(config, directory)
        return configuration, ScriptDirectory.from_config(configuration)


def _has_branch(scripts: ScriptDirectory, schema: str | None, name: str) -> bool:
    """Return whether a branch of the chain makes these tables: it does those of the default."""
    with _reading("the revisions"):
        return (schema, name) == (None, DEFAULT_NAME) and has_branch(scripts)


def _refuse_other_places(
    scripts: ScriptDirectory, schema: str | None, name: str, otherwise: str
) -> None:
    """Raise MigrationError if the chain makes tables, but others than those asked for."""
    with _reading("the revisions"):
        # Of a chain for several databases, another one may have these very tables.
        places = [place for place in recorded_places(scripts) if place != (schema, name)]
    # No options name the default place, where others were asked for.
    known = " or ".join(
        f"`{(place_options(*place) or f' --name {place[1]}').strip()}`" for place in places
    )
    if known:
        raise MigrationError(
            f"the revisions make the tables of {' and '.join(place_text(*p) for p in places)}, "
            f"and none of {place_text(schema, name)}: say {known}; {otherwise}"
        )


def _engine(
    engines: tuple[str, ...],
    scripts: ScriptDirectory,
    chosen: str | None,
    schema: str | None,
    name: str,
) -> str | None:
    """Return which database of the chain has the tables, None in a chain for one database."""
    if chosen is not None:
        if chosen not in engines:
            known = ", ".join(engines) or "none, as its template is for one database"
            raise click.BadParameter(
                f"{chosen!r} is not in the chain ({known})", param_hint="--engine"
            )
        return chosen
    if not engines:
        return None
    before = _recorded(scripts, schema, name)
    found = before.function.removeprefix("upgrade_") if before else None
    if found not in engines:
        raise MigrationError(
            f"this chain is for several databases ({', '.join(engines)}): say with --engine which "
            "of them has the tables, or let `alembic revision --autogenerate` find out"
        )
    return found


def _configuration(config: Path | None, directory: Path | None) -> Config:
    """Return the configuration by the files that Alembic would read."""
    ini, toml = Path("alembic.ini"), Path("pyproject.toml")
    if config is not None and config.name == "pyproject.toml":
        toml = config
    elif config is not None:
        ini = config
    has_toml = toml.exists() and _has_section(toml)
    if toml == config and not has_toml:
        raise MigrationError(f"{config} has no [tool.alembic]: say -c or --directory")
    if config is None and directory is None and not ini.exists() and not has_toml:
        if not Path("migrations/env.py").exists():
            raise MigrationError(
                "there is no alembic.ini, pyproject.toml with [tool.alembic], or migrations/ "
                "here: say -c or --directory"
            )
        directory = Path("migrations")
    if directory is None:
        return _read(ini, toml if has_toml else None)
    # Flask-Migrate keeps the file in there; it names no script_location.
    found = _read(
        ini if ini == config else directory / "alembic.ini", toml if toml == config else None
    )
    found.set_main_option("script_location", str(directory).replace("%", "%%"))
    return found


def _read(ini: Path, toml: Path | None) -> Config:
    from alembic.config import Config

    options: dict[str, Any] = {"cmd_opts": _QUIET}
    # Before Alembic 1.16 it knows no other file than alembic.ini.
    if "toml_file" in inspect.signature(Config).parameters:
        options["toml_file"] = None if toml is None else str(toml)
    elif toml is not None and not ini.exists():
        raise MigrationError(f"{toml} is read by Alembic 1.16 and newer: update it, or say -c")
    return Config(str(ini) if ini.exists() else None, **options)


def _has_section(toml: Path) -> bool:
    return (
        re.search(r"(?m)^\s*\[+\s*tool\s*\.\s*alembic\b", toml.read_text("utf-8", "replace"))
        is not None
    )


def _recorded(
    scripts: ScriptDirectory, schema: str | None, name: str, function: str | None = None
) -> Call | None:
    with _reading("the revisions"):
        found = recorded_call(scripts, schema=schema, name=name, function=function)
    if found and found.to is not None and not is_id(found.to):
        newest = revisions()[-1].revision
        raise MigrationError(
            f"{found.path} brings the tables to {found.to}, which is no step, and head is "
            "another one in each release: let it name the step that the databases are at "
            f"(`sa-jobs db current`), as {newest!r}"
        )
    return found


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn whatever the host's own files raise, which Alembic runs, into an error of ours."""
    from alembic.util import CommandError

    try:
        yield
    except MigrationError:
        raise
    except CommandError as error:
        hint = ": say -c or --directory" if "script_location" in str(error) else ""
        raise MigrationError(f"{str(error).rstrip('.')}{hint}") from error
    except Exception as error:
        raise MigrationError(
            f"{what} cannot be read: {type(error).__name__}: {error}{_place_of(error)}"
        ) from error


def _place_of(error: Exception) -> str:
    """Return the line at which a revision failed, for an error that does not say it itself."""
    if isinstance(error, SyntaxError):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    loading = [n for n, frame in enumerate(frames) if frame.filename.endswith("pyfiles.py")]
    for frame in frames[loading[-1] :] if loading else ():
        if not frame.filename.endswith("pyfiles.py") and not frame.filename.startswith("<"):
            return f" ({frame.filename}, line {frame.lineno})"
    return ""
