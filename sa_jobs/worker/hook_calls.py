"""Calling hooks around an attempt: nothing that they do may change what became of the job."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from sa_jobs.hooks import AttemptEnd, Hook, Hooks
from sa_jobs.outcome import Discard, Retry, Snooze
from sa_jobs.worker.running import Committed, Ending, LeaseLost, Running
from sa_jobs.worker.surroundings import Failures

# Runs a coroutine on the worker's event loop, and waits for it.
Runner = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Any]

_ENDS: dict[str, AttemptEnd] = {
    "timeout": "failed",
    "cancel": "cancelled",
    "lost": "lost",
    "shutdown": "released",
}


class HookCalls:
    """Calls a registry's hooks, on the thread or in the task of the handler.

    On a thread, what a coroutine hook gives is awaited on the worker's event loop, in a copy of the
    thread's context. `failures` are what a hook may raise without harm.
    """

    def __init__(
        self, hooks: Hooks, run_on_loop: Runner, failures: Failures = (BaseException,)
    ) -> None:
        self._hooks = hooks
        self._run_on_loop = run_on_loop
        self._failures = failures

    def before(self, running: Running) -> None:
        """Call the hooks of `before`; raises Discard, Retry or Snooze if one of them does."""
        for hook in self._hooks.before:
            self._call(hook, running.context, decides=True)

    async def before_async(self, running: Running) -> None:
        """Do the same in a task, whose cancellation ends the hook that runs."""
        for hook in self._hooks.before:
            await self._await(hook, running, running.context, decides=True)

    def ended(self, running: Running, end: AttemptEnd, error: BaseException | None) -> None:
        """Call the hooks that an attempt's end concerns; never raises."""
        for hook, value in self._at_the_end(running, end, error):
            self._call(hook, running.context, value)

    async def ended_async(
        self, running: Running, end: AttemptEnd, error: BaseException | None
    ) -> None:
        """Do the same in a task; never raises, not even where the task is cancelled meanwhile."""
        for hook, value in self._at_the_end(running, end, error):
            await self._await(hook, running, running.context, value)

    def failed(self, context: Any, error: BaseException) -> None:
        """Call the hooks of `on_failure`; never raises."""
        for hook in self._hooks.on_failure:
            self._call(hook, context, error)

    def dead(self, context: Any, error: BaseException) -> None:
        """Call the hooks of `on_dead`; never raises."""
        for hook in self._hooks.on_dead:
            self._call(hook, context, error)

    @property
    def of_failures(self) -> bool:
        """Whether there are hooks of `on_failure`."""
        return bool(self._hooks.on_failure)

    @property
    def of_deaths(self) -> bool:
        """Whether there are hooks of `on_dead`."""
        return bool(self._hooks.on_dead)

    def _at_the_end(
        self, running: Running, end: AttemptEnd, error: BaseException | None
    ) -> list[tuple[Hook, Any]]:
        calls: list[tuple[Hook, Any]] = []
        # A time-out is told by `Notices`, as soon as it is booked, however long the handler runs.
        if end == "failed" and error is not None and running.stop_reason != "timeout":
            running.error = error
            calls = [(hook, error) for hook in self._hooks.on_failure]
        return calls + [(hook, end) for hook in reversed(self._hooks.after)]

    def _call(self, hook: Hook, *arguments: Any, decides: bool = False) -> None:
        try:
            result = hook(*arguments)
            if inspect.isawaitable(result):
                self._run_on_loop(lambda: _result_of(result))
        except self._failures as error:
            if decides and _decides(error):
                raise
            self._hooks.failed(hook, error)

    async def _await(
        self, hook: Hook, running: Running, *arguments: Any, decides: bool = False
    ) -> None:
        try:
            result = hook(*arguments)
            if inspect.isawaitable(result):
                await result
        except BaseException as error:
            if issubclass(type(error), asyncio.CancelledError) and running.stop_reason is not None:
                if decides:
                    raise
                # The handler has ended, and what it came to stands.
                return
            if decides and _decides(error):
                raise
            self._hooks.failed(hook, error)


def end_of(running: Running, ending: Ending) -> AttemptEnd:
    """Return what an attempt came to whose handler has returned."""
    if isinstance(ending, Committed):
        return "done"
    if isinstance(ending, LeaseLost):
        return "lost"
    # What was booked meanwhile stands, except that a job may be done though it was to be cancelled.
    if running.stop_reason in ("timeout", "lost", "shutdown") and running.with_writer:
        return _ENDS[running.stop_reason]
    return "lost" if running.lost else "done"


def end_by(running: Running, error: BaseException) -> AttemptEnd:
    """Return what an attempt came to whose handler has raised."""
    if running.stop_reason is not None:
        return _ENDS[running.stop_reason]
    # By type: isinstance() would also ask the exception, which may lie, or raise.
    return "snoozed" if issubclass(type(error), Snooze) else "failed"


def _decides(error: BaseException) -> bool:
    return issubclass(type(error), (Discard, Retry, Snooze))


async def _result_of(awaitable: Awaitable[Any]) -> Any:
    return await awaitable
