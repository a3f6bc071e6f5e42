"""The OpenTelemetry integration, with the real SDK: which spans there are and what ties them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NoOpTracerProvider, SpanKind, StatusCode
from sqlalchemy import Engine, literal, select
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sa_jobs import Discard, JobContext, Jobs, Snooze, fixed
from sa_jobs.opentelemetry import instrument
from tests.support.looking import job, status
from tests.support.running import run_all, running
from tests.support.waiting import wait_until


class Traces:
    """A provider of tracers, and the spans that have ended, oldest first."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("shop")

    def ended(self, prefix: str) -> list[ReadableSpan]:
        """Return the spans whose name begins like that."""
        spans = self._exporter.get_finished_spans()
        return [span for span in spans if span.name.startswith(prefix)]

    def one(self, prefix: str) -> ReadableSpan:
        """Return the only span whose name begins like that."""
        [span] = self.ended(prefix)
        return span


@pytest.fixture
def traces() -> Iterator[Traces]:
    traces = Traces()
    yield traces
    traces.provider.shutdown()


@pytest.fixture
def jobs(traces: Traces) -> Jobs:
    jobs = Jobs()
    instrument(jobs, tracer_provider=traces.provider)
    return jobs


def add(engine: Engine, jobs: Jobs, handler: str) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler).id


def ids(span: ReadableSpan) -> tuple[int, int]:
    return span.context.trace_id, span.context.span_id


def links(span: ReadableSpan) -> list[tuple[int, int]]:
    return [(link.context.trace_id, link.context.span_id) for link in span.links]


def parent(span: ReadableSpan) -> tuple[int, int] | None:
    return None if span.parent is None else (span.parent.trace_id, span.parent.span_id)


def register(jobs: Jobs, kind: str, function: Any, **options: Any) -> None:
    """Register a handler of a kind that calls a function."""
    if kind == "plain":

        @jobs.handler("send", **options)
        def plain() -> None:
            function()

    elif kind == "coroutine":

        @jobs.handler("send", **options)
        async def coroutine() -> None:
            await asyncio.sleep(0)
            function()

    elif kind == "transactional":

        @jobs.handler("send", **options)
        def transactional(session: Session) -> None:
            function()

    else:

        @jobs.handler("send", **options)
        async def asynchronous(session: AsyncSession) -> None:
            await asyncio.sleep(0)
            function()


KINDS = ["plain", "coroutine", "transactional", "async transactional"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_is_linked_to_the_enqueue(
    engine: Engine, jobs: Jobs, traces: Traces, kind: str
) -> None:
    def work() -> None:
        with traces.tracer.start_as_current_span("work"):
            pass

    register(jobs, kind, work, queue="mail")
    with traces.tracer.start_as_current_span("request"):
        one = add(engine, jobs, "send")
    run_all(engine, jobs)

    request, created, work_span = map(traces.one, ("request", "create mail", "work"))
    processed = traces.one("process mail")
    assert created.kind is SpanKind.PRODUCER
    assert parent(created) == ids(request)
    assert dict(created.attributes or {}) == {
        "messaging.system": "sa_jobs",
        "messaging.operation.name": "create",
        "messaging.operation.type": "create",
        "messaging.destination.name": "mail",
        "sa_jobs.handler": "send",
    }
    assert processed.kind is SpanKind.CONSUMER
    assert links(processed) == [ids(created)]
    assert parent(processed) is None
    assert processed.status.status_code is StatusCode.UNSET
    assert dict(processed.attributes or {}) == {
        "messaging.system": "sa_jobs",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(one),
        "sa_jobs.handler": "send",
        "sa_jobs.attempt": 1,
        "sa_jobs.end": "done",
    }
    assert parent(work_span) == ids(processed)


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_attempt_has_its_exception(
    engine: Engine, jobs: Jobs, traces: Traces, kind: str
) -> None:
    def fail() -> None:
        raise LookupError("no such invoice")

    register(jobs, kind, fail, max_attempts=2, backoff=fixed(0))
    add(engine, jobs, "send")
    run_all(engine, jobs)

    first, second = traces.ended("process")
    assert links(first) == links(second) == [ids(traces.one("create"))]
    assert ids(first)[0] != ids(second)[0]
    for attempt, span in enumerate((first, second), 1):
        attributes = span.attributes or {}
        assert span.status.status_code is StatusCode.ERROR
        assert span.status.description == "no such invoice"
        assert attributes["error.type"] == "builtins.LookupError"
        assert attributes["sa_jobs.attempt"] == attempt
        assert attributes["sa_jobs.end"] == "failed"
        [event] = span.events
        assert event.name == "exception"
        assert (event.attributes or {})["exception.message"] == "no such invoice"


@pytest.mark.parametrize(
    ("error", "code", "end"),
    [
        (Snooze(3600), StatusCode.UNSET, "snoozed"),
        (Discard("gone"), StatusCode.ERROR, "failed"),
    ],
)
def test_a_snooze_is_no_error_and_a_discard_is_one(
    engine: Engine, jobs: Jobs, traces: Traces, error: Exception, code: StatusCode, end: str
) -> None:
    def say() -> None:
        raise error

    register(jobs, "plain", say)
    add(engine, jobs, "send")
    run_all(engine, jobs)
    span = traces.one("process")
    assert span.status.status_code is code
    assert (span.attributes or {})["sa_jobs.end"] == end


def test_jobs_on_one_thread_do_not_nest(engine: Engine, jobs: Jobs, traces: Traces) -> None:
    current: list[Any] = []

    # Registered later, and so called before the span ends.
    @jobs.after
    def after(ctx: JobContext, end: str) -> None:
        current.append(trace.get_current_span())

    register(jobs, "plain", lambda: None)
    for _ in range(3):
        add(engine, jobs, "send")
    run_all(engine, jobs, concurrency=1)
    spans = traces.ended("process")
    assert [parent(span) for span in spans] == [None] * 3
    assert [one.get_span_context().span_id for one in current] == [ids(span)[1] for span in spans]


def test_a_handler_that_enqueues_goes_on_in_its_trace(
    engine: Engine, jobs: Jobs, traces: Traces
) -> None:
    @jobs.handler("first", queue="first")
    async def first(session: AsyncSession) -> None:
        await jobs.enqueue(session, second)

    @jobs.handler("second", queue="second")
    def second() -> None: ...

    add(engine, jobs, "first")
    run_all(engine, jobs)
    assert parent(traces.one("create second")) == ids(traces.one("process first"))
    assert links(traces.one("process second")) == [ids(traces.one("create second"))]


def test_an_enqueue_on_an_asynchronous_session_is_in_the_caller_s_trace(
    engine: Engine, jobs: Jobs, traces: Traces
) -> None:
    register(jobs, "plain", lambda: None)

    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        async with AsyncSession(async_engine) as session, session.begin():
            with traces.tracer.start_as_current_span("request"):
                await jobs.enqueue(session, "send")
        await async_engine.dispose()

    asyncio.run(main())
    assert parent(traces.one("create")) == ids(traces.one("request"))


def test_many_jobs_of_a_call_share_one_span(engine: Engine, jobs: Jobs, traces: Traces) -> None:
    @jobs.handler("send")
    def send(number: int) -> None: ...

    with Session(engine) as session, session.begin():
        jobs.enqueue_many(session, send, [{"number": number} for number in range(3)])
        numbers = select(literal(7).label("number")).union_all(select(literal(8).label("number")))
        jobs.enqueue_from_select(session, send, numbers)
    run_all(engine, jobs, concurrency=1)

    many, selected = traces.ended("create")
    assert (many.attributes or {})["messaging.batch.message_count"] == 3
    # The database counts those.
    assert "messaging.batch.message_count" not in (selected.attributes or {})
    linked = [links(span) for span in traces.ended("process")]
    assert linked == [[ids(many)]] * 3 + [[ids(selected)]] * 2


def test_the_run_may_be_a_child_of_the_enqueue(engine: Engine, traces: Traces) -> None:
    jobs = Jobs()
    instrument(jobs, tracer_provider=traces.provider, same_trace=True)
    register(jobs, "plain", lambda: None)
    add(engine, jobs, "send")
    run_all(engine, jobs)
    created, processed = traces.one("create"), traces.one("process")
    assert parent(processed) == ids(created)
    assert links(processed) == [ids(created)]


def test_a_time_out_ends_the_span_at_once(engine: Engine, jobs: Jobs, traces: Traces) -> None:
    go_on = threading.Event()
    register(jobs, "plain", lambda: go_on.wait(60), timeout=0.3, max_attempts=1)
    one = add(engine, jobs, "send")
    with running(engine, jobs):
        wait_until(lambda: status(engine, one) == "dead", "the time-out is booked", seconds=30)
        # While the thread still runs.
        wait_until(lambda: traces.ended("process"), "the span ends", seconds=30)
        go_on.set()
    span = traces.one("process")
    assert span.status.description == "timed out after 0.3 s"
    assert (span.attributes or {})["error.type"] == "sa_jobs.errors.AttemptTimeoutError"


def test_without_an_sdk_nothing_is_stored_and_jobs_run(engine: Engine) -> None:
    jobs = Jobs()
    instrument(jobs, tracer_provider=NoOpTracerProvider())
    register(jobs, "plain", lambda: None)
    one = add(engine, jobs, "send")
    run_all(engine, jobs)
    assert (job(engine, one).status, job(engine, one).meta) == ("done", {})


def test_a_second_call_makes_no_second_span(engine: Engine, jobs: Jobs, traces: Traces) -> None:
    instrument(jobs, tracer_provider=traces.provider)
    register(jobs, "plain", lambda: None)
    add(engine, jobs, "send")
    run_all(engine, jobs)
    assert len(traces.ended("create")) == len(traces.ended("process")) == 1


@pytest.mark.parametrize("carried", ["nonsense", 5, None])
def test_what_is_no_trace_context_is_passed_over(
    engine: Engine, jobs: Jobs, traces: Traces, carried: Any
) -> None:
    register(jobs, "plain", lambda: None)
    with Session(engine) as session, session.begin():
        # As another program may have put it there.
        one = jobs.enqueue(session, "send", meta={"traceparent": carried}).id
    run_all(engine, jobs)
    assert status(engine, one) == "done"
    assert links(traces.one("process")) == []


def test_a_trace_context_of_the_caller_s_own_is_kept(
    engine: Engine, jobs: Jobs, traces: Traces
) -> None:
    register(jobs, "plain", lambda: None)
    carried = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with Session(engine) as session, session.begin():
        jobs.enqueue(session, "send", meta={"traceparent": carried})
    run_all(engine, jobs)
    expected = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert links(traces.one("process")) == [expected]
