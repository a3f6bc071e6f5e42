"""The sessions of handlers that ask for one: from the host's factory, or made from its engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import Pool, QueuePool

from sa_jobs.connections import engine_of
from sa_jobs.errors import WorkerError
from sa_jobs.handlers import Jobs
from sa_jobs.models import Tables
from sa_jobs.poolers import avoid_prepared_statements
from sa_jobs.worker import sessions
from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.links import mapped_as

logger = logging.getLogger("sa_jobs.worker")

_CHECK_SECONDS = 60.0


class Factories:
    """Makes sessions for handlers, and disposes of the engines that it had to make for them."""

    def __init__(
        self,
        engine: Any,
        jobs: Jobs,
        control: Engine,
        sync: Callable[[], Any] | None,
        asynchronous: Callable[[], Any] | None,
        *,
        concurrency: int,
    ) -> None:
        self._concurrency = concurrency
        self._looked_at: set[Pool] = set()
        self._made: Engine | None = None
        self._made_async: Any = None
        self.sync = sync
        self.asynchronous = asynchronous
        self._needs_sync = bool(_asking(jobs, coroutines=False))
        if self.sync is None and self._needs_sync:
            self.sync = sessionmaker(self._engine(engine, control))
        asking = _asking(jobs, coroutines=True)
        self._needs_async = bool(asking)
        if self.asynchronous is None and asking:
            self.asynchronous = self._async_sessions(engine, asking[0])

    def check(self, tables: Tables, coroutines: Coroutines) -> None:
        """Raise WorkerError if the sessions that handlers will get cannot be transactional."""
        if self.sync is not None:
            # Handlers may also use sessions of the host's factory without asking for one.
            session = self.sync()
            self._warn_of_small_pool(engine_of(session, tables))
            if self._needs_sync:
                sessions.check_isolation(session, tables)
            sessions.forget(self.sync)
        factory = self.asynchronous
        if self._needs_async and factory is not None:

            async def check() -> None:
                session = factory()
                self._warn_of_small_pool(engine_of(session.sync_session, tables))
                await session.run_sync(sessions.check_isolation, tables)
                sessions.forget(factory)

            coroutines.call(check, _CHECK_SECONDS)

    def _warn_of_small_pool(self, engine: Engine | None) -> None:
        pool = None if engine is None else engine.pool
        if not isinstance(pool, QueuePool) or pool._max_overflow < 0 or pool in self._looked_at:
            return
        # Once, however often the start is tried.
        self._looked_at.add(pool)
        most = pool.size() + pool._max_overflow
        if most < self._concurrency:
            logger.warning(
                "the engine's pool gives %d connections to %d handlers: those beyond wait for "
                "one, and fail after pool_timeout; give it pool_size=%d",
                most,
                self._concurrency,
                self._concurrency,
            )

    def close(self) -> None:
        """Dispose of the synchronous engine that was made, if any."""
        if self._made is not None:
            self._made.dispose()

    async def close_async(self) -> None:
        """Dispose of the asynchronous engine that was made, on the event loop that used it."""
        if self._made_async is not None:
            await self._made_async.dispose()

    def _engine(self, engine: Any, control: Engine) -> Engine:
        if not hasattr(engine, "sync_engine"):
            host: Engine = engine
            return host
        made = Engine(control.pool.recreate(), control.dialect, control.url)
        self._made = mapped_as(control, made)
        return self._made

    def _async_sessions(self, engine: Any, handler: str) -> Callable[[], Any]:
        try:
            from sqlalchemy.ext.asyncio import (
                AsyncEngine,
                async_sessionmaker,
                create_async_engine,
            )
        except ImportError as error:
            raise WorkerError(
                f"handler {handler!r} asks for an AsyncSession, which needs greenlet: "
                'pip install "sa-jobs[asyncio]"'
            ) from error
        if isinstance(engine, AsyncEngine):
            # Asynchronous connections belong to the event loop that opened them, and the host's
            # may be another than the worker's: never share its pool.
            host = engine.sync_engine
            apart = Engine(host.pool.recreate(), host.dialect, host.url)
            made = AsyncEngine(mapped_as(host, apart))
        else:
            made = create_async_engine(
                engine.url.set(drivername="postgresql+psycopg"),
                pool_size=self._concurrency,
                max_overflow=self._concurrency,
            )
            avoid_prepared_statements(made.sync_engine)
            made = AsyncEngine(mapped_as(engine, made.sync_engine))
        self._made_async = made
        return async_sessionmaker(made)


def _asking(jobs: Jobs, *, coroutines: bool) -> list[str]:
    return [
        handler.name
        for handler in jobs
        if handler.signature.session is not None and handler.signature.is_coroutine is coroutines
    ]
