"""The commands `sa-jobs` and `sa-jobs-worker`: parse, call, print.

Exit codes: 0 fine, 1 failure, 2 usage; a worker also 3, when it had to hand running jobs back. What
goes wrong for a known reason is one line on standard error that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

import sa_jobs
from sa_jobs.cli import db, jobs, migrations, status
from sa_jobs.cli.demo import demo
from sa_jobs.cli.run import run
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sa-jobs` and return the exit code."""
    return run(commands, arguments, "sa-jobs")


def worker_main(arguments: Sequence[str] | None = None) -> int:
    """Run `sa-jobs-worker`, which is `sa-jobs worker`, and return the exit code."""
    return run(worker, arguments, "sa-jobs-worker")
