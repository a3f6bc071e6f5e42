"""The sessions of handlers that ask for one: from the host's factory, or made from its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import sessionmaker

from sa_jobs.errors import WorkerError
from sa_jobs.handlers import Jobs


class Factories:
    """Makes sessions for handlers, and disposes of the engines that it had to make for them."""

    def __init__(
        self,
        engine: Any,
        jobs: Jobs,
        control: Engine,
        sync: Callable[[], Any] | None,
        asynchronous: Callable[[], Any] | None,
    ) -> None:
        self._made: Engine | None = None
        self._made_async: Any = None
        self.sync = sync
        self.asynchronous = asynchronous
        if self.sync is None and _asking(jobs, coroutines=False):
            self.sync = sessionmaker(self._engine(engine, control))
        asking = _asking(jobs, coroutines=True)
        if self.asynchronous is None and asking:
            self.asynchronous = self._async_sessions(engine, asking[0])

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
        self._made = Engine(control.pool.recreate(), control.dialect, control.url)
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
            made = AsyncEngine(Engine(host.pool.recreate(), host.dialect, host.url))
        else:
            made = create_async_engine(engine.url.set(drivername="postgresql+psycopg"))
        self._made_async = made
        return async_sessionmaker(made)


def _asking(jobs: Jobs, *, coroutines: bool) -> list[str]:
    return [
        handler.name
        for handler in jobs
        if handler.signature.session is not None and handler.signature.is_coroutine is coroutines
    ]
