"""Which connection a call runs on: the caller's own, inside the caller's transaction.

Every operation is written once, as a function on a session or connection of the synchronous kind.
`operation` gives it a second spelling: called with an asynchronous session or connection it returns
an awaitable, which runs the same function through SQLAlchemy's `run_sync`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Awaitable, Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from sqlalchemy import func, select, update
from sqlalchemy.engine import Connection, Engine, TwoPhaseTransaction
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from sa_jobs.autocommit import warn_if_autocommit
from sa_jobs.models import Tables

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session

    AsyncCaller = AsyncSession | async_scoped_session[Any] | AsyncConnection

Caller = Session | scoped_session[Any] | Connection

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Operation(Protocol[P, R_co]):
    """A function of a session or connection; with an asynchronous one it returns an awaitable."""

    @overload
    def __call__(self, session: Caller, /, *args: P.args, **kwargs: P.kwargs) -> R_co: ...

    @overload
    def __call__(
        self, session: AsyncCaller, /, *args: P.args, **kwargs: P.kwargs
    ) -> Awaitable[R_co]: ...


def operation(function: Callable[Concatenate[Caller, P], R]) -> Operation[P, R]:
    """Let a function of a synchronous session or connection take an asynchronous one too."""

    @functools.wraps(function)
    def call(session: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        run_sync = run_sync_of(session)
        if run_sync is None:
            return function(session, *args, **kwargs)
        return run_sync(lambda sync: function(sync, *args, **kwargs))

    return call


class OperationMethod(Protocol[P, R_co]):
    """As `Operation`, for a method."""

    def __get__(self, instance: object, owner: type | None = None) -> Operation[P, R_co]: ...


def operation_method(function: Callable[Concatenate[Any, Caller, P], R]) -> OperationMethod[P, R]:
    """Let a method of a synchronous session or connection take an asynchronous one too."""

    @functools.wraps(function)
    def call(self: Any, session: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        run_sync = run_sync_of(session)
        if run_sync is None:
            return function(self, session, *args, **kwargs)
        return run_sync(lambda sync: function(self, sync, *args, **kwargs))

    return cast("OperationMethod[P, R]", call)


def connection_of(caller: Any, tables: Tables) -> Connection:
    """Return the one connection on which all statements of a call run, in its transaction.

    A session is flushed first, so that rows which the job refers to exist (SQLAlchemy 2.0 does not
    flush before a Core statement). The connection is asked for as for an UPDATE of the jobs table,
    so that sessions which route reads to a replica, or have several binds, give the writable one.
    """
    if isinstance(caller, Connection):
        return caller
    if isinstance(caller, (Session, scoped_session)):
        caller.flush()
        # A copy, since sessions add to it.
        return caller.connection(bind_arguments=dict(_bind_arguments(tables)))
    raise TypeError(
        "expected a Session, scoped_session or Connection (or their asynchronous kinds), "
        f"not {type(caller).__name__}"
    )


def writable(caller: Any, tables: Tables) -> Connection:
    """Return the connection as `connection_of` does, for a call that may notify workers."""
    connection = connection_of(caller, tables)
    if connection.dialect.name == "postgresql" and (
        getattr(caller, "twophase", False)
        or isinstance(connection.get_transaction(), TwoPhaseTransaction)
    ):
        # PREPARE TRANSACTION fails in a transaction that has notified.
        connection.execute(select(func.set_config("sa_jobs.notify", "off", True)))
    return connection


def for_enqueue(caller: Any, tables: Tables) -> Connection:
    """Return the connection as `writable` does, and warn if it is in autocommit mode."""
    connection = writable(caller, tables)
    warn_if_autocommit(connection)
    return connection


def engine_of(session: Session, tables: Tables) -> Engine | None:
    """Return the engine whose connection `connection_of` would give, without connecting."""
    try:
        bind = session.get_bind(**_bind_arguments(tables))
    except UnboundExecutionError:
        return None
    return bind.engine


@lru_cache(maxsize=64)
def _bind_arguments(tables: Tables) -> dict[str, Any]:
    return {"mapper": tables.Job.__mapper__, "clause": update(tables.jobs)}  # type: ignore[attr-defined]


def run_sync_of(caller: Any) -> Callable[..., Any] | None:
    """Return the `run_sync` of an asynchronous session or connection, None for any other."""
    # Whoever holds an asynchronous session has imported the module; nobody else pays for it.
    module = sys.modules.get("sqlalchemy.ext.asyncio")
    if module is None:
        return None
    if isinstance(caller, module.async_scoped_session):
        caller = caller.registry()
    if isinstance(caller, (module.AsyncSession, module.AsyncConnection)):
        run_sync: Callable[..., Any] = caller.run_sync
        return run_sync
    return None
