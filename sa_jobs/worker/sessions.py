"""The session of a transactional handler: its commit is the job's finish.

Each job gets a session of its own, which connects at first use and refuses `commit()` and
`close()`. After the handler the guarded finish is written through it as the last statement: if that
changes the row, everything commits together; if the job is no longer ours, everything rolls back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import event
from sqlalchemy.orm import Session

from sa_jobs import claims
from sa_jobs.claims import Settled
from sa_jobs.connections import connection_of
from sa_jobs.context import ClaimedJob
from sa_jobs.errors import TransactionError
from sa_jobs.models import Tables
from sa_jobs.outcome import Finished

_WAY_OUT = (
    "sa-jobs commits it together with the job's finish: return from the handler instead; for a "
    "part that may roll back alone use session.begin_nested(), for one that must be committed at "
    "once open a session of your own"
)


def guard(session: Session) -> None:
    """Make a session refuse to end the transaction that belongs to the job's finish."""

    def refuse(what: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise TransactionError(f"session.{what}() was called on the job's session: {_WAY_OUT}")

        return refused

    for method in ("commit", "close", "reset", "invalidate"):
        setattr(session, method, refuse(method))
    # Also for the ways around: `with session.begin()`, or the transaction's own commit().
    event.listen(session, "before_commit", _refuse_commit)


def _refuse_commit(session: Session) -> None:
    if not session.in_nested_transaction():
        raise TransactionError(f"the job's session was committed by its handler: {_WAY_OUT}")


def unguard(session: Session) -> None:
    """Make the session an ordinary one again."""
    for method in ("commit", "close", "reset", "invalidate"):
        session.__dict__.pop(method, None)
    if event.contains(session, "before_commit", _refuse_commit):
        event.remove(session, "before_commit", _refuse_commit)


def finish(
    session: Session, job: ClaimedJob, outcome: Finished, *, worker: str, tables: Tables
) -> bool:
    """Write the job's finish as the session's last statement; return whether it was still ours.

    The caller commits, or rolls back where it was not.
    """
    connection = connection_of(session, tables)
    return bool(claims.settle(connection, [Settled(job, outcome)], worker=worker, tables=tables))


def abandon(session: Session) -> None:
    """Roll the session back and close it, whatever state its handler left it in."""
    unguard(session)
    try:
        session.rollback()
        session.close()
    except Exception:
        # The connection is lost or confused: it must not go back to the pool.
        session.invalidate()
