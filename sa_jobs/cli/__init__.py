"""The commands `sa-jobs` and `sa-jobs-worker`: parse, call, print.

Exit codes: 0 fine, 1 failure, 2 usage; a worker also 3, when it had to hand running jobs back. What
goes wrong for a known reason is one line on standard error that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence

from sa_jobs.cli.program import commands
from sa_jobs.cli.run import run
from sa_jobs.cli.worker import worker


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `sa-jobs` and return the exit code."""
    return run(commands, arguments, "sa-jobs")


def worker_main(arguments: Sequence[str] | None = None) -> int:
    """Run `sa-jobs-worker`, which is `sa-jobs worker`, and return the exit code."""
    return run(worker, arguments, "sa-jobs-worker")
