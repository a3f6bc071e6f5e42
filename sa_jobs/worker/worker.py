"""Worker: its options, its start, and its end. What happens between is `loop`'s."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Engine

import sa_jobs
from sa_jobs import migrations, presence
from sa_jobs.errors import SchemaVersionError, WorkerError
from sa_jobs.handlers import Jobs
from sa_jobs.worker import links
from sa_jobs.worker.allowance import Allowance
from sa_jobs.worker.answers import AnswerWatch
from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.execution import Execution
from sa_jobs.worker.factories import Factories
from sa_jobs.worker.faults import is_transient
from sa_jobs.worker.heartbeat import Heartbeat
from sa_jobs.worker.hook_calls import HookCalls
from sa_jobs.worker.interruptions import interruptions_held_back
from sa_jobs.worker.links import Link
from sa_jobs.worker.loop import EXIT_OK, ControlLoop
from sa_jobs.worker.notices import LAST_CALLS_SECONDS, Notices
from sa_jobs.worker.options import (
    LEAST_ANSWER_SECONDS,
    LEAST_LEASE_SECONDS,
    check_async_session_factory,
    check_callable,
    check_engine,
    check_lease,
    check_most,
    check_period,
    check_queues,
    check_registry,
    check_session_factory,
    check_slots,
    check_switch,
)
from sa_jobs.worker.pace import Pace
from sa_jobs.worker.parts import end_all
from sa_jobs.worker.recovery import Recovery
from sa_jobs.worker.running import Mailbox, Stop
from sa_jobs.worker.surroundings import Around
from sa_jobs.worker.sweep import FORGET_SECONDS, Sweep
from sa_jobs.worker.threads import Threads
from sa_jobs.worker.wakeup import Wakeup
from sa_jobs.worker.watch import LeaseWatch

logger = logging.getLogger("sa_jobs.worker")

T = TypeVar("T")

DEFAULT_CONCURRENCY = 8
# More in one statement would make its answer late, and gain little.
DEFAULT_BATCH = 500
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_HEARTBEAT_SECONDS = 10.0
DEFAULT_POLL_SECONDS = 1.0
DEFAULT_SWEEP_SECONDS = 10.0
DEFAULT_GRACE_SECONDS = 30.0
DEFAULT_ANSWER_SECONDS = 10.0

# How long a statement may take after the second stop.
_PATIENCE_SECONDS = 1.0
# A LISTEN connection that was quiet for so many times the time for an answer is asked for one.
PROBE_FACTOR = 1.5


class Worker:
    """Runs the handlers of `jobs` for jobs in the engine's database.

    `queues` are served in rotation (default: those of the handlers). At most `concurrency` jobs
    run at once: plain functions on threads, coroutines on one event loop. `buffer` more may be
    claimed ahead; then each of the two kinds may fill as many slots. A statement claims or ends at
    most `batch` jobs: so many that have ended may run again after a crash while it is under way.

    All times are in seconds. A claim holds for `lease` and is renewed every `heartbeat`; lapsed
    ones are looked for every `sweep`. An idle worker looks for jobs every `poll`; with `listen` an
    enqueue wakes it at once. `grace` is how long a stop waits for handlers. A connection on which
    the database does not answer for `answer`, or a third of the lease if that is less for the
    heartbeat, is given up and replaced.

    With `max_jobs` taken, or once the process holds more than `max_memory_mib` of memory, it takes
    no more, and ends when those it has taken have ended. `on_ready` is called, on the thread that
    runs the worker, when the first look for jobs has been answered.

    Behind a connection pooler in transaction mode nothing can be listened to: the worker notices,
    says so once and polls. `listen_engine`, a psycopg 3 engine on the same database without the
    pooler, is for LISTEN alone.

    Handlers that take a session get one of `session_factory` or `async_session_factory` (default:
    a sessionmaker on the engine). The worker's own connections, one per role, are made from the
    engine apart from its pool, or from `control_engine`, which must be a psycopg 3 engine; an
    engine for another driver that has a creator needs that.

    `around(job)` gives a context manager that is entered where the handler runs, before its session
    is made, and left after that was closed: an application context, a scope of a tracer. What it
    raises on entering is a failed attempt; what it raises on leaving is logged.

    Raises WorkerError or InvalidJobError for settings that cannot work.
    """

    def __init__(
        self,
        engine: Any,
        jobs: Jobs,
        *,
        queues: Sequence[str] | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        buffer: int = 0,
        batch: int = DEFAULT_BATCH,
        lease: float = DEFAULT_LEASE_SECONDS,
        heartbeat: float = DEFAULT_HEARTBEAT_SECONDS,
        poll: float = DEFAULT_POLL_SECONDS,
        sweep: float = DEFAULT_SWEEP_SECONDS,
        grace: float = DEFAULT_GRACE_SECONDS,
        answer: float = DEFAULT_ANSWER_SECONDS,
        listen: bool = True,
        max_jobs: int | None = None,
        max_memory_mib: int | None = None,
        session_factory: Callable[[], Any] | None = None,
        async_session_factory: Callable[[], Any] | None = None,
        around: Around | None = None,
        control_engine: Engine | None = None,
        listen_engine: Engine | None = None,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        check_registry(jobs)
        self.jobs = jobs
        self.queues = check_queues(queues, jobs)
        self.concurrency = check_slots("concurrency", concurrency, least=1)
        self.buffer = check_slots("buffer", buffer, least=0)
        self.batch = check_slots("batch", batch, least=1)
        self.lease = check_period("lease", lease, least=LEAST_LEASE_SECONDS)
        self.heartbeat = check_period("heartbeat", heartbeat)
        check_lease(self.lease, self.heartbeat)
        self.poll = check_period("poll", poll)
        self.sweep = check_period("sweep", sweep)
        self.grace = check_period("grace", grace, least=0)
        self.answer = check_period("answer", answer, least=LEAST_ANSWER_SECONDS)
        self.listen = check_switch("listen", listen)
        self.max_jobs = check_most("max_jobs", max_jobs)
        self.max_memory_mib = check_most("max_memory_mib", max_memory_mib)
        self.around = check_callable("around", around)
        self.on_ready = check_callable("on_ready", on_ready)
        check_engine("engine", engine)
        if control_engine is not None:
            check_engine("control_engine", control_engine)
        if listen_engine is not None:
            check_engine("listen_engine", listen_engine)
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._tables = jobs.tables
        self._control = links.control_engine(engine if control_engine is None else control_engine)
        self._listen = (
            self._control if listen_engine is None else links.control_engine(listen_engine)
        )
        self._factories = Factories(
            engine,
            jobs,
            self._control,
            check_session_factory(session_factory),
            check_async_session_factory(async_session_factory),
            concurrency=self.concurrency,
        )
        self._mailbox = Mailbox()
        self._began = False
        self._stops = 0
        self._ended = threading.Event()
        # A queue and a thread from the start: a signal handler may neither start a thread nor take
        # a lock that the code it interrupts may hold.
        self._hurry: SimpleQueue[None] = SimpleQueue()
        self._control_link = self._link("claim")
        # Its answer must come while there is time for another beat.
        self._heartbeat_link = self._link("heartbeat", min(self.answer, self.lease / 3))
        self._sweep_link = self._link("sweep")
        self._listen_link = Link(self._listen, "sa-jobs listen", seconds=self.answer)
        self._notify_link = self._link("notify")
        self._hooks_link = self._link("hooks")
        links_held = (
            self._control_link,
            self._heartbeat_link,
            self._sweep_link,
            self._listen_link,
            self._notify_link,
            self._hooks_link,
        )
        self._answers = AnswerWatch(self._mailbox, [held.answers for held in links_held])
        self._wakeup: Wakeup | None = None

    def stop(self) -> None:
        """Ask the worker to drain; a second call asks it to end at once. Returns immediately.

        Safe from any thread and from a signal handler.
        """
        self._mailbox.put(Stop(time.monotonic()))
        self._stops += 1
        self._control_link.wake()
        if self._stops == 2:
            self._hurry.put(None)

    @property
    def subscriptions(self) -> int:
        """How often the worker has sent LISTEN; all but the first time after a lost connection."""
        return self._wakeup.subscriptions if self._wakeup is not None else 0

    @property
    def stops(self) -> int:
        """How often the worker was asked to stop."""
        return self._stops

    def run(self) -> int:
        """Work until `stop()`, and return the exit code.

        It is 0, or 3 if running jobs were handed back, or 1 if what was left could not be written,
        or 4 after `max_jobs` or `max_memory_mib`. In the main thread, a SIGINT or SIGTERM whose
        handler raises an exception, as KeyboardInterrupt by default, drains too, and the exception
        comes at the end; a second one ends at once.
        Raises WorkerError or SchemaVersionError where the worker cannot start or go on.
        """
        return self._run(until_empty=False)

    def run_until_empty(self) -> int:
        """Work until no job of the queues and handlers is due and none runs; return the exit code.

        For scripts and tests. Jobs that are scheduled for later, retries included, are left.
        """
        return self._run(until_empty=True)

    def _run(self, *, until_empty: bool) -> int:
        if self._began:
            raise WorkerError("a Worker runs once: make another one")
        self._began = True
        with interruptions_held_back(self.stop):
            return self._run_once(until_empty=until_empty)

    def _run_once(self, *, until_empty: bool) -> int:
        link = self._control_link
        self._answers.start()
        threading.Thread(
            target=self._interrupt_statements, name="sa-jobs-hurry", daemon=True
        ).start()
        try:
            if not self._schema_is_usable(link):
                return EXIT_OK  # It was stopped while it waited for the database.
            return self._work(link, until_empty=until_empty)
        finally:
            self._ended.set()
            self._answers.end()
            self._hurry.put(None)
            link.close()
            self._control.dispose()
            self._listen.dispose()
            self._factories.close()

    def _schema_is_usable(self, link: Link) -> bool:
        """Wait for the database and check its tables; return False if stopped meanwhile."""

        def check() -> migrations.SchemaStatus:
            return migrations.check(
                link.connection(), schema=self._tables.schema, name=self._tables.name
            )

        status = self._reach(check)
        if status is not None and not status.usable:
            raise SchemaVersionError(status.command)
        return status is not None

    def _sessions_are_usable(self, coroutines: Coroutines) -> bool:
        """Wait for the database and check handlers' sessions; return False if stopped meanwhile."""

        def check() -> bool:
            self._factories.check(self._tables, coroutines)
            return True

        return self._reach(check) is not None

    def _reach(self, check: Callable[[], T]) -> T | None:
        """Return what a look at the database gives, as soon as it answers; None if stopped."""
        recovery = Recovery("start")
        wait = 0.0
        while not any(isinstance(message, Stop) for message in self._mailbox.take(wait)):
            try:
                found = check()
            except Exception as error:
                fault = self._control_link.fault(error)
                fatal = recovery.verdict(fault)
                if fatal is not None:
                    raise fatal from error
                if not is_transient(fault):
                    raise
                wait = recovery.failed(fault)
            else:
                recovery.succeeded()
                return found
        return None

    def _work(self, link: Link, *, until_empty: bool) -> int:
        listen = self.listen and not until_empty

        def run_on_loop(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
            return coroutines.call(function)

        hooks = notices = None
        if self.jobs.hooks.around_attempts:
            hooks = HookCalls(self.jobs.hooks, run_on_loop)
            notices = Notices(
                self._hooks_link, self._mailbox, hooks, self.around, tables=self._tables
            )
        execution = Execution(
            worker=self.id,
            tables=self._tables,
            mailbox=self._mailbox,
            session_factory=self._factories.sync,
            async_session_factory=self._factories.asynchronous,
            around=self.around,
            hooks=hooks,
        )
        allowance = Allowance(max_jobs=self.max_jobs, max_memory_mib=self.max_memory_mib)
        threads = Threads(execution.run, execution.died, self.concurrency)
        coroutines = Coroutines(execution.run_async, execution.stopped, self.concurrency)
        loop = ControlLoop(
            worker=self.id,
            jobs=self.jobs,
            queues=self.queues,
            link=link,
            mailbox=self._mailbox,
            threads=threads,
            coroutines=coroutines,
            pace=Pace(self.poll, self._open_gates),
            allowance=allowance,
            slots=self.concurrency,
            room=self.concurrency + self.buffer,
            batch=self.batch,
            most_stuck=self.concurrency,
            lease=self.lease,
            grace=self.grace,
            until_empty=until_empty,
            on_ready=self.on_ready,
            notices=notices,
        )
        try:
            if not self._sessions_are_usable(coroutines):
                return EXIT_OK
            allowance.check()
            return self._serve(loop, link, notices, listen=listen)
        finally:
            threads.close()
            coroutines.close(self._factories.close_async, at_once=loop.in_a_hurry)

    def _serve(
        self, loop: ControlLoop, link: Link, notices: Notices | None, *, listen: bool
    ) -> int:
        """Run the loop with the threads that keep its leases, sweep, and listen."""
        heartbeat = Heartbeat(
            self._heartbeat_link,
            self._mailbox,
            loop.claims,
            self._view,
            worker=self.id,
            lease=self.lease,
            period=self.heartbeat,
            tables=self._tables,
        )
        sweep = Sweep(
            self._sweep_link,
            self._mailbox,
            loop.claims,
            worker=self.id,
            period=self.sweep,
            tables=self._tables,
            notices=notices,
        )
        self._wakeup = wakeup = Wakeup(
            self._listen_link,
            self._notify_link,
            self._mailbox,
            self.queues,
            self._tables,
            probe=self.answer * PROBE_FACTOR,
        )
        logger.info(
            "worker %s serves queues %s with %d slots and handlers %s",
            self.id,
            ", ".join(self.queues),
            self.concurrency,
            ", ".join(self.jobs.names),
        )
        own = {handler.queue for handler in self.jobs}
        if own.isdisjoint(self.queues):
            logger.warning(
                "no handler of this worker has one of its queues by default: they have %s, and "
                "their jobs wait there, unless another worker serves it",
                ", ".join(sorted(own)),
            )
        watch = LeaseWatch(self._mailbox, loop.claims, self.lease)
        if notices is not None:
            notices.start()
        heartbeat.start()
        watch.start()
        sweep.start()
        if listen:
            wakeup.start()
        try:
            return loop.run()
        finally:
            # Nothing runs any more: until now the heartbeat has kept the leases of what drained.
            end_all((sweep, wakeup, heartbeat, watch))
            if notices is not None:
                notices.finish(0.0 if loop.in_a_hurry else LAST_CALLS_SECONDS)
            self._forget(link)

    def _open_gates(self) -> None:
        if self._wakeup is not None:
            self._wakeup.open_gates()

    def _interrupt_statements(self) -> None:
        self._hurry.get()
        # The loop may wait for a statement, as behind a lock on the whole table.
        while not self._ended.wait(_PATIENCE_SECONDS):
            self._control_link.wake()
            self._control_link.answers.interrupt()
            if not self._ended.wait(_PATIENCE_SECONDS / 2):
                self._control_link.answers.cut()

    def _link(self, role: str, seconds: float | None = None) -> Link:
        return Link(self._control, f"sa-jobs {role}", seconds=seconds or self.answer)

    def _forget(self, link: Link) -> None:
        """Take the worker's row out of the operators' view."""
        if not link.is_open:
            return
        try:
            link.connection().execute(
                presence.forget_workers(self._tables), {"id": self.id, "seconds": FORGET_SECONDS}
            )
        except Exception as error:
            logger.debug("the worker's row stays for a while: %s", error)

    def _view(self, running: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": sa_jobs.__version__,
            "queues": json.dumps(self.queues),
            "handlers": json.dumps(self.jobs.names),
            "concurrency": self.concurrency,
            "running": running,
            "seconds": self.heartbeat * 3,
        }
