"""Running jobs in the test's own transaction."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import datetime as dt
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from sqlalchemy import Connection
from sqlalchemy.orm import Session, scoped_session

from sa_jobs import limits
from sa_jobs.connections import Caller, connection_of, run_sync_of
from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.error_text import all_of
from sa_jobs.errors import AttemptLostError, SaJobsError
from sa_jobs.handlers import Handler, Jobs
from sa_jobs.hooks import AttemptEnd, name_of
from sa_jobs.job_options import Delay, seconds_ahead
from sa_jobs.outcome import Discard, Failed, Finished, Outcome, Retry, Snooze, raised, returned
from sa_jobs.testing import ledger
from sa_jobs.testing.assertions import also_awaitable
from sa_jobs.testing.coroutines import OwnLoop, is_loop_running
from sa_jobs.testing.rows import EnqueuedJob, read
from sa_jobs.testing.sessions import Lent
from sa_jobs.worker import execution
from sa_jobs.worker.hook_calls import HookCalls, end_by
from sa_jobs.worker.running import Running
from sa_jobs.worker.surroundings import Around, Failures, Surroundings

P = ParamSpec("P")
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
def run_job(
    session: Caller,
    jobs: Jobs,
    job: Any,
    *,
    raise_errors: bool = True,
    around: Around | None = None,
) -> Ran:
    """Run one job that is ready, due or not, in the session's transaction; return what came of it.

    `job` is an id, or anything that has one. A handler that asks for a session gets this one, and
    cannot commit it; what it wrote stays if it returns, and is taken back if it raises. With an
    AsyncSession `await` the call: then coroutines that ask for an AsyncSession can run too.

    What a handler raises is booked as a worker does it, and then raised here; not if it is Retry,
    Snooze or Discard, nor with `raise_errors=False`. Hooks of `jobs` are called, and `around` is
    entered as a worker's.

    Raises UnknownHandlerError, or RunError for a job that is not ready, with nothing written.
    """
    job_id = limits.check_id("job", getattr(job, "id", job))
    return _on_bench(session, jobs, raise_errors, around, lambda bench: bench.run_one(job_id))


@also_awaitable
def drain(
    session: Caller,
    jobs: Jobs,
    *,
    queues: Sequence[str] | None = None,
    limit: int = DRAIN_LIMIT,
    advance: Delay | None = None,
    raise_errors: bool = True,
    around: Around | None = None,
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
    return _on_bench(
        session, jobs, raise_errors, around, lambda bench: bench.drain(names, limit, period)
    )


def _on_bench(
    session: Any,
    jobs: Jobs,
    raise_errors: bool,
    around: Around | None,
    work: Callable[[_Bench], T],
) -> T:
    run_sync = run_sync_of(session)
    if run_sync is None:
        with OwnLoop() as loop:
            bench = _Bench(jobs, _session_of(session), raise_errors, around, loop.run)
            return work(bench)
    from sqlalchemy.util import await_only

    asynchronous = getattr(session, "registry", lambda: session)()

    def run(sync: Any) -> T:
        return work(_Bench(jobs, _session_of(sync), raise_errors, around, await_only, asynchronous))

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


class _Bench:
    """Runs jobs one after the other, in one session.

    Its time stands still but where it is moved on to the next job, so that no back-off falls due by
    how long a test takes.
    """

    def __init__(
        self,
        jobs: Jobs,
        session: Session,
        raise_errors: bool,
        around: Around | None,
        wait_for: Callable[[Any], Any],
        async_session: Any = None,
    ) -> None:
        self._jobs = jobs
        self._tables = jobs.tables
        self._session = session
        self._raise_errors = raise_errors
        self._around = around
        self._wait_for = wait_for
        self._async_session = async_session
        self._now = ledger.clock(self._connection())
        self._advances = False
        # In a test's own event loop, whoever cancels cancels the test.
        self._failures: Failures = (
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
        job = ledger.claim(connection, self._tables, job_id, now=self._now)
        if job is None:
            raise RunError(
                f"job {job_id} is {found[0].status}, and only a job that is ready can be run; "
                "retry() makes one ready that is dead or cancelled"
            )
        return self._run(job, handler)

    def drain(self, queues: Sequence[str] | None, limit: int, advance: float | None) -> list[Ran]:
        self._advances = advance is not None
        until = self._now + dt.timedelta(seconds=advance or 0)
        wanted: dict[str, Any] = {"queues": queues, "handlers": self._jobs.names}
        ran: list[Ran] = []
        passed: list[int] = []
        while True:
            connection = self._connection()
            due = ledger.next_due(connection, self._tables, **wanted, now=self._now, but=passed)
            if due is None:
                later = ledger.next_time(
                    connection,
                    self._tables,
                    **wanted,
                    after=self._now,
                    # What a handler has just made due by a clock of its own is due; what has run
                    # waits for its turn.
                    until=until if self._advances else ledger.clock(connection),
                    but=() if self._advances else [one.job.id for one in ran],
                )
                if later is None:
                    return ran
                self._now = later
                continue
            if len(ran) == limit:
                raise RunError(_endless(ran, due))
            handler = self._handler(due.handler)
            job = ledger.claim_due(
                connection,
                self._tables,
                due.id,
                queue=due.queue,
                handler=due.handler,
                now=self._now,
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
                raise RunError(_needs_a_loop(f"handler {name!r}"))
        if self._async_session is None and is_loop_running():
            hook = self._jobs.hooks.coroutine_around_attempts()
            if hook is not None:
                raise RunError(_needs_a_loop(f"the hook {name_of(hook)}"))
        return handler

    def _run(self, job: ClaimedJob, handler: Handler) -> Ran:
        connection = self._connection()
        running = Running(job, handler, math.inf)
        last_id = ledger.last_id(connection, self._tables)
        token = seconds_ahead.set(self._seconds_ahead(connection))
        try:
            # Under a test's own event loop the coroutine runs in the context of the test.
            run = contextvars.copy_context().run if self._async_session is None else _directly
            outcome, landed, error = run(self._attempt, running, last_id)
        finally:
            seconds_ahead.reset(token)
        if landed is None:
            landed = self._end(running, outcome, last_id)
        if not landed:
            raise RunError(
                f"job {job.id} {job.handler!r} was no longer this run's when its handler had "
                "ended: its row was changed meanwhile, and a worker would write nothing"
            )
        (after,) = read(self._connection(), self._tables, self._tables.jobs.c.id == job.id)
        if isinstance(outcome, Failed):
            self._tell_afterwards(running, outcome, death=after.status == "dead")
        if error is not None and self._raise_errors and not _says_what_follows(error):
            raise error
        return Ran(after, job.attempts, error)

    def _attempt(
        self, running: Running, last_id: int
    ) -> tuple[Outcome, bool | None, BaseException | None]:
        """Return how an attempt ended, whether that was written (None: not yet), and its error."""
        try:
            with self._surroundings(running.job):
                try:
                    self._call_hooks(lambda hooks: hooks.before(running))
                    outcome, landed = self._handle(running, last_id)
                except self._failures as failure:
                    end, shown = end_by(running, failure), failure
                    self._call_hooks(lambda hooks: hooks.ended(running, end, shown))
                    raise
                done: AttemptEnd = "lost" if landed is False else "done"
                self._call_hooks(lambda hooks: hooks.ended(running, done, None))
                return outcome, landed, None
        except self._failures as failure:
            with _as_it_was(failure):
                failed = raised(running.job, _from_the_handler_on(failure), running.handler.backoff)
            return failed, None, failure

    def _handle(self, running: Running, last_id: int) -> tuple[Finished, bool | None]:
        transactional = running.handler.signature.session is not None
        lent = Lent(self._session, self._connection(), transactional=transactional)
        try:
            try:
                outcome = self._call(running.job, running.handler, running.context)
            finally:
                lent.give_back()
            if not transactional:
                return outcome, None
            landed = self._end(running, outcome, last_id, transactional=True)
            if landed:
                lent.keep()
            return outcome, landed
        finally:
            lent.undo()

    def _surroundings(self, job: ClaimedJob) -> contextlib.AbstractContextManager[None]:
        if self._around is None:
            return contextlib.nullcontext()
        return Surroundings(self._around, job, self._failures)

    def _call_hooks(self, call: Callable[[HookCalls], None]) -> None:
        """Call hooks, whose sessions are their own, as those of a handler that asks for none."""
        if not self._jobs.hooks.around_attempts:
            return
        lent = Lent(self._session, self._connection(), transactional=False)
        try:
            call(
                HookCalls(
                    self._jobs.hooks, lambda coroutine: self._wait_for(coroutine()), self._failures
                )
            )
        finally:
            lent.give_back()
            lent.undo()

    def _tell_afterwards(self, running: Running, outcome: Failed, *, death: bool) -> None:
        """Call the hooks that a worker calls once a failure is written, as its `Notices` do."""
        untold = running.error is None
        error = AttemptLostError(outcome.error) if running.error is None else running.error
        if not (untold or death) or not self._jobs.hooks.around_attempts:
            return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):
                stack.enter_context(self._surroundings(running.job))
            if untold:
                self._call_hooks(lambda hooks: hooks.failed(running.context, error))
            if death:
                self._call_hooks(lambda hooks: hooks.dead(running.context, error))

    def _call(self, job: ClaimedJob, handler: Handler, context: JobContext) -> Finished:
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
        running: Running,
        outcome: Outcome,
        last_id: int,
        *,
        transactional: bool = False,
    ) -> bool:
        connection, job, now = self._connection(), running.job, self._now
        if self._advances:
            ledger.set_created(connection, self._tables, after=last_id, now=now)
        progress = running.context.take_progress()
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

    def _seconds_ahead(self, connection: Connection) -> float:
        """Return by how much it is later than what the database takes for now."""
        if not self._advances:
            return 0.0
        return (self._now - ledger.transaction_time(connection)).total_seconds()

    def _connection(self) -> Connection:
        return connection_of(self._session, self._tables)


def _directly(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


async def _result_of(
    call: Callable[[], Any], failures: Failures
) -> tuple[Any, BaseException | None]:
    # Caught here, where the traceback has no frame of an event loop in it yet.
    try:
        return await call(), None
    except failures as error:
        return None, error


def _says_what_follows(error: BaseException) -> bool:
    return issubclass(type(error), (Retry, Snooze, Discard))


@contextlib.contextmanager
def _as_it_was(error: BaseException) -> Iterator[None]:
    """Give an exception back all that writing it down took out of it: the users' data."""
    kept = [(member, member.args, dict(vars(member))) for member in all_of(error)]
    trace = error.__traceback__
    yield
    error.__traceback__ = trace
    for member, args, attributes in kept:
        # An exception of the users' own may have attributes that do anything.
        with contextlib.suppress(Exception):
            member.args = args
            vars(member).update(attributes)


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


def _needs_a_loop(what: str) -> str:
    return (
        f"{what} is a coroutine, and this test is one too, whose event loop cannot be entered "
        "twice: give the call an AsyncSession, and await it"
    )


def _endless(ran: Sequence[Ran], due: Any) -> str:
    counts = Counter(one.job.handler for one in ran).most_common(3)
    most = ", ".join(f"{handler!r} {count} times" for handler, count in counts)
    return (
        f"{len(ran)} jobs were run ({most}), and job {due.id} {due.handler!r} is due next: if that "
        "is no endless chain of jobs that enqueue or retry one another, raise limit="
    )
