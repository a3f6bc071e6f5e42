"""`sa-jobs db`: create and upgrade the tables, for hosts without an Alembic chain of their own."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from sa_jobs import migrations
from sa_jobs.cli.database import Place, check_server, place_options
from sa_jobs.cli.output import print_line, report
from sa_jobs.cli.steps import known_step
from sa_jobs.errors import SchemaVersionError

_CONCURRENTLY: dict[str, bool] = {"always": True, "never": False}


@click.group()
def db() -> None:
    """Create, upgrade and check the tables.

    A host with an Alembic chain runs the same steps by `alembic upgrade head`.
    """


_lock_timeout = click.option(
    "--lock-timeout",
    default=migrations.LOCK_TIMEOUT,
    show_default=True,
    metavar="TIME",
    help="How long a change waits for its lock before it tries again.",
)


@db.command()
@click.option(
    "--to",
    default="head",
    show_default=True,
    metavar="STEP",
    callback=known_step("head"),
    help="The last step to run.",
)
@click.option(
    "--concurrently",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Which indexes are built while writes go on; auto: those on large tables.",
)
@_lock_timeout
@place_options
def upgrade(place: Place, to: str, concurrently: str, lock_timeout: str) -> None:
    """Run the steps that the tables lack.

    In one transaction, which is left only to build an index on a large table. What was killed or
    failed goes on where it was when it is run again.
    """
    engine = _checked_engine(place)
    steps = migrations.apply(
        engine,
        to,
        schema=place.schema,
        name=place.name,
        concurrently=_CONCURRENTLY.get(concurrently, "auto"),
        lock_timeout=lock_timeout,
    )
    _report(place, engine, steps)


@db.command()
@click.option(
    "--to",
    required=True,
    metavar="STEP",
    callback=known_step("base"),
    help="The newest step to keep, or `base` for none.",
)
@click.option("--yes", is_flag=True, help="Drop the tables with all jobs, for `--to base`.")
@_lock_timeout
@place_options
def downgrade(place: Place, to: str, yes: bool, lock_timeout: str) -> None:
    """Undo the steps after one, newest first, in one transaction."""
    if to == "base" and not yes:
        raise click.UsageError("this drops the tables and all jobs in them: say --yes")
    engine = _checked_engine(place)
    steps = migrations.revert(
        engine, to, schema=place.schema, name=place.name, lock_timeout=lock_timeout
    )
    _report(place, engine, steps)


@db.command("build-indexes")
@place_options
def build_indexes(place: Place) -> None:
    """Build the indexes of the steps that the tables lack, while the application goes on.

    Before an upgrade of large tables within a transaction that cannot be left. The steps then find
    them, and are quick.
    """
    steps = migrations.build_indexes(_checked_engine(place), schema=place.schema, name=place.name)
    for step in steps:
        report(f"{step.revision}  its indexes are built", meaning="the indexes are built")
    if not steps:
        print_line("nothing to do: the tables lack no step that has indexes")


@db.command()
@place_options
def current(place: Place) -> None:
    """Print the newest step that the tables have, or `none`."""
    with place.engine().connect() as connection:
        now = migrations.current(connection, schema=place.schema, name=place.name)
    print_line(now or "none")


@db.command()
@place_options
def check(place: Place) -> None:
    """Fail if the tables lack a step of this release, and say what to run."""
    with place.engine().connect() as connection:
        check_server(connection)
        status = migrations.check(connection, schema=place.schema, name=place.name)
    if status.command is not None:
        raise SchemaVersionError(status.command)
    newest = "the" if status.current == status.latest else "newer than the"
    print_line(f"the tables are at {status.current}, {newest} newest step of this release")


def _checked_engine(place: Place) -> Engine:
    engine = place.engine()
    with engine.connect() as connection:
        check_server(connection)
    return engine


def _report(place: Place, engine: Engine, steps: tuple[migrations.Step, ...]) -> None:
    with engine.connect() as connection:
        now = migrations.current(connection, schema=place.schema, name=place.name) or "none"
    for step in steps:
        report(f"{step.revision}  {step.summary}", meaning=f"the tables are at {now} now")
    if not steps:
        print_line(f"nothing to do: the tables are at {now}")
