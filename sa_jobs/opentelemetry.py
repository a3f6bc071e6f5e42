"""OpenTelemetry: a span where jobs are enqueued and one around each attempt, linked to it.

The trace context travels in the job's row, as W3C `traceparent` and `tracestate` in its `meta`.
Spans and attributes are those of the semantic conventions for messaging. Needs the extra
`opentelemetry`, and an SDK that the application configures.
"""

from __future__ import annotations

from contextvars import Token
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from sa_jobs import AttemptTimeoutError, Enqueuing, JobContext, Jobs, __version__

try:
    from opentelemetry import context as otel_context
    from opentelemetry import trace
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, TracerProvider
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'sa_jobs.opentelemetry needs its API: pip install "sa-jobs[opentelemetry]"',
        name=error.name,
    ) from error

_SYSTEM = "sa_jobs"

_w3c = TraceContextTextMapPropagator()
_instrumented: WeakSet[Jobs] = WeakSet()


def instrument(
    jobs: Jobs, *, tracer_provider: TracerProvider | None = None, same_trace: bool = False
) -> None:
    """Let a registry's enqueues and attempts make spans; call it before other hooks are added.

    An enqueue makes a PRODUCER span "create QUEUE" in the caller's trace, one for all jobs of a
    call. Each attempt is a CONSUMER span "process QUEUE", a trace of its own that is linked to it;
    with `same_trace` it is a child of it, too, however much later it runs. A failed attempt has its
    exception and the status ERROR.

    `tracer_provider` is the global one if left out. A second call for a registry does nothing.
    """
    if jobs in _instrumented:
        return
    _instrumented.add(jobs)
    tracer = trace.get_tracer("sa_jobs", __version__, tracer_provider)
    spans = _Spans(tracer, same_trace=same_trace)
    jobs.on_enqueue(spans.create)
    jobs.before(spans.begin)
    jobs.on_failure(spans.fail)
    jobs.after(spans.end)


class _Spans:
    """The spans of attempts that run now, by their contexts."""

    def __init__(self, tracer: trace.Tracer, *, same_trace: bool) -> None:
        self._tracer = tracer
        self._same_trace = same_trace
        self._running: WeakKeyDictionary[JobContext, tuple[Span, Token[otel_context.Context]]] = (
            WeakKeyDictionary()
        )

    def create(self, jobs: Enqueuing) -> None:
        """Make the span of an enqueue, and put its context into the jobs' meta."""
        attributes: dict[str, Any] = {
            **_attributes("create", jobs.queue),
            "sa_jobs.handler": jobs.handler,
        }
        if jobs.count is not None and jobs.count != 1:
            attributes["messaging.batch.message_count"] = jobs.count
        span = self._tracer.start_span(
            f"create {jobs.queue}", kind=SpanKind.PRODUCER, attributes=attributes
        )
        if "traceparent" not in jobs.meta:
            _w3c.inject(jobs.meta, trace.set_span_in_context(span))
        span.end()

    def begin(self, ctx: JobContext) -> None:
        """Start the span of an attempt, and make it the current one."""
        job = ctx.job
        carried = {name: text for name, text in job.meta.items() if isinstance(text, str)}
        created = _w3c.extract(carried, otel_context.Context())
        origin = trace.get_current_span(created).get_span_context()
        span = self._tracer.start_span(
            f"process {job.queue}",
            context=created if self._same_trace and origin.is_valid else None,
            kind=SpanKind.CONSUMER,
            links=[Link(origin)] if origin.is_valid else [],
            attributes={
                **_attributes("process", job.queue),
                "messaging.message.id": str(job.id),
                "sa_jobs.handler": job.handler,
                "sa_jobs.attempt": job.attempts,
            },
        )
        token = otel_context.attach(trace.set_span_in_context(span))
        self._running[ctx] = (span, token)

    def fail(self, ctx: JobContext, error: BaseException) -> None:
        """Record why an attempt failed."""
        begun = self._running.get(ctx)
        if begun is None:
            return
        span, _ = begun
        kind = type(error)
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, str(error)))
        span.set_attribute("error.type", f"{kind.__module__}.{kind.__qualname__}")
        if isinstance(error, AttemptTimeoutError):
            # The handler may run on for ever.
            span.end()

    def end(self, ctx: JobContext, end: str) -> None:
        """End the span of an attempt, where it began."""
        begun = self._running.pop(ctx, None)
        if begun is None:
            return
        span, token = begun
        otel_context.detach(token)
        if span.is_recording():
            span.set_attribute("sa_jobs.end", end)
            span.end()


def _attributes(operation: str, queue: str) -> dict[str, Any]:
    return {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": operation,
        "messaging.operation.type": operation,
        "messaging.destination.name": queue,
    }
