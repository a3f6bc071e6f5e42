"""Worker: its options, its start, and its end. What happens between is `loop`'s."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Engine

import sa_jobs
from sa_jobs import migrations, presence
from sa_jobs.errors import SchemaVersionError, WorkerError
from sa_jobs.handlers import Jobs
from sa_jobs.worker import links
from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.execution import Execution
from sa_jobs.worker.factories import Factories
from sa_jobs.worker.faults import Recovery, hopeless, is_transient
from sa_jobs.worker.heartbeat import Heartbeat
from sa_jobs.worker.links import Link
from sa_jobs.worker.loop import EXIT_OK, ControlLoop
from sa_jobs.worker.options import (
    check_count,
    check_lease,
    check_period,
    check_queues,
    check_registry,
)
from sa_jobs.worker.pace import Pace
from sa_jobs.worker.running import Mailbox, Stop
from sa_jobs.worker.sweep import FORGET_SECONDS, Sweep
from sa_jobs.worker.threads import Threads
from sa_jobs.worker.wakeup import Wakeup
from sa_jobs.worker.watch import LeaseWatch

logger = logging.getLogger("sa_jobs.worker")

T = TypeVar("T")

DEFAULT_CONCURRENCY = 8
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_HEARTBEAT_SECONDS = 10.0
DEFAULT_POLL_SECONDS = 1.0
DEFAULT_SWEEP_SECONDS = 10.0
DEFAULT_GRACE_SECONDS = 30.0

# How long a statement may take after the second stop.
_PATIENCE_SECONDS = 1.0


class Worker:
    """Runs the handlers of `jobs` for jobs in the engine's database.

    `queues` are served in rotation (default: those of the handlers). At most `concurrency` jobs
    run at once: plain functions on threads, coroutines on one event loop. `buffer` more may be
    claimed ahead; then each of the two kinds may fill as many slots.

    All times are in seconds. A claim holds for `lease` and is renewed every `heartbeat`; lapsed
    ones are looked for every `sweep`. An idle worker looks for jobs every `poll`; with `listen` an
    enqueue wakes it at once. `grace` is how long a stop waits for handlers.

    Handlers that take a session get one of `session_factory` or `async_session_factory` (default:
    a sessionmaker on the engine). The worker's own connections, one per role, are made from the
    engine apart from its pool, or from `control_engine`, which must be a psycopg 3 engine; an
    engine for another driver that has a creator needs that.

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
        lease: float = DEFAULT_LEASE_SECONDS,
        heartbeat: float = DEFAULT_HEARTBEAT_SECONDS,
        poll: float = DEFAULT_POLL_SECONDS,
        sweep: float = DEFAULT_SWEEP_SECONDS,
        grace: float = DEFAULT_GRACE_SECONDS,
        listen: bool = True,
        session_factory: Callable[[], Any] | None = None,
        async_session_factory: Callable[[], Any] | None = None,
        control_engine: Engine | None = None,
    ) -> None:
        check_registry(jobs)
        self.jobs = jobs
        self.queues = check_queues(queues, jobs)
        self.concurrency = check_count("concurrency", concurrency, least=1)
        self.buffer = check_count("buffer", buffer, least=0)
        self.lease = check_period("lease", lease)
        self.heartbeat = check_period("heartbeat", heartbeat)
        check_lease(self.lease, self.heartbeat)
        self.poll = check_period("poll", poll)
        self.sweep = check_period("sweep", sweep)
        self.grace = check_period("grace", grace, may_be_zero=True)
        self.listen = listen
        self.id = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._tables = jobs.tables
        self._control = links.control_engine(engine if control_engine is None else control_engine)
        self._factories = Factories(
            engine,
            jobs,
            self._control,
            session_factory,
            async_session_factory,
            concurrency=self.concurrency,
        )
        self._mailbox = Mailbox()
        self._began = False
        self._stops = 0
        self._ended = threading.Event()
        self._control_link = Link(self._control, "sa-jobs claim")

    def stop(self) -> None:
        """Ask the worker to drain; a second call asks it to end at once. Returns immediately.

        Safe from any thread and from a signal handler.
        """
        self._mailbox.put(Stop())
        self._stops += 1
        if self._stops == 2:
            threading.Thread(
                target=self._interrupt_statements, name="sa-jobs-hurry", daemon=True
            ).start()

    def run(self) -> int:
        """Work until `stop()`, and return the exit code: 0, or 3 if running jobs were handed back.

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
        link = self._control_link
        try:
            if not self._schema_is_usable(link):
                return EXIT_OK  # It was stopped while it waited for the database.
            return self._work(link, until_empty=until_empty)
        finally:
            self._ended.set()
            link.close()
            self._control.dispose()
            self._factories.close()

    def _schema_is_usable(self, link: Link) -> bool:
        """Wait for the database and check its tables; return False if stopped meanwhile."""

        def check() -> migrations.SchemaStatus:
            try:
                return migrations.check(
                    link.connection(), schema=self._tables.schema, name=self._tables.name
                )
            except Exception:
                link.drop()
                raise

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
                fatal = hopeless(error)
                if fatal is not None:
                    raise fatal from error
                if not is_transient(error):
                    raise
                wait = recovery.failed(error)
            else:
                recovery.succeeded()
                return found
        return None

    def _work(self, link: Link, *, until_empty: bool) -> int:
        listen = self.listen and not until_empty
        execution = Execution(
            worker=self.id,
            tables=self._tables,
            mailbox=self._mailbox,
            session_factory=self._factories.sync,
            async_session_factory=self._factories.asynchronous,
        )
        threads = Threads(execution.run, self.concurrency)
        coroutines = Coroutines(execution.run_async, execution.stopped, self.concurrency)
        loop = ControlLoop(
            worker=self.id,
            jobs=self.jobs,
            queues=self.queues,
            link=link,
            mailbox=self._mailbox,
            threads=threads,
            coroutines=coroutines,
            pace=Pace(self.poll, announces=listen),
            room=self.concurrency + self.buffer,
            most_stuck=self.concurrency,
            lease=self.lease,
            grace=self.grace,
            until_empty=until_empty,
        )
        try:
            if not self._sessions_are_usable(coroutines):
                return EXIT_OK
            return self._serve(loop, link, listen=listen)
        finally:
            threads.close()
            coroutines.close(self._factories.close_async, at_once=loop.in_a_hurry)

    def _serve(self, loop: ControlLoop, link: Link, *, listen: bool) -> int:
        """Run the loop with the threads that keep its leases, sweep, and listen."""
        heartbeat = Heartbeat(
            self._link("heartbeat"),
            self._mailbox,
            loop.claims,
            self._view,
            worker=self.id,
            lease=self.lease,
            period=self.heartbeat,
            tables=self._tables,
        )
        sweep = Sweep(
            self._link("sweep"),
            self._mailbox,
            loop.claims,
            worker=self.id,
            period=self.sweep,
            tables=self._tables,
        )
        wakeup = Wakeup(self._link("listen"), self._mailbox, self.queues, self._tables)
        logger.info(
            "worker %s serves queues %s with %d slots and handlers %s",
            self.id,
            ", ".join(self.queues),
            self.concurrency,
            ", ".join(self.jobs.names),
        )
        watch = LeaseWatch(loop.claims, self.lease)
        heartbeat.start()
        watch.start()
        sweep.start()
        if listen:
            wakeup.start()
        try:
            return loop.run()
        finally:
            sweep.end()
            wakeup.end()
            # Last, so that what drains keeps its leases.
            heartbeat.end()
            watch.end()
            self._forget(link)

    def _interrupt_statements(self) -> None:
        # The loop may wait for a statement, as behind a lock on the whole table.
        while not self._ended.wait(_PATIENCE_SECONDS):
            self._control_link.interrupt()

    def _link(self, role: str) -> Link:
        return Link(self._control, f"sa-jobs {role}")

    def _forget(self, link: Link) -> None:
        """Take the worker's row out of the operators' view."""
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
