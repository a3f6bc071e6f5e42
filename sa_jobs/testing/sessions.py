"""The test's session, while a handler may use it: what it may end, and what is taken back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import TYPE_CHECKING, Any, overload

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, SessionTransaction

from sa_jobs.worker import sessions

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

_ENDINGS = ("commit", "rollback", "close", "reset", "invalidate")


@overload
def rolled_back(engine: Engine, **options: Any) -> AbstractContextManager[Session]: ...


@overload
def rolled_back(
    engine: AsyncEngine, **options: Any
) -> AbstractAsyncContextManager[AsyncSession]: ...


def rolled_back(engine: Any, **options: Any) -> Any:
    """Give a session for a `with` block, in a transaction that is rolled back at the block's end.

    What is committed in the block is seen there, and by nobody else. With an AsyncEngine it is an
    AsyncSession, which keeps what it has loaded over a commit, for an `async with` block. `options`
    are the session's.
    """
    options = {"join_transaction_mode": "create_savepoint", **options}
    if hasattr(engine, "sync_engine"):
        return _rolled_back_async(engine, {"expire_on_commit": False, **options})
    return _rolled_back(engine, options)


@contextmanager
def _rolled_back(engine: Engine, options: dict[str, Any]) -> Iterator[Session]:
    with engine.connect() as connection:
        transaction = connection.begin()
        try:
            with Session(connection, **options) as session:
                yield session
        finally:
            transaction.rollback()


@asynccontextmanager
async def _rolled_back_async(
    engine: AsyncEngine, options: dict[str, Any]
) -> AsyncIterator[AsyncSession]:
    # Whoever has an AsyncEngine has imported it.
    from sqlalchemy.ext.asyncio import AsyncSession

    async with engine.connect() as connection:
        transaction = await connection.begin()
        try:
            async with AsyncSession(connection, **options) as session:
                yield session
        finally:
            await transaction.rollback()


class Lent:
    """The test's session, lent to one handler: a savepoint keeps apart what the handler does.

    A transactional handler cannot end the session's transaction, as under a worker. Any other has
    its own sessions under a worker; if one of them is the test's here, what the handler commits is
    kept, and what it has not committed by its end is taken back. For both, `rollback()` goes back
    to the savepoint: the test's own work is not the handler's to undo.
    """

    def __init__(self, session: Session, connection: Connection, *, transactional: bool) -> None:
        self._session = session
        self._transactional = transactional
        self._before = {
            name: session.__dict__[name] for name in _ENDINGS if name in session.__dict__
        }
        if transactional:
            sessions.guard(session)
        self._savepoint = session.begin_nested()
        self._connection = connection
        if transactional:
            # The guard would refuse too late: SQLAlchemy has given up the transaction by then.
            self._put("commit", session.commit, on=connection)
        self._put("rollback", self._start_again)
        if not transactional:
            self._put("commit", self._commit)
            for name in ("close", "reset", "invalidate"):
                self._put(name, self._start_again)

    def give_back(self) -> None:
        """Make the session an ordinary one again, with what the handler did still to be decided."""
        if self._transactional:
            sessions.unguard(self._session)
        for name in _ENDINGS:
            self._session.__dict__.pop(name, None)
        self._session.__dict__.update(self._before)
        self._connection.__dict__.pop("commit", None)

    def keep(self) -> None:
        """Keep what the handler did."""
        self._savepoint.commit()

    def undo(self) -> None:
        """Take back what the handler did and has not committed."""
        if self._is_open():
            self._savepoint.rollback()

    def _put(self, name: str, function: Callable[..., Any], on: Any = None) -> None:
        setattr(self._session if on is None else on, name, function)

    def _start_again(self, *_: Any, **__: Any) -> None:
        self.undo()
        self._savepoint = self._session.begin_nested()

    def _commit(self) -> None:
        type(self._session).commit(self._session)
        self._savepoint = self._session.begin_nested()

    def _is_open(self) -> bool:
        transaction: SessionTransaction | None = self._session.get_nested_transaction()
        while transaction is not None and transaction is not self._savepoint:
            transaction = transaction.parent
        return transaction is not None
