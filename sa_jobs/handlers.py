"""Jobs: the registry of handlers and their policy. It holds no connection and runs nothing."""

from __future__ import annotations

import contextlib
import datetime as dt
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from msgspec import structs
from sqlalchemy import SelectBase

from sa_jobs import limits
from sa_jobs.backoff import DEFAULT_BACKOFF, Backoff
from sa_jobs.connections import Caller, operation_method
from sa_jobs.enqueue import (
    Cancelled,
    Retried,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from sa_jobs.errors import HandlerError, InvalidJobError, UnknownHandlerError
from sa_jobs.hooks import HasHooks
from sa_jobs.inserts import Enqueued
from sa_jobs.job_options import (
    DEFAULT_MAX_ATTEMPTS,
    DEFAULT_QUEUE,
    Delay,
    HandlerName,
    OnConflict,
    Payload,
    Row,
)
from sa_jobs.meta import Meta
from sa_jobs.models import DEFAULT_TABLES, Tables
from sa_jobs.select_columns import payload_columns
from sa_jobs.signatures import Signature, read_signature

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Handler:
    """A registered function and its policy. `timeout` is in seconds, or None."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    queue: str
    priority: int
    max_attempts: int
    backoff: Backoff
    timeout: float | None


class Jobs(HasHooks):
    """The handlers that an application has, by name, and the tables that its jobs are in.

    A worker claims only jobs whose handler its `Jobs` has: a row can name a handler, it cannot
    choose code.
    """

    def __init__(
        self,
        tables: Tables = DEFAULT_TABLES,
        *,
        max_payload_bytes: int = limits.MAX_PAYLOAD_BYTES,
    ) -> None:
        super().__init__()
        self.tables = tables
        self.max_payload_bytes = max_payload_bytes
        self._by_name: dict[str, Handler] = {}
        self._by_function: dict[Any, Handler] = {}

    @overload
    def handler(self, name: F, /) -> F: ...

    @overload
    def handler(
        self,
        name: str | None = None,
        /,
        *,
        queue: str = ...,
        priority: int = ...,
        max_attempts: int = ...,
        backoff: Backoff = ...,
        timeout: float | dt.timedelta | None = ...,
    ) -> Callable[[F], F]: ...

    def handler(
        self,
        name: Any = None,
        /,
        *,
        queue: str = DEFAULT_QUEUE,
        priority: int = 0,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        backoff: Backoff = DEFAULT_BACKOFF,
        timeout: float | dt.timedelta | None = None,
    ) -> Any:
        """Register the decorated function under `name` (default: its own), and return it as it is.

        Its parameters are the payload's keys, and their annotations say which values the payload
        holds. Parameters annotated `JobContext`, `Session` or, in
        a coroutine, `AsyncSession` are filled by the worker. With a session the handler is
        transactional: that session's commit is also the job's finish.

        The options are what `jobs.enqueue` gives a job of this handler. `backoff` maps the number
        of the failed attempt to seconds. `timeout` (seconds or a timedelta) bounds one attempt: a
        coroutine is cancelled; a plain function cannot be stopped from outside, so it is told by
        `ctx.cancelled`, its attempt is booked as failed and its late result is dropped.

        Raises HandlerError for a function that cannot be one, or a name that is taken.
        """
        if name is not None and not isinstance(name, str):
            return self._register(name, None, queue, priority, max_attempts, backoff, timeout)

        def decorate(function: F) -> F:
            self._register(function, name, queue, priority, max_attempts, backoff, timeout)
            return function

        return decorate

    def _register(
        self,
        function: Any,
        name: str | None,
        queue: str,
        priority: int,
        max_attempts: int,
        backoff: Backoff,
        timeout: float | dt.timedelta | None,
    ) -> Any:
        if not callable(function):
            raise HandlerError(f"a handler must be a function, not {function!r}")
        checked = limits.check_name("handler", name or getattr(function, "__name__", ""))
        if checked in self._by_name:
            raise HandlerError(
                f"handler {checked!r} is registered already, by "
                f"{self._by_name[checked].function!r}: give one of them another name"
            )
        if not callable(backoff):
            raise HandlerError(
                f"handler {checked!r}: backoff must be callable, e.g. full_jitter(), "
                f"not {backoff!r}"
            )
        limit = None if timeout is None else limits.check_seconds("timeout", timeout)
        if limit == 0:
            raise InvalidJobError("timeout must be more than 0 seconds; None means no limit")
        handler = Handler(
            name=checked,
            function=function,
            signature=read_signature(function, checked),
            queue=limits.check_name("queue", queue),
            priority=limits.check_priority(priority),
            max_attempts=limits.check_max_attempts(max_attempts),
            backoff=backoff,
            timeout=limit,
        )
        try:
            self._by_function[function] = handler
        except TypeError:
            raise HandlerError(
                f"handler {checked!r} is not hashable: register a function that calls it"
            ) from None
        self._by_name[checked] = handler
        # A bound method takes no attribute; this registry knows it all the same.
        with contextlib.suppress(AttributeError):
            function.sa_jobs_handler = checked
        return function

    def __getitem__(self, handler: HandlerName) -> Handler:
        """Return a handler by its name or its function, or raise UnknownHandlerError."""
        found = (
            self._by_name.get(handler)
            if isinstance(handler, str)
            else self._by_function.get(handler)
        )
        if found is None:
            raise UnknownHandlerError(
                f"handler {handler!r} is not registered here; there are: "
                f"{', '.join(sorted(self._by_name)) or '(none)'}"
            )
        return found

    def __iter__(self) -> Iterator[Handler]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def names(self) -> list[str]:
        """The names of all handlers, in the order of their registration."""
        return list(self._by_name)

    @operation_method
    def enqueue(
        self,
        session: Caller,
        handler: HandlerName,
        payload: Payload | None = None,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: dt.datetime | None = None,
        delay: Delay | None = None,
        max_attempts: int | None = None,
        tenant: str | None = None,
        idempotency_key: str | None = None,
        unique_key: str | None = None,
        meta: Meta | None = None,
        on_conflict: OnConflict = "existing",
    ) -> Enqueued:
        """Add a job as `sa_jobs.enqueue` does; the handler's policy fills what is left out.

        Also checks that the handler is registered and that the payload fits its signature, before
        any SQL: raises UnknownHandlerError, InvalidJobError or InvalidJobTypeError. The payload may
        hold what the parameters are annotated with, such as dataclasses and datetimes: see
        docs/payloads.md.
        """
        registered = self[handler]
        registered.signature.check_keys(registered.name, _keys(payload))
        if registered.signature.types is not None and isinstance(payload, Mapping):
            payload = registered.signature.types.encode(payload)
        return enqueue(
            session,
            registered.name,
            payload,
            **self._policy(registered, queue, priority, max_attempts),
            run_at=run_at,
            delay=delay,
            tenant=tenant,
            idempotency_key=idempotency_key,
            unique_key=unique_key,
            meta=self._meta(registered, queue, 1, meta),
            on_conflict=on_conflict,
            max_payload_bytes=self.max_payload_bytes,
            tables=self.tables,
        )

    @operation_method
    def enqueue_many(
        self,
        session: Caller,
        handler: HandlerName,
        payloads: Iterable[Payload | Row | None],
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: dt.datetime | None = None,
        delay: Delay | None = None,
        max_attempts: int | None = None,
        tenant: str | None = None,
        meta: Meta | None = None,
        on_conflict: OnConflict = "existing",
    ) -> list[Enqueued]:
        """Add many jobs as `sa_jobs.enqueue_many` does, by the handler's policy, checked first."""
        registered = self[handler]
        rows = list(payloads)
        types = registered.signature.types
        for position, row in enumerate(rows):
            payload = row.payload if isinstance(row, Row) else row
            registered.signature.check_keys(f"{registered.name}, row {position}", _keys(payload))
            if types is not None and isinstance(payload, Mapping):
                payload = types.encode(payload, f", row {position}")
                rows[position] = _with_payload(row, payload)
        return enqueue_many(
            session,
            registered.name,
            rows,
            **self._policy(registered, queue, priority, max_attempts),
            run_at=run_at,
            delay=delay,
            tenant=tenant,
            meta=self._meta(registered, queue, len(rows), meta),
            on_conflict=on_conflict,
            max_payload_bytes=self.max_payload_bytes,
            tables=self.tables,
        )

    @operation_method
    def enqueue_from_select(
        self,
        session: Caller,
        handler: HandlerName,
        query: SelectBase,
        *,
        queue: str | None = None,
        priority: int | None = None,
        run_at: dt.datetime | None = None,
        delay: Delay | None = None,
        max_attempts: int | None = None,
        tenant: str | None = None,
        meta: Meta | None = None,
    ) -> int:
        """Add a job per row as `sa_jobs.enqueue_from_select` does, with the handler's policy.

        The select's column names are checked against the handler's signature before any SQL.
        """
        registered = self[handler]
        registered.signature.check_keys(registered.name, payload_columns(query))
        return enqueue_from_select(
            session,
            registered.name,
            query,
            **self._policy(registered, queue, priority, max_attempts),
            run_at=run_at,
            delay=delay,
            tenant=tenant,
            meta=self._meta(registered, queue, None, meta),
            tables=self.tables,
        )

    @operation_method
    def cancel(self, session: Caller, job_id: int) -> Cancelled:
        """Cancel a job as `sa_jobs.cancel` does, in this registry's tables."""
        return cancel(session, job_id, tables=self.tables)

    @operation_method
    def retry(
        self,
        session: Caller,
        job_id: int,
        *,
        run_at: dt.datetime | None = None,
        delay: Delay | None = None,
    ) -> Retried:
        """Retry a dead or cancelled job as `sa_jobs.retry` does, in this registry's tables."""
        return retry(session, job_id, run_at=run_at, delay=delay, tables=self.tables)

    def _meta(
        self, handler: Handler, queue: str | None, count: int | None, meta: Meta | None
    ) -> Meta | None:
        queue = handler.queue if queue is None else queue
        return self.hooks.meta_of(handler.name, queue, count, meta)

    @staticmethod
    def _policy(
        handler: Handler, queue: str | None, priority: int | None, max_attempts: int | None
    ) -> dict[str, Any]:
        return {
            "queue": handler.queue if queue is None else queue,
            "priority": handler.priority if priority is None else priority,
            "max_attempts": handler.max_attempts if max_attempts is None else max_attempts,
        }


def _with_payload(element: Payload | Row | None, payload: Payload) -> Payload | Row:
    return structs.replace(element, payload=payload) if isinstance(element, Row) else payload


def _keys(payload: Any) -> Iterable[str]:
    # What is no mapping is refused, with its type, by the enqueue itself.
    return payload if isinstance(payload, Mapping) else ()
