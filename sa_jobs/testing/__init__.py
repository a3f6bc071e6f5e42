"""For users' tests: what was enqueued, and running it, inside a transaction that is rolled back.

Every function takes the test's own session and works in its transaction: nothing is committed, no
worker runs, and no thread outlives a call. With an AsyncSession each returns an awaitable. The
statements are the worker's, so that status, attempts, back-off, history and results are what a
worker would have written.
"""

from sa_jobs.testing.assertions import assert_enqueued, enqueued, refute_enqueued
from sa_jobs.testing.rows import EnqueuedJob
from sa_jobs.testing.running import Ran, RunError, drain, run_job
from sa_jobs.testing.sessions import rolled_back

__all__ = [
    "EnqueuedJob",
    "Ran",
    "RunError",
    "assert_enqueued",
    "drain",
    "enqueued",
    "refute_enqueued",
    "rolled_back",
    "run_job",
]
