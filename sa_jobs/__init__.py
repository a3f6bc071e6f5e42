"""A durable PostgreSQL job queue for applications that already use SQLAlchemy."""

from sa_jobs.backoff import equal_jitter, exponential, fixed, full_jitter
from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.enqueue import cancel, enqueue, enqueue_from_select, enqueue_many, retry
from sa_jobs.errors import (
    AttachError,
    AttemptLostError,
    AttemptTimeoutError,
    AutocommitWarning,
    DuplicateJobError,
    EnqueueRaceError,
    HandlerError,
    HookError,
    InvalidJobError,
    InvalidJobTypeError,
    MigrationError,
    NeedsOwnTransactionError,
    PayloadMisfitError,
    SaJobsError,
    SchemaVersionError,
    StepNotFoundError,
    TransactionError,
    UnknownHandlerError,
    WorkerError,
    WorkerOptionError,
)
from sa_jobs.forks import dispose_after_fork
from sa_jobs.handlers import Jobs
from sa_jobs.hooks import Enqueuing
from sa_jobs.inserts import Enqueued
from sa_jobs.job_options import Row
from sa_jobs.models import Tables, attach
from sa_jobs.outcome import Discard, Retry, Snooze
from sa_jobs.worker import Around, Worker

__version__ = "0.1.0"

__all__ = [
    "Around",
    "AttachError",
    "AttemptLostError",
    "AttemptTimeoutError",
    "AutocommitWarning",
    "ClaimedJob",
    "Discard",
    "DuplicateJobError",
    "EnqueueRaceError",
    "Enqueued",
    "Enqueuing",
    "HandlerError",
    "HookError",
    "InvalidJobError",
    "InvalidJobTypeError",
    "JobContext",
    "Jobs",
    "MigrationError",
    "NeedsOwnTransactionError",
    "PayloadMisfitError",
    "Retry",
    "Row",
    "SaJobsError",
    "SchemaVersionError",
    "Snooze",
    "StepNotFoundError",
    "Tables",
    "TransactionError",
    "UnknownHandlerError",
    "Worker",
    "WorkerError",
    "WorkerOptionError",
    "attach",
    "cancel",
    "dispose_after_fork",
    "enqueue",
    "enqueue_from_select",
    "enqueue_many",
    "equal_jitter",
    "exponential",
    "fixed",
    "full_jitter",
    "retry",
]
