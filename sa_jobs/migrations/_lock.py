"""The lock for which migrations of one database wait in turn."""

from __future__ import annotations

import time

from sqlalchemy import Connection, text

from sa_jobs.errors import MigrationError

WAIT_SECONDS = 60.0
"""How long a migration waits for another one in the same database."""

# One lock for each database; the number is the bytes of "sa_jobs".
LOCK_KEY = int.from_bytes(b"sa_jobs", "big")

_OURS = (
    "locktype = 'advisory' AND granted AND objsubid = 1"
    f" AND classid = {LOCK_KEY >> 32} AND objid = {LOCK_KEY & 0xFFFFFFFF}"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


def take_lock(connection: Connection, wait_seconds: float) -> None:
    """Take the lock for the transaction, or raise MigrationError where another one keeps it."""
    # Bound to the transaction: a process that is killed lets go of it. Tried again and again,
    # since a lock_timeout that strikes would leave the host's transaction aborted. Not asleep in
    # the server, where a statement holds a snapshot: an index that the other one builds
    # concurrently would wait for the end of this transaction, and so both for each other.
    deadline = time.monotonic() + wait_seconds
    tries = 0
    while not try_lock(connection):
        tries += 1
        if time.monotonic() >= deadline:
            raise still_locked(connection, wait_seconds)
        # A try that was under way when the build looked for snapshots is waited for all the same,
        # until this transaction ends.
        if tries % 10 == 0 and _holds_up_the_other(connection):
            raise MigrationError(
                "another migration of sa-jobs is building an index in this database, and must "
                "wait for the end of this transaction: run this again"
            )
        pause(connection, 0.1)
    if tries and connection.scalar(
        text(
            "SELECT current_setting('transaction_isolation') IN ('repeatable read', 'serializable')"
        )
    ):
        raise MigrationError(
            "another migration of sa-jobs has ended meanwhile, and this transaction cannot see "
            "what it did, since its snapshot is older: run this again"
        )


def try_lock(connection: Connection) -> bool:
    """Return whether this transaction has the lock now; it does not wait."""
    return bool(connection.scalar(text(f"SELECT pg_try_advisory_xact_lock({LOCK_KEY})")))


def still_locked(connection: Connection, wait_seconds: float) -> MigrationError:
    """Return the error that another migration has had the lock for too long."""
    holder = connection.scalar(text(f"SELECT max(pid) FROM pg_locks WHERE {_OURS}"))
    return MigrationError(
        f"another migration of sa-jobs has been running in this database for {wait_seconds:g} "
        f"seconds (server process {holder}): let it end, then run this again"
    )


def keep_lock(connection: Connection) -> None:
    """Take the lock, which the transaction holds, for the session as well."""
    connection.execute(text(f"SELECT pg_advisory_lock({LOCK_KEY})"))


def release_lock(connection: Connection) -> None:
    """Give back what keep_lock() took."""
    connection.execute(text(f"SELECT pg_advisory_unlock({LOCK_KEY})"))


def holds_lock(connection: Connection) -> bool:
    """Return whether this connection holds the lock: in autocommit it is gone at once."""
    return bool(
        connection.scalar(
            text(f"SELECT count(*) > 0 FROM pg_locks WHERE {_OURS} AND pid = pg_backend_pid()")
        )
    )


def pause(connection: Connection, seconds: float) -> None:
    """Wait without a statement in the server, and let an event loop under us go on."""
    if connection.dialect.is_async:
        import asyncio

        from sqlalchemy.util import await_only

        await_only(asyncio.sleep(seconds))
    else:
        time.sleep(seconds)


def _holds_up_the_other(connection: Connection) -> bool:
    return bool(
        connection.scalar(
            text(
                "SELECT bool_or(pg_backend_pid() = ANY (pg_blocking_pids(pid)))"
                f" FROM pg_locks WHERE {_OURS}"
            )
        )
    )
