"""`sa-jobs db`: create and upgrade the tables, for hosts without an Alembic chain of their own."""

from __future__ import annotations

import click

import sa_jobs
from sa_jobs import migrations
from sa_jobs.cli.database import Place, check_server, place_options
from sa_jobs.cli.output import print_line, report
from sa_jobs.errors import SchemaVersionError


def _check_step(ctx: click.Context, param: click.Parameter, value: str) -> str:
    known = [step.revision for step in migrations.revisions()]
    if value != "head" and value not in known:
        raise click.BadParameter(
            f"{value!r} is not a step of sa-jobs {sa_jobs.__version__}, which has "
            f"{', '.join(known)}",
            ctx,
            param,
        )
    return value


@click.group()
def db() -> None:
    """Create, upgrade and check the tables.

    A host with an Alembic chain runs the same steps by `alembic upgrade head`.
    """


@db.command()
@click.option(
    "--to",
    default="head",
    show_default=True,
    metavar="STEP",
    callback=_check_step,
    help="The last step to run.",
)
@place_options
def upgrade(place: Place, to: str) -> None:
    """Run the steps that the tables lack, in one transaction."""
    with place.engine().begin() as connection:
        check_server(connection)
        steps = migrations.apply(connection, to, schema=place.schema, name=place.name)
        now = migrations.current(connection, schema=place.schema, name=place.name)
    for step in steps:
        report(f"{step.revision}  {step.summary}", meaning=f"the tables are at {now} now")
    if not steps:
        print_line(f"nothing to do: the tables are at {now}")


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
    print_line(f"the tables are at {status.current}, the newest step of this release")
