"""The worker's own connections: one long-held per role, apart from the host's pool.

They come from the host's engine by the same dialect, creator and arguments, so that handlers which
take every pooled connection cannot starve a heartbeat.
"""

from __future__ import annotations

import contextlib
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import ArgumentError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from sa_jobs import presence
from sa_jobs.errors import WorkerError
from sa_jobs.poolers import avoid_prepared_statements
from sa_jobs.worker.answers import Answers
from sa_jobs.worker.opening import Opening, bound_attempts


def control_engine(engine: Any) -> Engine:
    """Return a synchronous psycopg engine to the host engine's database, apart from its pool.

    A psycopg engine keeps its creator, connect_args and pool events; for another driver the engine
    is made from the URL. Both keep the `schema_translate_map`. Through a pooler its connections
    prepare no statements. Raises WorkerError where neither can be.
    """
    made = _apart_from_the_pool(engine)
    avoid_prepared_statements(made)
    return made


def _apart_from_the_pool(engine: Any) -> Engine:
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

    Not for use by two threads at once, except `wake` and what `answers` offers. It is in autocommit
    mode, so that it is never idle in a transaction, and a process that is stopped half-way holds
    no lock. Connecting and each statement get `seconds` for an answer.
    """

    def __init__(self, engine: Engine, application_name: str, *, seconds: float) -> None:
        # A pool of its own: the host's may be as small as one connection.
        pool = engine.pool.recreate()
        made = Engine(pool, engine.dialect, engine.url, hide_parameters=True)
        bound_attempts(made)
        self._engine = mapped_as(engine, made)
        self._application_name = application_name[:63]
        self._connection: Connection | None = None
        self._opening: Opening | None = None
        # `put` may be called at any instant, even by a signal handler.
        self._opened: SimpleQueue[Opening | None] = SimpleQueue()
        self.answers = Answers(made, seconds)

    def connection(self) -> Connection:
        """Return the connection, opening it if there is none.

        Raises TimeoutError if that takes too long. The attempt goes on, as with the next of several
        hosts, and the next call waits for it again.
        """
        if self._connection is None or self._connection.invalidated:
            if self._opening is None:
                self.drop()
                self._forget_wakes()
                self._opening = Opening(self._open, self._opened, self.answers.seconds)
                self._opening.start()
            try:
                opening = self._opened.get(timeout=self.answers.seconds)
            except Empty:
                opening = None
            if opening is None:
                raise TimeoutError("no connection to the server yet")
            self._opening = None
            self._connection = opening.result()
        return self._connection

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that is not known to be lost."""
        return self._connection is not None and not self._connection.invalidated

    def fault(self, error: BaseException) -> BaseException:
        """Drop the connection after an error, and return what to say of it."""
        if self.drop():
            return TimeoutError(f"no answer from the server within {self.answers.seconds:g} s")
        return error

    def drop(self) -> bool:
        """Close the connection, whatever state it is in; the next use opens a new one.

        Returns whether it was given up since the server did not answer.
        """
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.invalidate()
        finally:
            if connection is not None:
                connection.close()
            gave_up = self._opening is None and self.answers.close()
        return gave_up

    def _forget_wakes(self) -> None:
        # They were for a wait that is over.
        with contextlib.suppress(Empty):
            while True:
                self._opened.get_nowait()

    def wake(self) -> None:
        """End the wait for a connection that is being opened; from any thread or signal handler."""
        self._opened.put(None)

    def close(self) -> None:
        """Close the connection and its pool."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.abandon()
        self.drop()
        self.answers.end()
        self._engine.dispose()

    def _open(self) -> Connection:
        connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            presence.prepare_session(connection, self._application_name)
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        finally:
            self.answers.settle()
        return connection
