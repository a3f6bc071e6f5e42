"""`sa-jobs db`: create and upgrade the tables, for hosts without an Alembic chain of their own."""

from __future__ import annotations

import click

from sa_jobs import migrations
from sa_jobs.cli.database import Place, check_server, place_options
from sa_jobs.cli.output import print_line
from sa_jobs.errors import SchemaVersionError


@click.group()
def db() -> None:
    """Create, upgrade and check the tables.

    A host with an Alembic chain runs the same steps by `alembic upgrade head`.
    """


@db.command()
@click.option(
    "--to", default="head", show_default=True, metavar="STEP", help="The last step to run."
)
@place_options
def upgrade(place: Place, to: str) -> None:
    """Run the steps that the tables lack, in one transaction."""
    with place.engine().begin() as connection:
        check_server(connection)
        steps = migrations.apply(connection, to, schema=place.schema, name=place.name)
        now = migrations.current(connection, schema=place.schema, name=place.name)
    for step in steps:
        print_line(f"{step.revision}  {step.summary}")
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
