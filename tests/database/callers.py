"""The kinds of sessions and connections that an application enqueues with, on every driver."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

CALLERS = [
    "psycopg Session",
    "psycopg scoped_session",
    "psycopg Connection",
    "psycopg2 Session",
    "pg8000 Connection",
    "asyncpg AsyncSession",
    "asyncpg AsyncConnection",
    "psycopg async_scoped_session",
]


@dataclass
class Caller:
    """A session or connection; what is awaitable is awaited."""

    session: Any
    wait: Callable[[Any], Any] = field(default=lambda value: value)

    def __call__(self, operation: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.wait(operation(self.session, *args, **kwargs))

    def commit(self) -> None:
        self.wait(self.session.commit())

    def rollback(self) -> None:
        self.wait(self.session.rollback())

    def savepoint(self) -> Caller:
        """Begin a savepoint; `commit` releases it and `rollback` rolls back to it."""
        return Caller(self.wait(self.session.begin_nested()), self.wait)

    def execute(self, statement: Any) -> Any:
        return self.wait(self.session.execute(statement))


@contextmanager
def open_caller(name: str, url: str, **engine_options: Any) -> Iterator[Caller]:
    """Open a caller of CALLERS on a database."""
    driver, kind = name.split()
    driver_url = make_url(url).set(drivername=f"postgresql+{driver}")
    if kind.lower().startswith("async"):
        with _asynchronous(kind, driver_url, engine_options) as caller:
            yield caller
        return
    engine = create_engine(driver_url, **engine_options)
    session: Any
    if kind == "Connection":
        session = engine.connect()
    elif kind == "scoped_session":
        session = scoped_session(sessionmaker(engine))
    else:
        session = Session(engine)
    try:
        yield Caller(session)
    finally:
        session.close()
        engine.dispose()


@contextmanager
def _asynchronous(kind: str, url: Any, engine_options: dict[str, Any]) -> Iterator[Caller]:
    loop = asyncio.new_event_loop()

    def wait(value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def awaited() -> Any:
            return await value

        return loop.run_until_complete(awaited())

    engine = create_async_engine(url, **engine_options)
    session: Any
    if kind == "AsyncConnection":
        session = wait(engine.connect())
    elif kind == "async_scoped_session":
        session = async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: "test")
    else:
        session = AsyncSession(engine)
    try:
        yield Caller(session, wait)
    finally:
        wait(session.close())
        wait(engine.dispose())
        loop.close()
