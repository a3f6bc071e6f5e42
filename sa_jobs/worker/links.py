"""The worker's own connections: one long-held per role, apart from the host's pool.

They come from the host's engine by the same dialect, creator and arguments, so that handlers which
take every pooled connection cannot starve a heartbeat.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from sa_jobs import presence
from sa_jobs.errors import WorkerError

# Half-open connections are found within about 25 s, whatever the kernel's defaults.
KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3
USER_TIMEOUT_MILLISECONDS = 25_000


def control_engine(engine: Any) -> Engine:
    """Return a synchronous psycopg engine to the host engine's database, apart from its pool.

    A psycopg engine keeps its creator, connect_args and pool events; for another driver the engine
    is made from the URL. Both keep the `schema_translate_map`. Raises WorkerError where neither can
    be.
    """
    host: Engine = getattr(engine, "sync_engine", engine)
    if host.dialect.name != "postgresql":
        raise WorkerError(
            f"a worker needs PostgreSQL, and this engine is for {host.dialect.name}: there, jobs "
            "can be enqueued in unit tests, but not run"
        )
    if host.dialect.driver == "psycopg" and not host.dialect.is_async:
        made = Engine(host.pool.recreate(), host.dialect, host.url, hide_parameters=True)
        return mapped_as(host, made)
    url = host.url.set(drivername="postgresql+psycopg")
    try:
        return mapped_as(host, create_engine(url, poolclass=NullPool, hide_parameters=True))
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise WorkerError(
            f"the worker needs a psycopg engine and cannot make one from {host.url!r} ({error}): "
            "pass Worker(control_engine=create_engine('postgresql+psycopg://...'))"
        ) from error


def mapped_as(host: Engine, made: Engine) -> Engine:
    """Return an engine that finds the tables where the host's `schema_translate_map` has them."""
    given = host.get_execution_options().get("schema_translate_map")
    return made.execution_options(schema_translate_map=given) if given else made


class Link:
    """One role's connection: opened at first use, held, and opened anew after it was dropped.

    Not for use by two threads at once. It is in autocommit mode, so that it is never idle in a
    transaction, and a process that is stopped half-way holds no lock.
    """

    def __init__(self, engine: Engine, application_name: str) -> None:
        # A pool of its own: the host's may be as small as one connection.
        pool = engine.pool.recreate()
        made = Engine(pool, engine.dialect, engine.url, hide_parameters=True)
        self._engine = mapped_as(engine, made)
        self._application_name = application_name[:63]
        self._connection: Connection | None = None

    def connection(self) -> Connection:
        """Return the connection, opening it if there is none."""
        if self._connection is None or self._connection.invalidated:
            self.drop()
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            try:
                presence.prepare_session(connection, self._application_name)
                _set_socket_options(connection)
            except BaseException:
                connection.invalidate()
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def drop(self) -> None:
        """Close the connection, whatever state it is in; the next use opens a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.invalidate()
            finally:
                connection.close()

    def interrupt(self) -> None:
        """Ask the server to give up the statement that runs, if one does; from any thread."""
        connection = self._connection
        if connection is not None and not connection.invalidated:
            with contextlib.suppress(Exception):
                connection.connection.driver_connection.cancel()  # type: ignore[union-attr]

    def close(self) -> None:
        """Close the connection and its pool."""
        self.drop()
        self._engine.dispose()


def _set_socket_options(connection: Connection) -> None:
    descriptor = connection.connection.driver_connection.fileno()  # type: ignore[union-attr]
    with socket.socket(fileno=os.dup(descriptor)) as link:
        if link.family not in (socket.AF_INET, socket.AF_INET6):
            return
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", USER_TIMEOUT_MILLISECONDS),
        ):
            number = getattr(socket, option, None)  # not every system has each
            if number is not None:
                link.setsockopt(socket.IPPROTO_TCP, number, value)
