"""The group of all commands, which `sa-jobs` is."""

from __future__ import annotations

import click

import sa_jobs
from sa_jobs.cli import db, jobs, migrations, status
from sa_jobs.cli.demo import demo
from sa_jobs.cli.worker import worker


@click.group(name="sa-jobs", context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(sa_jobs.__version__, prog_name="sa-jobs")
def commands() -> None:
    """Work with the jobs of a PostgreSQL job queue.

    The database is named by --database-url, SA_JOBS_DATABASE_URL or DATABASE_URL.
    """


for _command in (
    demo,
    worker,
    status.status,
    jobs.enqueue,
    jobs.list_,
    jobs.show,
    jobs.retry,
    jobs.cancel,
    db.db,
    migrations.migrations,
):
    commands.add_command(_command)
