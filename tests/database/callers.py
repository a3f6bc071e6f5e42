"""The kinds of sessions and connections that an application enqueues with, on every driver."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import flask_sqlalchemy
import flask_sqlalchemy_lite
import sqlmodel
from flask import Flask
from sqlalchemy import Connection, NullPool, create_engine
from sqlalchemy.engine import URL, make_url
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import scoped_session, sessionmaker

# Each kind once on a driver, and each driver with a session and with a connection.
ALL_CALLERS = [
    "psycopg Session",
    "psycopg scoped_session",
    "psycopg Connection",
    "psycopg Flask-SQLAlchemy",
    "psycopg Flask-SQLAlchemy-Lite",
    "psycopg SQLModel",
    "psycopg2 Session",
    "psycopg2 Connection",
    "pg8000 Session",
    "pg8000 Connection",
    "psycopg AsyncSession",
    "psycopg async_scoped_session",
    "psycopg AsyncConnection",
    "asyncpg AsyncSession",
    "asyncpg async_scoped_session",
    "asyncpg AsyncConnection",
]

# For what is the same on all of a kind: every driver, every way of calling.
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
        if isinstance(self.session, sqlmodel.Session):
            # Its own execute() is deprecated.
            return self.session.connection().execute(statement)
        return self.wait(self.session.execute(statement))

    def in_sync(self, function: Callable[[Any], Any]) -> Any:
        """Run a function on the session or connection, or on the one within an asynchronous one."""
        session = self.session
        if isinstance(session, async_scoped_session):
            session = session()
        if hasattr(session, "run_sync"):
            return self.wait(session.run_sync(function))
        return function(session)


Open = Callable[..., AbstractContextManager[Caller]]


@dataclass(frozen=True)
class Application:
    """An application's engine: what opens its sessions or connections, also in other threads."""

    name: str
    open: Open

    @property
    def has_sessions(self) -> bool:
        return not self.name.endswith("Connection")


@contextmanager
def open_application(name: str, url: str, **engine_options: Any) -> Iterator[Application]:
    """Make the engine of a caller of ALL_CALLERS on a database."""
    driver, kind = name.split()
    driver_url = make_url(url).set(drivername=f"postgresql+{driver}")
    if kind.startswith("Flask"):
        yield Application(name, _flask(kind, driver_url, engine_options))
    elif kind.lower().startswith("async"):
        yield Application(name, _asynchronous(kind, driver_url, engine_options))
    else:
        engine = create_engine(driver_url, **engine_options)
        makers: dict[str, Callable[..., Any]] = {
            "Connection": engine.connect,
            "Session": sessionmaker(engine),
            "scoped_session": lambda **options: scoped_session(sessionmaker(engine, **options)),
            "SQLModel": sessionmaker(engine, class_=sqlmodel.Session),
        }
        yield Application(name, _synchronous(makers[kind]))
        engine.dispose()


@contextmanager
def open_caller(name: str, url: str, **engine_options: Any) -> Iterator[Caller]:
    """Open a caller of ALL_CALLERS on a database."""
    with open_application(name, url, **engine_options) as application, application.open() as caller:
        yield caller


def _synchronous(make: Callable[..., Any]) -> Open:
    @contextmanager
    def open_it(**options: Any) -> Iterator[Caller]:
        session = make(**options)
        try:
            yield Caller(session)
        finally:
            session.close()

    return open_it


def _flask(kind: str, url: URL, engine_options: dict[str, Any]) -> Open:
    text = url.render_as_string(hide_password=False)

    @contextmanager
    def open_it(**options: Any) -> Iterator[Caller]:
        app = Flask("shop")
        db: Any
        if kind == "Flask-SQLAlchemy":
            db = flask_sqlalchemy.SQLAlchemy(app=None, session_options=options)
            app.config["SQLALCHEMY_DATABASE_URI"] = text
            app.config["SQLALCHEMY_ENGINE_OPTIONS"] = engine_options
        else:
            db = flask_sqlalchemy_lite.SQLAlchemy(session_options=options)
            app.config["SQLALCHEMY_ENGINES"] = {"default": {"url": text, **engine_options}}
        db.init_app(app)
        with app.app_context():
            try:
                yield Caller(db.session)
            finally:
                db.session.close()
                db.engine.dispose()

    return open_it


def _asynchronous(kind: str, url: URL, engine_options: dict[str, Any]) -> Open:
    # Without a pool, so that each event loop has connections of its own.
    engine = create_async_engine(url, poolclass=NullPool, **engine_options)

    @contextmanager
    def open_it(**options: Any) -> Iterator[Caller]:
        loop = asyncio.new_event_loop()

        def wait(value: Any) -> Any:
            if not inspect.isawaitable(value):
                return value

            async def awaited() -> Any:
                return await value

            return loop.run_until_complete(awaited())

        session: Any
        if kind == "AsyncConnection":
            session = wait(engine.connect())
        elif kind == "async_scoped_session":
            maker = async_sessionmaker(engine, **options)
            session = async_scoped_session(maker, scopefunc=lambda: "test")
        else:
            session = AsyncSession(engine, **options)
        try:
            yield Caller(session, wait)
        finally:
            wait(session.close())
            loop.close()

    return open_it


def in_two_phases(session: Any, work: Callable[[Any], object]) -> None:
    """Do work on a new session or connection in a transaction of two phases."""
    if isinstance(session, Connection):
        transaction = session.begin_twophase()
        work(session)
        transaction.prepare()
        transaction.commit()
    else:
        work(session)
        # Which a scoped session does not offer.
        (session() if isinstance(session, scoped_session) else session).prepare()
        session.commit()
