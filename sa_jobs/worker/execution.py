"""Running one handler: its arguments, its session, and what its end means for the job."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.error_text import let_go
from sa_jobs.errors import HandlerError
from sa_jobs.handlers import Handler
from sa_jobs.models import Tables
from sa_jobs.outcome import Failed, Finished, Released, failed, raised, returned
from sa_jobs.worker import sessions
from sa_jobs.worker.hook_calls import HookCalls, end_by, end_of
from sa_jobs.worker.running import Committed, Ended, Ending, LeaseLost, Mailbox, Running
from sa_jobs.worker.surroundings import Around, Surroundings


@dataclass(frozen=True)
class Execution:
    """Runs handlers and reports how they ended; knows no connection but the handlers' sessions."""

    worker: str
    tables: Tables
    mailbox: Mailbox
    session_factory: Callable[[], Any] | None
    async_session_factory: Callable[[], Any] | None
    around: Around | None = None
    hooks: HookCalls | None = None

    def run(self, running: Running) -> None:
        """Run a plain handler on the calling thread, and report its end."""
        running.started_at = time.monotonic()
        plain = self.around is None and self.hooks is None
        call = self._call if plain else self._call_surrounded
        try:
            # In a context of its own, as a task has one: what the handler sets in it ends with it.
            ending = contextvars.copy_context().run(call, running)
        except BaseException as error:
            # SystemExit and its kind too: the handler's end is not the worker's.
            ending = self._raised(running, error)
        self.mailbox.put(Ended(running, ending))

    async def run_async(self, running: Running) -> None:
        """Run a coroutine handler on the event loop, and report its end."""
        running.started_at = time.monotonic()
        plain = self.around is None and self.hooks is None
        call = self._await if plain else self._await_surrounded
        try:
            ending = await call(running)
        except BaseException as error:
            ending = self._raised(running, error)
        self.mailbox.put(Ended(running, ending))

    def died(self, running: Running, error: BaseException) -> None:
        """Report the end of a handler whose thread was ended from outside."""
        text = f"the thread of the handler was ended from outside, by {type(error).__name__}"
        self.mailbox.put(Ended(running, failed(running.job, text, running.handler.backoff)))

    def stopped(self, running: Running) -> None:
        """Report the end of a coroutine handler that was told to stop before it began."""
        self.mailbox.put(Ended(running, self._raised(running, asyncio.CancelledError())))

    def _call_surrounded(self, running: Running) -> Ending:
        call = self._call if self.hooks is None else self._call_between_hooks
        if self.around is None:
            return call(running)
        with Surroundings(self.around, running.job):
            return call(running)

    async def _await_surrounded(self, running: Running) -> Ending:
        call = self._await if self.hooks is None else self._await_between_hooks
        if self.around is None:
            return await call(running)
        with Surroundings(self.around, running.job):
            return await call(running)

    def _call_between_hooks(self, running: Running) -> Ending:
        assert self.hooks is not None
        try:
            self.hooks.before(running)
            # What a hook did with the session of a scope is not the handler's.
            sessions.forget(self.session_factory)
            ending = self._call(running)
        except BaseException as error:
            shown = _without_own_frames(error)
            self.hooks.ended(running, end_by(running, error), shown)
            raise
        else:
            self.hooks.ended(running, end_of(running, ending), None)
            return ending
        finally:
            sessions.forget(self.session_factory)

    async def _await_between_hooks(self, running: Running) -> Ending:
        assert self.hooks is not None
        try:
            await self.hooks.before_async(running)
            await self._forget_in_task()
            ending = await self._await(running)
        except BaseException as error:
            shown = _without_own_frames(error)
            await self.hooks.ended_async(running, end_by(running, error), shown)
            raise
        else:
            await self.hooks.ended_async(running, end_of(running, ending), None)
            return ending
        finally:
            await self._forget_in_task()

    async def _forget_in_task(self) -> None:
        # A coroutine and its hooks may use both kinds, such as an application's `db.session`.
        sessions.forget_in_task(self.session_factory)
        await sessions.forget_async(self.async_session_factory)

    def _call(self, running: Running) -> Ending:
        try:
            arguments = arguments_for(running.handler, running.job, running.context)
            if running.handler.signature.session is None:
                result = plain_result(running.handler.function(**arguments))
                return returned(running.job, result)
            return self._call_in_session(running, arguments, running.handler.signature.session)
        finally:
            sessions.forget(self.session_factory)

    def _call_in_session(
        self, running: Running, arguments: dict[str, Any], parameter: str
    ) -> Ending:
        assert self.session_factory is not None
        session = self.session_factory()
        try:
            sessions.guard(session)
            arguments[parameter] = session
            outcome = returned(running.job, plain_result(running.handler.function(**arguments)))
            sessions.unguard(session)
            with sessions.finishing():
                if not self._finish(session, running.job, outcome):
                    return LeaseLost()
                session.commit()
            return Committed()
        finally:
            sessions.abandon(session)

    async def _await(self, running: Running) -> Ending:
        try:
            arguments = arguments_for(running.handler, running.job, running.context)
            if running.handler.signature.session is None:
                return returned(running.job, await running.handler.function(**arguments))
            return await self._await_in_session(
                running, arguments, running.handler.signature.session
            )
        finally:
            await self._forget_in_task()

    async def _await_in_session(
        self, running: Running, arguments: dict[str, Any], parameter: str
    ) -> Ending:
        handler, job = running.handler, running.job
        assert self.async_session_factory is not None
        session = self.async_session_factory()
        sync = session.sync_session
        try:
            sessions.guard(sync)
            arguments[parameter] = session
            outcome = returned(job, await handler.function(**arguments))
            sessions.unguard(sync)
            with sessions.finishing():
                if not await session.run_sync(lambda sync: self._finish(sync, job, outcome)):
                    return LeaseLost()
                await session.commit()
            return Committed()
        finally:
            # A cancelled task must still give its connection back.
            await asyncio.shield(session.run_sync(sessions.abandon))

    def _finish(self, session: Any, job: ClaimedJob, outcome: Finished) -> bool:
        return sessions.finish(session, job, outcome, worker=self.worker, tables=self.tables)

    def _raised(self, running: Running, error: BaseException) -> Ending:
        job, backoff = running.job, running.handler.backoff
        if type(error) is sessions.FinishLostError:
            # If the commit landed all the same, the writer finds the job done.
            return failed(job, str(error), backoff)
        # By its type: isinstance() would also ask the exception, which may lie, or raise.
        if issubclass(type(error), asyncio.CancelledError):
            if running.stop_reason == "shutdown":
                return Released()
            if running.stop_reason == "lost":
                return LeaseLost()
            if running.stop_reason == "cancel":
                return Failed("cancelled on request", final=True)
            if running.stop_reason == "timeout":
                return failed(job, timed_out(running), backoff)
        outcome = raised(job, _without_own_frames(error), backoff)
        let_go(error)
        return outcome


def arguments_for(handler: Handler, job: ClaimedJob, context: JobContext) -> dict[str, Any]:
    """Return the handler's arguments, but for the session, or raise what is wrong with them."""
    arguments = handler.signature.arguments(job)
    if handler.signature.context is not None:
        arguments[handler.signature.context] = context
    return arguments


def plain_result(result: Any) -> Any:
    """Return what a plain handler returned, or raise HandlerError if nobody has awaited it."""
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise HandlerError(
            "the handler is a plain function, and returned something to await, which nobody has "
            "run: make it an async function, also where a decorator wraps it"
        )
    return result


def _without_own_frames(error: BaseException) -> BaseException:
    """Return the error with a traceback that begins in the handler, if it got that far."""
    # An exception of the users' own may have attributes that do anything.
    with contextlib.suppress(BaseException):
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        if trace is not None:
            error.__traceback__ = trace
    return error


def timed_out(running: Running) -> str:
    """Return the error text of an attempt that ran out of its time."""
    return f"timed out after {running.handler.timeout:g} s"
