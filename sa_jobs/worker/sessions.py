"""The session of a transactional handler: its commit is the job's finish.

Each job gets a session of its own, which connects at first use and refuses to be committed or
closed. After the handler the guarded finish is written through it as the last statement: if that
changes the row, everything commits together; if the job is no longer ours, everything rolls back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

from sqlalchemy import Connection, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.util import ThreadLocalRegistry

from sa_jobs import claims, poolers
from sa_jobs.claims import Settled
from sa_jobs.connections import connection_of
from sa_jobs.context import ClaimedJob
from sa_jobs.errors import SaJobsError, TransactionError, WorkerError
from sa_jobs.models import Tables
from sa_jobs.outcome import Finished
from sa_jobs.worker.faults import first_line

logger = logging.getLogger("sa_jobs.worker")

_WAY_OUT = (
    "sa-jobs commits it together with the job's finish: return from the handler instead; for a "
    "part that may roll back alone use session.begin_nested(), for one that must be committed at "
    "once open a session of your own"
)
_REFUSED = ("commit", "close", "reset", "invalidate")


def guard(session: Session) -> None:
    """Make a session refuse to end the transaction that belongs to the job's finish."""

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise TransactionError(f"session.{what}() was called on the job's session: {_WAY_OUT}")

        return refused

    for method in _REFUSED:
        setattr(session, method, refuse(method))
    # Also for the ways around: `with session.begin()`, session.connection().commit(), ...
    event.listen(session, "before_commit", _refuse_session_commit)
    event.listen(session, "after_begin", _guard_connection)


def unguard(session: Session) -> None:
    """Make the session an ordinary one again."""
    for method in _REFUSED:
        session.__dict__.pop(method, None)
    for name, listener in (
        ("before_commit", _refuse_session_commit),
        ("after_begin", _guard_connection),
    ):
        if event.contains(session, name, listener):
            event.remove(session, name, listener)
    for connection in session.info.pop(_GUARDED, ()):
        if event.contains(connection, "commit", _refuse_commit):
            event.remove(connection, "commit", _refuse_commit)


def finish(
    session: Session, job: ClaimedJob, outcome: Finished, *, worker: str, tables: Tables
) -> bool:
    """Write the job's finish as the session's last statement; return whether it was still ours.

    The caller commits, or rolls back where it was not.
    """
    return claims.finish_in_transaction(
        connection_of(session, tables), Settled(job, outcome), worker=worker, tables=tables
    )


class FinishLostError(SaJobsError):
    """The connection was lost between the handler's return and the answer to the commit."""


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Tell a connection that is lost while the finish is written from an error of the handler."""
    try:
        yield
    except DBAPIError as error:
        if not error.connection_invalidated:
            raise  # Such as a deferred constraint: what the handler did cannot be committed.
        raise FinishLostError(
            "the handler returned, and its session's connection was lost before the job's finish "
            f"was committed, so that its work was rolled back: {first_line(error)}"
        ) from None


def abandon(session: Session) -> None:
    """Roll the session back and close it, whatever state its handler left it in."""
    try:
        unguard(session)
        session.rollback()
        session.close()
    except Exception:
        # The connection is lost or confused: it must not go back to the pool.
        session.invalidate()


def forget(factory: Any) -> None:
    """Let a scoped_session make a new session for the next job.

    What it still holds is closed, unless that must be awaited, be it of a handler that used it
    without asking for a session. Any other factory makes a new one each time.
    """
    # The scope may be one that is absent here, such as an application's context.
    if isinstance(factory, scoped_session):
        with contextlib.suppress(Exception):
            factory.remove()
    registry = getattr(factory, "registry", None)
    if registry is not None:
        with contextlib.suppress(Exception):
            registry.clear()


def forget_in_task(factory: Any) -> None:
    """Do so on an event loop, where the scope of a thread is that of other tasks, too."""
    if not isinstance(getattr(factory, "registry", None), ThreadLocalRegistry):
        forget(factory)


async def forget_async(factory: Any) -> None:
    """Let an async_scoped_session make a new session for the next job, as `forget` does.

    What it still holds is rolled back and closed first, even if the task is cancelled meanwhile.
    """
    registry = getattr(factory, "registry", None)
    if registry is None:
        return
    left: Any = None
    with contextlib.suppress(Exception):
        # Here, and not in the task that closes it: the scope may be the task.
        left = registry() if registry.has() else None
        registry.clear()
    if left is not None:
        await asyncio.shield(left.run_sync(abandon))


def check_isolation(session: Session, tables: Tables) -> None:
    """Raise WorkerError unless handlers' sessions are READ COMMITTED; the session is closed.

    Under a stricter level the finish would fail for each job that outlives a heartbeat, which
    renews the lease in the same row; in autocommit the effects would not wait for the finish.
    """
    try:
        connection = connection_of(session, tables)
        if poolers.is_pooled(connection) and poolers.prepares_statements(connection):
            logger.warning(
                "the sessions of handlers go through a connection pooler and prepare statements, "
                "which in transaction mode clash with those of other clients unless the pooler "
                "takes care of them: see create_engine(connect_args={'prepare_threshold': None})"
            )
        autocommit = getattr(connection.connection.dbapi_connection, "autocommit", False)
        level = "AUTOCOMMIT" if autocommit is True else connection.get_isolation_level()
    finally:
        session.close()
    if level != "READ COMMITTED":
        raise WorkerError(
            f"the sessions of handlers are at {level}, and must be READ COMMITTED: pass "
            "Worker(session_factory=sessionmaker(engine.execution_options("
            'isolation_level="READ COMMITTED"))), or async_session_factory= for coroutines'
        )


_GUARDED = "sa_jobs_guarded_connections"


def _guard_connection(session: Session, transaction: Any, connection: Connection) -> None:
    # A session that routes by table or operation has several.
    guarded = session.info.setdefault(_GUARDED, [])
    if not any(connection is known for known in guarded):
        guarded.append(connection)
        event.listen(connection, "commit", _refuse_commit)


def _refuse_session_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        _refuse_commit(session)


def _refuse_commit(_: Any) -> None:
    raise TransactionError(f"the job's session was committed by its handler: {_WAY_OUT}")
