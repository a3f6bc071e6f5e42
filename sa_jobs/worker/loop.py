"""Worker: the control loop. It claims, hands out, collects, and writes, on one thread.

A claim is never larger than the free slots and the buffer. Its transaction is committed before a
handler starts, and none of the worker's own is open while one runs. Outcomes that arrive together
are written together, at once. Everything else in this package reports to this loop by its mailbox.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Engine

from sa_jobs import claims, migrations, presence
from sa_jobs.errors import SaJobsError, SchemaVersionError, WorkerError
from sa_jobs.handlers import Jobs
from sa_jobs.outcome import Finished, Released, failed
from sa_jobs.worker import links
from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.execution import Execution, timed_out
from sa_jobs.worker.factories import Factories
from sa_jobs.worker.faults import Recovery, hopeless, is_transient
from sa_jobs.worker.heartbeat import Heartbeat
from sa_jobs.worker.links import Link
from sa_jobs.worker.options import (
    check_count,
    check_lease,
    check_period,
    check_queues,
    check_registry,
)
from sa_jobs.worker.pace import Pace
from sa_jobs.worker.records import log_lost, log_outcome
from sa_jobs.worker.running import (
    Committed,
    Ended,
    Ending,
    LeaseLost,
    Lost,
    Mailbox,
    Message,
    Running,
    Stop,
    Woken,
)
from sa_jobs.worker.sweep import Sweep
from sa_jobs.worker.threads import Threads
from sa_jobs.worker.wakeup import Wakeup
from sa_jobs.worker.writer import Writer

logger = logging.getLogger("sa_jobs.worker")

EXIT_OK = 0
EXIT_FAILURE = 1
# Not every job could end in the grace period; what still ran was handed back.
EXIT_HANDED_BACK = 3

DEFAULT_CONCURRENCY = 8
DEFAULT_LEASE_SECONDS = 30.0
DEFAULT_HEARTBEAT_SECONDS = 10.0
DEFAULT_POLL_SECONDS = 1.0
DEFAULT_SWEEP_SECONDS = 10.0
DEFAULT_GRACE_SECONDS = 30.0

# With nothing to wait for, the loop looks around at least this often.
_LONGEST_WAIT_SECONDS = 5.0


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
        self._handlers = jobs.names
        self._control = links.control_engine(engine if control_engine is None else control_engine)
        self._factories = Factories(
            engine, jobs, self._control, session_factory, async_session_factory
        )
        self._mailbox = Mailbox()
        self._running: dict[int, Running] = {}
        self._rotation = 0
        self._stops = 0
        self._failure: BaseException | None = None
        self._until_empty = False
        self._began = False

    def stop(self) -> None:
        """Ask the worker to drain; a second call asks it to end at once. Returns immediately.

        Safe from any thread and from a signal handler.
        """
        self._mailbox.put(Stop())

    def run(self) -> int:
        """Work until `stop()`, and return the exit code: 0, or 3 if running jobs were handed back.

        Raises WorkerError or SchemaVersionError where the worker cannot start or go on.
        """
        return self._run()

    def run_until_empty(self) -> int:
        """Work until no job of the queues and handlers is due and none runs; return the exit code.

        For scripts and tests. Jobs that are scheduled for later, retries included, are left.
        """
        self._until_empty = True
        return self._run()

    def _run(self) -> int:
        if self._began:
            raise WorkerError("a Worker runs once: make another one")
        self._began = True
        link = Link(self._control, "sa-jobs claim")
        try:
            return self._work(link) if self._schema_is_usable(link) else EXIT_OK
        finally:
            link.close()
            self._control.dispose()
            self._factories.close()

    def _schema_is_usable(self, link: Link) -> bool:
        """Wait for the database and check its tables; return False if stopped meanwhile."""
        recovery = Recovery("start")
        while not self._stops:
            try:
                status = migrations.check(
                    link.connection(), schema=self._tables.schema, name=self._tables.name
                )
            except Exception as error:
                fatal = hopeless(error)
                if fatal is not None:
                    raise fatal from error
                if not is_transient(error):
                    raise
                link.drop()
                self._receive(recovery.failed(error))
            else:
                recovery.succeeded()
                if not status.usable:
                    raise SchemaVersionError(status.command)
                return True
        return False

    def _work(self, link: Link) -> int:
        execution = Execution(
            worker=self.id,
            tables=self._tables,
            mailbox=self._mailbox,
            session_factory=self._factories.sync,
            async_session_factory=self._factories.asynchronous,
        )
        self._link = link
        self._recovery = Recovery("claim")
        self._threads = Threads(execution.run, self.concurrency)
        self._coroutines = Coroutines(execution.run_async, self.concurrency)
        self._writer = Writer(self.id, self._tables)
        self._pace = Pace(self.poll, announces=self.listen and not self._until_empty)
        heartbeat = Heartbeat(
            Link(self._control, "sa-jobs heartbeat"),
            self._mailbox,
            lambda: list(self._running.values()),
            self._view,
            worker=self.id,
            lease=self.lease,
            period=self.heartbeat,
            tables=self._tables,
        )
        sweep = Sweep(
            Link(self._control, "sa-jobs sweep", transactional=True),
            self._mailbox,
            period=self.sweep,
            tables=self._tables,
        )
        wakeup = Wakeup(
            Link(self._control, "sa-jobs listen"), self._mailbox, self.queues, self._tables
        )
        logger.info(
            "worker %s serves queues %s with %d slots and handlers %s",
            self.id,
            ", ".join(self.queues),
            self.concurrency,
            ", ".join(self._handlers),
        )
        heartbeat.start()
        sweep.start()
        if self.listen and not self._until_empty:
            wakeup.start()
        try:
            self._loop()
            return self._drain()
        finally:
            sweep.end()
            wakeup.end()
            self._threads.close()
            self._coroutines.close(self._factories.close_async)
            # Last, so that what drains keeps its leases.
            heartbeat.end()
            self._forget()

    # --- the loop -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._stops and self._failure is None:
            self._receive(self._patience())
            self._expire()
            try:
                self._write()
                idle = self._may_claim() and not self._claim() and not self._running
                self._recovery.succeeded()
                if idle and self._until_empty:
                    return
            except Exception as error:
                self._pace.postpone(self._survive(error))

    def _patience(self) -> float:
        """Return how long the loop may wait for a message."""
        waits = [_LONGEST_WAIT_SECONDS]
        if self._free() > 0 or self._writer.pending:
            waits.append(self._pace.due_in())
        deadline = self._next_deadline()
        if deadline is not None:
            waits.append(max(0.0, deadline - time.monotonic()))
        return min(waits)

    def _may_claim(self) -> bool:
        return not self._stops and self._free() > 0 and self._pace.due_in() == 0.0

    def _free(self) -> int:
        return self.concurrency + self.buffer - len(self._running)

    def _receive(self, timeout: float) -> None:
        for message in self._mailbox.take(timeout):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Ended):
            self._ended(message.running, message.ending)
        elif isinstance(message, Woken):
            self._pace.hurry()
        elif isinstance(message, Lost):
            self._lost(message.running)
        elif isinstance(message, Stop):
            self._stops += 1
        else:
            self._failure = message.error

    def _claim(self) -> bool:
        """Claim for the free slots, and return whether there was a job."""
        limit = self._free()
        found = claims.claim(
            self._link.connection(),
            worker=self.id,
            queues=self._next_queues(),
            handlers=self._handlers,
            limit=limit,
            lease=self.lease,
            tables=self._tables,
        )
        for job in found:
            running = Running(job, self.jobs[job.handler])
            self._running[running.serial] = running
            self._slots(running).submit(running)
        if found:
            self._pace.hurry()
            return True
        if self._pace.found_nothing():
            self._link.connection().execute(
                presence.sleep(self._tables),
                {
                    "queues": self.queues,
                    "seconds": self._pace.announced_seconds,
                    "enough": self._pace.enough_seconds,
                },
            )
        return False

    def _slots(self, running: Running) -> Threads | Coroutines:
        return self._coroutines if running.handler.signature.is_coroutine else self._threads

    def _leave(self, running: Running) -> None:
        """Free the slot of a handler that was told to stop."""
        if not running.handler.signature.is_coroutine:
            # A thread cannot be stopped from outside; it keeps its job until it returns.
            self._threads.abandon(running)

    def _next_queues(self) -> list[str]:
        """Return the queues, each claim beginning with the next one, so that none starves."""
        start = self._rotation % len(self.queues)
        self._rotation += 1
        return self.queues[start:] + self.queues[:start]

    def _write(self) -> None:
        if not self._writer.pending:
            return
        written, lost = self._writer.flush(self._link.connection())
        for running, outcome in written:
            self._running.pop(running.serial, None)
            log_outcome(running, outcome)
        for running in lost:
            self._lost(running)
        # A slot is free, and where one job was there may be more.
        self._pace.hurry()

    def _ended(self, running: Running, ending: Ending) -> None:
        if running.serial not in self._running:
            return  # Lost or handed back: what its handler says comes too late.
        if isinstance(ending, Committed):
            # Before its time-out was written: the job is done.
            self._writer.discard(running)
            del self._running[running.serial]
            log_outcome(running, Finished())
            self._pace.hurry()
        elif running.with_writer:
            return  # It timed out: what its handler says comes too late.
        elif isinstance(ending, LeaseLost):
            self._lost(running)
        else:
            self._writer.add(running, ending)

    def _lost(self, running: Running) -> None:
        """Forget a claim that is no longer ours: its handler is told, and nothing is written."""
        if running.lost or running.serial not in self._running:
            return
        running.lost = True
        running.stop("lost")
        del self._running[running.serial]
        if not self._slots(running).withdraw(running):
            self._leave(running)
        log_lost(running)

    def _survive(self, error: BaseException) -> float:
        """Return how long to wait after a database error, or raise one that waiting cannot cure."""
        if isinstance(error, SaJobsError):
            raise error
        fatal = hopeless(error)
        if fatal is not None:
            self._failure = fatal
            return 0.0
        self._link.drop()
        return self._recovery.failed(error)

    # --- timeouts -------------------------------------------------------------------------------

    def _next_deadline(self) -> float | None:
        now = time.monotonic()
        return min(
            (
                # What has not begun yet runs out of its time no sooner than this.
                (now if running.started_at is None else running.started_at)
                + running.handler.timeout
                for running in self._running.values()
                if running.handler.timeout is not None and not running.with_writer
            ),
            default=None,
        )

    def _expire(self) -> None:
        """Book the attempts that ran out of their time as failed; their slots are free again."""
        now = time.monotonic()
        for running in list(self._running.values()):
            timeout = running.handler.timeout
            if timeout is None or running.started_at is None or running.with_writer:
                continue
            if running.started_at + timeout <= now:
                running.stop("timeout")
                self._leave(running)
                text = timed_out(running)
                self._writer.add(running, failed(running.job, text, running.handler.backoff))
        if self._threads.stuck > self.concurrency:
            self._failure = WorkerError(
                f"{self._threads.stuck} handlers timed out and still keep their threads: the "
                "worker hands back its jobs and ends, to be started anew"
            )

    # --- the end --------------------------------------------------------------------------------

    def _drain(self) -> int:
        """Release what has not begun, wait for what runs, release the rest; return the code."""
        deadline = time.monotonic() + self.grace
        if self._running:
            logger.info(
                "stopping: %d jobs still run, for up to %g s", len(self._running), self.grace
            )
        self._withdraw()
        while self._running and self._stops < 2 and self._failure is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._expire()
            wait = self._try_to_write()
            if self._running:
                self._receive(min(left, wait, self._patience_in_drain()))
        handed_back = self._hand_back()
        if self._failure is not None:
            raise self._failure
        logger.info("stopped")
        return EXIT_HANDED_BACK if handed_back else EXIT_OK

    def _patience_in_drain(self) -> float:
        deadline = self._next_deadline()
        return 1.0 if deadline is None else max(0.0, deadline - time.monotonic())

    def _withdraw(self) -> None:
        for running in list(self._running.values()):
            if not running.with_writer and self._slots(running).withdraw(running):
                self._writer.add(running, Released())

    def _try_to_write(self) -> float:
        """Write what is pending if the database allows; return the seconds until the next try."""
        try:
            self._write()
            self._recovery.succeeded()
            return _LONGEST_WAIT_SECONDS
        except Exception as error:
            return self._survive(error)

    def _hand_back(self) -> int:
        """Release the jobs that still run, and return how many."""
        left = [entry for entry in self._running.values() if not entry.with_writer]
        for running in left:
            running.stop("shutdown")
            self._writer.add(running, Released())
        if self._writer.pending:
            try:
                self._write()
            except Exception as error:
                logger.warning(
                    "%d jobs could not be written (%s); their leases run out",
                    len(self._writer.pending),
                    error.__class__.__name__,
                )
        return len(left)

    def _forget(self) -> None:
        """Take the worker's row out of the operators' view."""
        try:
            self._link.connection().execute(
                presence.forget_workers(self._tables), {"id": self.id, "seconds": 3600.0}
            )
        except Exception as error:
            logger.debug("the worker's row stays for a while: %s", error)

    def _view(self, running: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "version": _version(),
            "queues": json.dumps(self.queues),
            "handlers": json.dumps(self._handlers),
            "concurrency": self.concurrency,
            "running": running,
            "seconds": self.heartbeat * 3,
        }


def _version() -> str:
    from sa_jobs import __version__

    return __version__
