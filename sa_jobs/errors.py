"""Every exception that sa-jobs raises on purpose, and its warning."""

from __future__ import annotations


class SaJobsError(Exception):
    """Base of every error that sa-jobs raises on purpose."""


class InvalidJobError(SaJobsError, ValueError):
    """A job's value is outside what the queue can hold; nothing was added or changed."""


class InvalidJobTypeError(SaJobsError, TypeError):
    """A job's value has a type that the queue cannot hold; nothing was sent to the database."""


class PayloadMisfitError(SaJobsError, ValueError):
    """A job's payload does not fit its handler's parameters, as after a deploy that changed them.

    The attempt failed before the handler was called. The text says where and why, without values.
    """


class AutocommitWarning(UserWarning):
    """A job was enqueued on a connection in AUTOCOMMIT mode, which commits it at once, alone."""


class UnknownHandlerError(SaJobsError, LookupError):
    """A handler was named that the registry does not have; nothing was sent to the database."""


class DuplicateJobError(SaJobsError):
    """A job with this key exists already; nothing was changed, and the transaction stays usable.

    By `on_conflict="raise"`, or by "replace" where that job is of another handler or queue. `id` is
    the existing job's.
    """

    def __init__(self, message: str, *, id: int) -> None:
        super().__init__(message)
        self.id = id


class EnqueueRaceError(SaJobsError):
    """The job that holds the key kept appearing and vanishing; roll back and try again."""


class HandlerError(SaJobsError, TypeError):
    """A function cannot be registered as a handler; the text says why, and the way out."""


class HookError(SaJobsError, TypeError):
    """A function cannot be registered as a hook; the text says why, and the way out."""


class AttemptTimeoutError(SaJobsError, TimeoutError):
    """What hooks get for an attempt that ran out of its handler's time-out; never raised."""


class AttemptLostError(SaJobsError):
    """What hooks get for an attempt that ended without its handler's word; never raised.

    Its worker died, or lost the database for longer than the lease, or its end was refused there.
    """


class AttachError(SaJobsError, ValueError):
    """`attach()` cannot put the tables into this metadata under this name."""


class SchemaVersionError(SaJobsError):
    """The tables are absent, or too old or new for this package; the text names the command."""


class MigrationError(SaJobsError):
    """A migration step cannot run as asked; the text names the step and the way out."""


class StepNotFoundError(MigrationError, LookupError):
    """A revision names a migration step that the installed package does not have."""


class NeedsOwnTransactionError(MigrationError):
    """An index on a large table must be built outside the transaction that somebody else began."""


class DatabaseUrlError(SaJobsError, ValueError):
    """No database is named, or not by the URL of a PostgreSQL one; the text says what to set."""


class WorkerError(SaJobsError):
    """The worker cannot start or go on; the text says what to change."""


class WorkerOptionError(WorkerError, ValueError):
    """An option of the worker has a value that cannot work; nothing was started."""


class TransactionError(SaJobsError, RuntimeError):
    """A transactional handler tried to end the transaction that its job's finish belongs to."""
