"""`sa-jobs demo`."""

from __future__ import annotations

import click

from sa_jobs.cli.database import url_option
from sa_jobs.cli.output import check_output


@click.command()
@url_option
@click.option(
    "--orders",
    type=click.IntRange(20, 5_000),
    default=300,
    show_default=True,
    help="How many orders the client places.",
)
def demo(database_url: str | None, orders: int) -> int:
    """Run a small shop with real workers, and check what came of it.

    Without --database-url it brings a PostgreSQL of its own, in a temporary directory; the
    environment is not asked. In a given database it works in the schema sa_jobs_demo, which it
    creates and drops.
    """
    from sa_jobs.demo import run

    check_output()
    return run.run_demo(database_url, orders)
