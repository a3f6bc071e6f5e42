"""What an application registers beside its handlers: functions that are told of jobs.

A registry only keeps hooks; workers call them, and `jobs.enqueue` those of `on_enqueue`. What a
hook raises is logged once, and changes nothing (see docs/hooks.md for what is called where).
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from sa_jobs.context import JobContext
from sa_jobs.error_text import error_text
from sa_jobs.errors import HookError
from sa_jobs.meta import Meta, meta_text

logger = logging.getLogger("sa_jobs.hooks")

AttemptEnd = Literal["done", "failed", "snoozed", "cancelled", "released", "lost"]
Hook = Callable[..., Any]

_Before = TypeVar("_Before", bound=Callable[[JobContext], Any])
_After = TypeVar("_After", bound=Callable[[JobContext, AttemptEnd], Any])
_OnError = TypeVar("_OnError", bound=Callable[[JobContext, BaseException], Any])


@dataclass(frozen=True)
class Enqueuing:
    """Jobs that are about to be added, all by one call; `meta` may be added to.

    `count` is how many they are, or None where the database counts them. `meta` goes into each of
    them, and must stay a dict of JSON values.
    """

    handler: str
    queue: str
    count: int | None
    meta: dict[str, Any] = field(default_factory=dict)


# Set while hooks of on_enqueue run: what they enqueue calls none, or it would go on for ever.
_enqueuing: ContextVar[bool] = ContextVar("sa_jobs_enqueuing", default=False)

_OnEnqueue = TypeVar("_OnEnqueue", bound=Callable[[Enqueuing], None])


class Hooks:
    """The hooks of a registry, in the order of their registration, and the calls that failed."""

    def __init__(self) -> None:
        self.before: list[Hook] = []
        self.after: list[Hook] = []
        self.on_failure: list[Hook] = []
        self.on_dead: list[Hook] = []
        self.on_enqueue: list[Hook] = []
        self._told: set[tuple[str, type[BaseException]]] = set()
        self._lock = threading.Lock()

    def add(self, kind: str, hook: Hook, takes: tuple[str, ...], *, waits: bool = True) -> None:
        """Keep a hook that can be called with so many arguments, or raise HookError."""
        if not callable(hook):
            raise HookError(f"the {kind} hook must be a function, not {hook!r}")
        name = name_of(hook)
        called = _called(hook)
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            raise HookError(
                f"the {kind} hook {name} is a generator: calling it would run nothing; use a "
                "function, or Worker(around=) for a context manager"
            )
        if not waits and inspect.iscoroutinefunction(called):
            raise HookError(
                f"the {kind} hook {name} is a coroutine function, and nobody could await it there: "
                "use a plain function"
            )
        try:
            inspect.signature(hook).bind(*takes)
        except TypeError as error:
            raise HookError(
                f"the {kind} hook {name} must take ({', '.join(takes)}): {error}"
            ) from None
        except ValueError:
            pass  # Built in, without a signature to read.
        getattr(self, kind).append(hook)

    @property
    def around_attempts(self) -> bool:
        """Whether there is a hook that a worker calls."""
        return bool(self.before or self.after or self.on_failure or self.on_dead)

    def coroutine_around_attempts(self) -> Hook | None:
        """Return a hook that a worker calls and awaits, if there is one."""
        hooks = (*self.before, *self.after, *self.on_failure, *self.on_dead)
        return next((hook for hook in hooks if inspect.iscoroutinefunction(_called(hook))), None)

    def failed(self, hook: Hook, error: BaseException) -> None:
        """Log what a hook raised, once for each hook and kind of exception."""
        name = name_of(hook)
        with self._lock:
            if (name, type(error)) in self._told:
                return
            self._told.add((name, type(error)))
        logger.error(
            "the hook %s failed, which changes nothing for the job; said once for each kind of "
            "error: %s",
            name,
            error_text(error),
            extra={"job_hook": name},
        )

    def meta_of(
        self, handler: str, queue: str, count: int | None, meta: Meta | None
    ) -> Meta | None:
        """Return the meta of jobs that are to be added, with what hooks of `on_enqueue` add to it.

        Raises what is wrong with the caller's own. What a hook adds that cannot be stored is left
        out. Hooks that enqueue call no hooks by that.
        """
        if not self.on_enqueue or _enqueuing.get():
            return meta
        kept: dict[str, Any] = {}
        if meta is not None:
            meta_text(meta)
            kept.update(meta)
        token = _enqueuing.set(True)
        try:
            for hook in self.on_enqueue:
                jobs = Enqueuing(handler, queue, count, dict(kept))
                try:
                    hook(jobs)
                    meta_text(jobs.meta)
                except Exception as error:
                    self.failed(hook, error)
                else:
                    kept = jobs.meta
        finally:
            _enqueuing.reset(token)
        return kept


class HasHooks:
    """The decorators by which a registry takes hooks; each returns the function as it is.

    Register hooks before the worker starts. They are called with the job's context, in the order of
    their registration (those of `after` in the reverse one). Functions and coroutine functions are
    fine, except for `on_enqueue`.
    """

    def __init__(self) -> None:
        self.hooks = Hooks()

    def before(self, hook: _Before) -> _Before:
        """Let a worker call `hook(ctx)` before each attempt, where the handler will run.

        If it raises `Discard`, `Retry` or `Snooze`, the handler is not called, and the job ends as
        if the handler had raised that.
        """
        self.hooks.add("before", hook, ("ctx",))
        return hook

    def after(self, hook: _After) -> _After:
        """Let a worker call `hook(ctx, end)` after each attempt, where the handler has run.

        `end` is "done", "failed", "snoozed", "cancelled", "released" (by a worker that stops) or
        "lost" (another worker has the job by now). With a session the job is committed as done; any
        other end is about to be written.
        """
        self.hooks.add("after", hook, ("ctx", "end"))
        return hook

    def on_failure(self, hook: _OnError) -> _OnError:
        """Let a worker call `hook(ctx, error)` for each failed attempt, before `after`.

        `error` is what the handler raised, also `Retry` and `Discard`, or an AttemptTimeoutError or
        AttemptLostError; those two come on a thread for that.
        """
        self.hooks.add("on_failure", hook, ("ctx", "error"))
        return hook

    def on_dead(self, hook: _OnError) -> _OnError:
        """Let a worker call `hook(ctx, error)` when a job has become dead, and that is committed.

        It comes on a thread for that. Where a lease ran out on the final attempt, it is called by
        the worker that found it, with AttemptLostError and a new context.
        """
        self.hooks.add("on_dead", hook, ("ctx", "error"))
        return hook

    def on_enqueue(self, hook: _OnEnqueue) -> _OnEnqueue:
        """Let `enqueue`, `enqueue_many` and `enqueue_from_select` of this registry call `hook`.

        It is called once in each call, before any SQL, with an `Enqueuing`, to whose `meta` it may
        add. The bare functions of the package know no registry, and call nothing; nor does what a
        hook of `on_enqueue` enqueues.
        """
        self.hooks.add("on_enqueue", hook, ("jobs",), waits=False)
        return hook


def name_of(hook: Hook) -> str:
    """Return how messages name a hook."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"


def _called(hook: Hook) -> Callable[..., Any]:
    return hook if inspect.isroutine(hook) else type(hook).__call__
