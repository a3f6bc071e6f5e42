"""Running jobs in the test's own transaction."""

from __future__ import annotations

import asyncio
import contextvars
import datetime as dt
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from sa_jobs import limits
from sa_jobs.connections import Caller, connection_of, run_sync_of
from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.enqueue import Delay, seconds_ahead
from sa_jobs.errors import SaJobsError
from sa_jobs.handlers import Handler, Jobs
from sa_jobs.outcome import Discard, Finished, Outcome, Retry, Snooze, raised, returned
from sa_jobs.testing import ledger
from sa_jobs.testing.assertions import also_awaitable
from sa_jobs.testing.coroutines import OwnLoop, is_loop_running
from sa_jobs.testing.rows import EnqueuedJob, read
from sa_jobs.testing.sessions import Lent
from sa_jobs.worker import execution

T = TypeVar("T")

DRAIN_LIMIT = 1_000

# Not KeyboardInterrupt, nor what ends a test, such as pytest's own outcomes.
_FAILURES = (Exception, SystemExit, GeneratorExit)


class RunError(SaJobsError):
    """A job cannot be run here, or a drain does not come to an end; the text says why."""


@dataclass(frozen=True)
class Ran:
    """A job that was run: its row afterwards, which attempt it was, and what its handler raised."""

    job: EnqueuedJob
    attempt: int
    error: BaseException | None = None

    @property
    def status(self) -> str:
        """The job's status afterwards: "ready" if it is to be tried again."""
        return self.job.status

    @property
    def result(self) -> Any:
        """What the handler returned, as it was stored."""
        return self.job.result


@also_awaitable
def run_job(session: Caller, jobs: Jobs, job: Any, *, raise_errors: bool = True) -> Ran:
    """Run one job that is ready, due or not, in the session's transaction; return what came of it.

    `job` is an id, or anything that has one. A handler that asks for a session gets this one, and
    cannot commit it; what it wrote stays if it returns, and is taken back if it raises. With an
    AsyncSession `await` the call: then coroutines that ask for an AsyncSession can run too.

    What a handler raises is booked as a worker does it, and then raised here; not if it is Retry,
    Snooze or Discard, nor with `raise_errors=False`.

    Raises UnknownHandlerError, or RunError for a job that is not ready, with nothing written.
    """
    job_id = limits.check_id("job", getattr(job, "id", job))
    return _on_bench(session, jobs, raise_errors, lambda bench: bench.run_one(job_id))


@also_awaitable
def drain(
    session: Caller,
    jobs: Jobs,
    *,
    queues: Sequence[str] | None = None,
    limit: int = DRAIN_LIMIT,
    advance: Delay | None = None,
    raise_errors: bool = True,
) -> list[Ran]:
    """Run every job that is due, also those that handlers enqueue meanwhile; return what was run.

    The order is that of a worker: priority (high first), run_at, id. Jobs of handlers that `jobs`
    does not have are left alone, as are those of other queues where `queues` is given. Each is run
    as by `run_job`.

    `advance` (seconds or a timedelta) lets so much time pass within the call: whenever nothing is
    due, the time moves on to the next job that waits within it, as after a back-off or a delay.
    What is written then has the later times.

    Raises RunError when more than `limit` runs would be needed.
    """
    limits.check_limit("limit", limit)
    period = None if advance is None else limits.check_seconds("advance", advance)
    names = None if queues is None else [limits.check_name("queue", name) for name in queues]
    return _on_bench(session, jobs, raise_errors, lambda bench: bench.drain(names, limit, period))


def _on_bench(session: Any, jobs: Jobs, raise_errors: bool, work: Callable[[_Bench], T]) -> T:
    run_sync = run_sync_of(session)
    if run_sync is None:
        with OwnLoop() as loop:
            bench = _Bench(jobs, _session_of(session), raise_errors, loop.run)
            return work(bench)
    from sqlalchemy.util import await_only

    asynchronous = getattr(session, "registry", lambda: session)()

    def run(sync: Any) -> T:
        return work(_Bench(jobs, _session_of(sync), raise_errors, await_only, asynchronous))

    later: T = run_sync(run)
    return later


def _session_of(caller: Any) -> Session:
    session = caller() if isinstance(caller, scoped_session) else caller
    if isinstance(session, Session):
        return session
    if isinstance(caller, Connection):
        raise TypeError(
            "jobs run in a session: for a connection that is in a transaction pass "
            'Session(connection, join_transaction_mode="create_savepoint")'
        )
    raise TypeError(f"expected a Session or AsyncSession, not {type(caller).__name__}")


class _Clock:
    """The database's time; once a test lets time pass, it stands still but where it is moved on."""

    def __init__(self) -> None:
        self.moved_to: dt.datetime | None = None

    def now(self, connection: Connection) -> dt.datetime:
        return self.moved_to or ledger.clock(connection)

    def ahead(self, connection: Connection) -> float:
        """Return by how many seconds it is later than what the database takes for now."""
        if self.moved_to is None:
            return 0.0
        return (self.moved_to - ledger.transaction_time(connection)).total_seconds()


class _Bench:
    """Runs jobs one after the other, in one session."""

    def __init__(
        self,
        jobs: Jobs,
        session: Session,
        raise_errors: bool,
        wait_for: Callable[[Any], Any],
        async_session: Any = None,
    ) -> None:
        self._jobs = jobs
        self._tables = jobs.tables
        self._session = session
        self._raise_errors = raise_errors
        self._wait_for = wait_for
        self._async_session = async_session
        self._clock = _Clock()
        # In a test's own event loop, whoever cancels cancels the test.
        self._failures: tuple[type[BaseException], ...] = (
            (*_FAILURES, asyncio.CancelledError) if async_session is None else _FAILURES
        )

    def run_one(self, job_id: int) -> Ran:
        connection = self._connection()
        found = read(connection, self._tables, self._tables.jobs.c.id == job_id)
        if not found:
            raise RunError(
                f"there is no job {job_id} in {self._tables.jobs.fullname}: was it enqueued in "
                "another session, or rolled back?"
            )
        handler = self._handler(found[0].handler)
        job = ledger.claim(connection, self._tables, job_id, now=self._clock.now(connection))
        if job is None:
            raise RunError(
                f"job {job_id} is {found[0].status}, and only a job that is ready can be run; "
                "retry() makes one ready that is dead or cancelled"
            )
        return self._run(job, handler)

    def drain(self, queues: Sequence[str] | None, limit: int, advance: float | None) -> list[Ran]:
        connection = self._connection()
        wanted: dict[str, Any] = {"queues": queues, "handlers": self._jobs.names}
        until = self._clock.now(connection)
        if advance is not None:
            self._clock.moved_to = until
            until += dt.timedelta(seconds=advance)
        ran: list[Ran] = []
        passed: list[int] = []
        while True:
            connection = self._connection()
            now = self._clock.now(connection)
            due = ledger.next_due(connection, self._tables, **wanted, now=now, but=passed)
            if due is None:
                later = ledger.next_time(connection, self._tables, **wanted, after=now, until=until)
                if advance is None or later is None:
                    return ran
                self._clock.moved_to = later
                continue
            if len(ran) == limit:
                raise RunError(_endless(ran, due))
            handler = self._handler(due.handler)
            job = ledger.claim_due(
                connection, self._tables, due.id, queue=due.queue, handler=due.handler, now=now
            )
            if job is None:
                # Somebody else has it, as another transaction that holds its row.
                passed.append(due.id)
                continue
            ran.append(self._run(job, handler))

    def _handler(self, name: str) -> Handler:
        """Return a handler that can run here, or raise an error before its job is claimed."""
        handler = self._jobs[name]
        if handler.signature.is_coroutine and self._async_session is None:
            if handler.signature.session is not None:
                raise RunError(
                    f"handler {name!r} asks for an AsyncSession: give the call one, and await it"
                )
            if is_loop_running():
                raise RunError(
                    f"handler {name!r} is a coroutine, and this test is one too, whose event loop "
                    "cannot be entered twice: give the call an AsyncSession, and await it"
                )
        return handler

    def _run(self, job: ClaimedJob, handler: Handler) -> Ran:
        connection = self._connection()
        transactional = handler.signature.session is not None
        context = JobContext(job)
        last_id = ledger.last_id(connection, self._tables)
        ahead = self._clock.ahead(connection)
        error: BaseException | None = None
        outcome: Outcome
        landed: bool | None = None
        lent = Lent(self._session, connection, transactional=transactional)
        try:
            token = seconds_ahead.set(ahead)
            try:
                outcome = self._call(job, handler, context)
            finally:
                seconds_ahead.reset(token)
                lent.give_back()
            if transactional:
                landed = self._end(job, outcome, context, last_id, transactional=True)
                if landed:
                    lent.keep()
        except self._failures as failure:
            error, landed = failure, None
            trace = error.__traceback__
            outcome = raised(job, _from_the_handler_on(error), handler.backoff)
            error.__traceback__ = trace
        finally:
            lent.undo()
        if landed is None:
            landed = self._end(job, outcome, context, last_id)
        if not landed:
            raise RunError(
                f"job {job.id} {job.handler!r} was no longer this run's when its handler had "
                "ended: its row was changed meanwhile, and a worker would write nothing"
            )
        if error is not None and self._raise_errors and not _says_what_follows(error):
            raise error
        (after,) = read(self._connection(), self._tables, self._tables.jobs.c.id == job.id)
        return Ran(after, job.attempts, error)

    def _call(self, job: ClaimedJob, handler: Handler, context: JobContext) -> Finished:
        """Call a handler as a worker does: what surrounds it there belongs around this."""
        arguments = execution.arguments_for(handler, job, context)
        if handler.signature.session is not None:
            arguments[handler.signature.session] = (
                self._async_session if handler.signature.is_coroutine else self._session
            )
        call = functools.partial(handler.function, **arguments)
        if handler.signature.is_coroutine:
            value, error = self._wait_for(_result_of(call, self._failures))
            if error is not None:
                raise error
        else:
            value = execution.plain_result(contextvars.copy_context().run(call))
        return returned(job, value)

    def _end(
        self,
        job: ClaimedJob,
        outcome: Outcome,
        context: JobContext,
        last_id: int,
        *,
        transactional: bool = False,
    ) -> bool:
        connection = self._connection()
        now = self._clock.now(connection)
        if self._clock.moved_to is not None:
            ledger.set_created(connection, self._tables, after=last_id, now=now)
        progress = context.take_progress()
        if progress is not None:
            ledger.store_progress(connection, self._tables, job, progress, now=now)
        return ledger.settle(
            connection,
            self._tables,
            job,
            outcome,
            transactional=transactional,
            now=now,
        )

    def _connection(self) -> Connection:
        return connection_of(self._session, self._tables)


async def _result_of(
    call: Callable[[], Any], failures: tuple[type[BaseException], ...]
) -> tuple[Any, BaseException | None]:
    # Caught here, where the traceback has no frame of an event loop in it yet.
    try:
        return await call(), None
    except failures as error:
        return None, error


def _says_what_follows(error: BaseException) -> bool:
    return issubclass(type(error), (Retry, Snooze, Discard))


def _from_the_handler_on(error: BaseException) -> BaseException:
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (
        __file__,
        execution.__file__,
    ):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace
    return error


def _endless(ran: Sequence[Ran], due: Any) -> str:
    counts = Counter(one.job.handler for one in ran).most_common(3)
    most = ", ".join(f"{handler!r} {count} times" for handler, count in counts)
    return (
        f"{len(ran)} jobs were run ({most}), and job {due.id} {due.handler!r} is due next: if that "
        "is no endless chain of jobs that enqueue or retry one another, raise limit="
    )
