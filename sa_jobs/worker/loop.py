"""The control loop: it claims, hands out, collects, and writes, on one thread.

A claim is never larger than the free slots and the buffer. Its transaction is committed before a
handler starts, and none of the worker's own is open while one runs. Outcomes that arrive together
are written together, at once, and by the same statement that claims the next jobs where that can
be. Everything else in this package reports to this loop by its mailbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from sa_jobs import claims
from sa_jobs.context import ClaimedJob
from sa_jobs.errors import SaJobsError, WorkerError
from sa_jobs.handlers import Jobs
from sa_jobs.outcome import Finished, Released, failed
from sa_jobs.worker.allowance import Allowance
from sa_jobs.worker.coroutines import Coroutines
from sa_jobs.worker.cursor import JOB_SECONDS, Cursor
from sa_jobs.worker.execution import timed_out
from sa_jobs.worker.faults import first_line, hopeless, is_transient
from sa_jobs.worker.links import Link
from sa_jobs.worker.notices import Notices
from sa_jobs.worker.pace import Pace
from sa_jobs.worker.records import log_ended_before, log_lost, log_outcome
from sa_jobs.worker.recovery import Recovery
from sa_jobs.worker.running import (
    Committed,
    Ended,
    Ending,
    GatesOpened,
    GatesShut,
    LeaseLost,
    Listening,
    Lost,
    Mailbox,
    Message,
    Running,
    Stop,
    Woken,
)
from sa_jobs.worker.threads import Threads
from sa_jobs.worker.writer import Flushed, Writer

logger = logging.getLogger("sa_jobs.worker")

EXIT_OK = 0
EXIT_FAILURE = 1
# Not every job could end in the grace period; what still ran was handed back.
EXIT_HANDED_BACK = 3
# The worker has done as much as it may, and was not asked to stop: another one is to be started.
EXIT_RECYCLED = 4

# With nothing to wait for, the loop looks around at least this often.
_LONGEST_WAIT_SECONDS = 5.0
# How often to look for claims whose answer was lost, while there may be some.
_DISOWN_SECONDS = 1.0
# For rows that are locked when the worker ends, as by its own heartbeat.
_LAST_WRITES_SECONDS = 1.0
# How long jobs are handed back again on new connections.
_AGAIN_SECONDS = 1.5
_IN_A_HURRY_SECONDS = 0.5


class ControlLoop:
    """Works until a stop, or with `until_empty` until nothing is due and nothing runs.

    At most `room` claims are held at once, `slots` of which can run; a statement claims or ends at
    most `batch`. More than `most_stuck` threads whose handlers run on after their time-out end the
    loop with an error. With the allowance used up the loop claims no more, and ends when nothing
    runs, however long that takes. `on_ready` is called once.
    """

    def __init__(
        self,
        *,
        worker: str,
        jobs: Jobs,
        queues: list[str],
        link: Link,
        mailbox: Mailbox,
        threads: Threads,
        coroutines: Coroutines,
        pace: Pace,
        allowance: Allowance,
        slots: int,
        room: int,
        batch: int,
        most_stuck: int,
        lease: float,
        grace: float,
        until_empty: bool,
        on_ready: Callable[[], None] | None,
        notices: Notices | None = None,
    ) -> None:
        self._worker = worker
        self._jobs = jobs
        self._queues = queues
        self._link = link
        self._mailbox = mailbox
        self._threads = threads
        self._coroutines = coroutines
        self._pace = pace
        self._allowance = allowance
        self._room = room
        # With a buffer, half of the claims run while the other half is written and claimed.
        self._most_at_once = min(batch, room if room <= slots else max(1, room // 2))
        self._most_stuck = most_stuck
        self._lease = lease
        self._grace = grace
        self._until_empty = until_empty
        self._on_ready = on_ready
        self._notices = notices
        self._running: dict[int, Running] = {}
        # Those of them whose attempt may take so long only.
        self._timed: dict[int, Running] = {}
        self._cursor = Cursor()
        self._writer = Writer(worker, jobs.tables, batch)
        self._recovery = Recovery("claim")
        self._rotation = 0
        self._stops = 0
        self._asked_at: float | None = None
        self._failure: BaseException | None = None
        self._in_doubt_until = 0.0
        self._disowned_at = 0.0

    def claims(self) -> list[Running]:
        """Return the claims that are held now; safe from any thread."""
        return list(self._running.values())

    def run(self) -> int:
        """Work, drain, and return the exit code; raise the error that ended it, if one did."""
        try:
            self._work()
            self._drain()
        except BaseException as error:
            # Also what another thread has raised in this one, in the middle of anything.
            self._failure = error
            self._link.drop()
            self._in_doubt_until = time.monotonic() + self._lease
        code = self._hand_back()
        if self._failure is not None:
            raise self._failure
        logger.info("stopped")
        if code == EXIT_OK and not self._stops and self._allowance.is_used_up():
            return EXIT_RECYCLED
        return code

    @property
    def in_a_hurry(self) -> bool:
        """Whether a second stop has come."""
        return self._stops > 1

    def _work(self) -> None:
        """Claim, hand out, collect and write, until a stop, a failure, or nothing more to do."""
        while not self._stops and self._failure is None:
            self._receive(self._patience())
            self._expire()
            try:
                answered = True
                if not self._finish_and_claim():
                    answered = self._write()
                    # A stop that came meanwhile must be seen before anything is claimed.
                    self._receive(0)
                    if self._allowance.is_used_up() and not self._running:
                        break
                    if self._may_claim():
                        answered = True
                        if not self._claim() and not self._running and self._until_empty:
                            break
                if answered:
                    self._recovery.succeeded()
            except Exception as error:
                wait = self._survive(error)
                self._pace.postpone(wait)
                self._writer.postpone(wait)

    def _patience(self) -> float:
        """Return how long the loop may wait for a message."""
        waits = [_LONGEST_WAIT_SECONDS, self._next_deadline()]
        if self._free() > 0:
            waits.append(self._pace.due_in())
        writing = self._writer.due_in()
        if writing is not None:
            waits.append(writing)
        return min(waits)

    def _may_claim(self) -> bool:
        return self._is_working() and self._free() > 0 and self._pace.due_in() == 0.0

    def _is_working(self) -> bool:
        return not self._stops and self._failure is None

    def _free(self) -> int:
        return self._allowance.room(self._room - len(self._running))

    def _receive(self, timeout: float) -> None:
        for message in self._mailbox.take(timeout):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Ended):
            self._ended(message.running, message.ending)
        elif isinstance(message, Woken):
            self._cursor.renew()
            self._pace.hurry()
        elif isinstance(message, Listening):
            self._pace.hears = True
            self._cursor.renew()
            self._pace.hurry()
        elif isinstance(message, GatesOpened):
            # What came while they were shut has notified nobody.
            self._cursor.renew()
            self._pace.gates_opened()
        elif isinstance(message, GatesShut):
            self._cursor.renew()
            self._pace.gates_shut()
        elif isinstance(message, Lost):
            self._lost(message.running)
        elif isinstance(message, Stop):
            self._stops += 1
            self._asked_at = message.asked_at if self._asked_at is None else self._asked_at
        else:
            self._failure = message.error

    def _claim(self) -> bool:
        """Claim for the free slots, and return whether there was a job."""
        connection = self._link.connection()
        self._disown(connection)
        asked_at = time.monotonic()
        scan = self._cursor.wants_scan(asked_at)
        queues = self._next_queues()
        limit = min(self._free(), self._most_at_once)
        try:
            if scan:
                lanes = claims.lanes(connection, queues=queues, tables=self._jobs.tables)
                self._cursor.begin(lanes, time.monotonic())
            places = self._cursor.places(queues)
            found = claims.claim(
                connection,
                worker=self._worker,
                queues=queues,
                handlers=self._jobs.names,
                limit=limit,
                lease=self._lease,
                places=places,
                tables=self._jobs.tables,
            )
            answered_at = time.monotonic()
            self._cursor.claimed(
                found,
                places=places,
                limit=limit,
                asked_at=asked_at,
                answered_at=answered_at,
                seconds=answered_at - asked_at,
                scan=scan,
            )
            # Before a handler starts, which may be the end of the process.
            self._say_ready()
            self._dispatch(found, asked_at)
        except Exception:
            self._doubt()
            raise
        if found:
            self._pace.hurry()
            return True
        if self._until_empty and not self._running and places is not None and not scan:
            # What lies before the places is there, too.
            self._cursor.renew()
            return self._claim()
        self._pace.found_nothing()
        return False

    def _finish_and_claim(self) -> bool:
        """Write what is pending and claim, in one statement; return False where it takes two."""
        now = time.monotonic()
        if (
            self._writer.due_in() != 0.0
            or not self._is_working()
            or self._in_doubt_until >= now
            or self._cursor.wants_scan(now)
            or self._allowance.is_used_up()
        ):
            return False
        # What is written frees its slots for the jobs that the same statement claims.
        finished = self._writer.finished()
        if finished is None:
            return False
        free = self._allowance.room(self._room - len(self._running) + len(finished))
        if free <= 0:
            return False
        connection = self._link.connection()
        queues = self._next_queues()
        places = self._cursor.places(queues)
        limit = min(free, self._most_at_once)
        try:
            landed, found = claims.finish_and_claim(
                connection,
                finished,
                worker=self._worker,
                queues=queues,
                handlers=self._jobs.names,
                limit=limit,
                lease=self._lease,
                places=places,
                tables=self._jobs.tables,
            )
        except DBAPIError as error:
            if is_transient(error) or hopeless(error) is not None:
                self._doubt()
                raise
            # One row that the database refuses: the writer finds which.
            return False
        except Exception:
            self._doubt()
            raise
        answered_at = time.monotonic()
        self._cursor.claimed(
            found,
            places=places,
            limit=limit,
            asked_at=now,
            answered_at=answered_at,
            seconds=answered_at - now - len(finished) * JOB_SECONDS,
            scan=False,
        )
        try:
            self._dispatch(found, now)
        except Exception:
            self._doubt()
            raise
        self._settled(self._writer.settled(connection, len(finished), landed))
        if not found:
            self._pace.found_nothing()
        return True

    def _dispatch(self, found: list[ClaimedJob], asked_at: float) -> None:
        """Give claimed jobs to the slots; their leases count from when they were asked for."""
        if not found:
            return
        self._allowance.spend(len(found))
        self._lose_earlier(found)
        deadline = asked_at + self._lease
        plain: list[Running] = []
        coroutines: list[Running] = []
        for job in found:
            handler = self._jobs[job.handler]
            running = Running(job, handler, deadline)
            self._running[running.serial] = running
            if handler.timeout is not None:
                self._timed[running.serial] = running
            (coroutines if handler.signature.is_coroutine else plain).append(running)
        if plain:
            self._threads.submit(plain)
        if coroutines:
            self._coroutines.submit(coroutines)

    def _doubt(self) -> None:
        """Note that a claim may have been committed all the same, or be so yet."""
        self._in_doubt_until = time.monotonic() + self._lease

    def _say_ready(self) -> None:
        on_ready, self._on_ready = self._on_ready, None
        if on_ready is not None:
            try:
                on_ready()
            except Exception:
                logger.exception("on_ready failed")

    def _lose_earlier(self, found: list[ClaimedJob]) -> None:
        """Forget earlier claims of jobs that lapsed, and have come back to this very worker."""
        ids = {job.id for job in found}
        for running in self.claims():
            if running.job.id in ids:
                self._writer.discard(running)
                self._lost(running)

    def _disown(self, connection: Connection) -> None:
        """Give back what a claim took whose answer was lost: nobody runs it."""
        now = time.monotonic()
        if self._in_doubt_until < now or self._disowned_at > now - _DISOWN_SECONDS:
            return
        known = [running.job.id for running in self._running.values()]
        given_back = claims.disown(
            connection, worker=self._worker, known=known, tables=self._jobs.tables
        )
        self._disowned_at = now
        if given_back:
            logger.warning(
                "jobs %s were claimed when the connection was lost; they are ready again",
                ", ".join(map(str, given_back)),
            )

    def _slots(self, running: Running) -> Threads | Coroutines:
        return self._coroutines if running.handler.signature.is_coroutine else self._threads

    def _next_queues(self) -> list[str]:
        """Return the queues, each claim beginning with the next one, so that none starves."""
        start = self._rotation % len(self._queues)
        self._rotation += 1
        return self._queues[start:] + self._queues[:start]

    def _write(self) -> bool:
        """Write what is pending, if it is time; return whether the database was asked."""
        if self._writer.due_in() != 0.0:
            return False
        self._settled(self._writer.flush(self._link.connection()))
        return True

    def _settled(self, flushed: Flushed) -> None:
        for running, outcome in flushed.written:
            self._forget(running)
            log_outcome(running, outcome)
            if self._notices is not None:
                self._notices.written(running, outcome)
        for running, status in flushed.ended:
            self._forget(running)
            log_ended_before(running, status)
        for running in flushed.lost:
            self._lost(running)
        # A slot is free, and where one job was there may be more.
        self._pace.hurry()

    def _forget(self, running: Running) -> None:
        self._running.pop(running.serial, None)
        self._timed.pop(running.serial, None)

    def _ended(self, running: Running, ending: Ending) -> None:
        if running.serial not in self._running:
            return  # Lost or handed back: what its handler says comes too late.
        if isinstance(ending, Committed):
            # Before its time-out was written: the job is done.
            self._writer.discard(running)
            self._forget(running)
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
        self._forget(running)
        self._leave(running)
        log_lost(running)

    def _leave(self, running: Running) -> None:
        """Free the slot of a handler that was told to stop, whatever it does."""
        slots = self._slots(running)
        if not slots.withdraw(running):
            slots.abandon(running)

    def _survive(self, error: BaseException) -> float:
        """Return how long to wait after a database error, or raise one that waiting cannot cure."""
        if isinstance(error, SaJobsError):
            self._failure = error
            return 0.0
        fault = self._link.fault(error)
        self._cursor.drop()
        fatal = self._recovery.verdict(fault)
        if fatal is not None:
            self._failure = fatal
            return 0.0
        return self._recovery.failed(fault)

    # --- time ----------------------------------------------------------------------------------

    def _next_deadline(self) -> float:
        """Return the seconds until a time-out is to be looked at."""
        now = time.monotonic()
        left = _LONGEST_WAIT_SECONDS
        for running in self._timed.values():
            if running.with_writer:
                continue
            timeout = running.handler.timeout
            if timeout is not None:
                # What has not begun yet runs out of its time no sooner than this.
                started_at = now if running.started_at is None else running.started_at
                left = min(left, started_at + timeout - now)
        return max(0.0, left)

    def _expire(self) -> None:
        """Book the attempts that ran out of their time as failed; their slots are free again."""
        now = time.monotonic()
        for running in list(self._timed.values()):
            timeout = running.handler.timeout
            if running.with_writer:
                continue
            if (
                timeout is not None
                and running.started_at is not None
                and running.started_at + timeout <= now
            ):
                running.stop("timeout")
                self._leave(running)
                text = timed_out(running)
                self._writer.add(running, failed(running.job, text, running.handler.backoff))
        self._check_slots()

    def _check_slots(self) -> None:
        stuck = self._threads.stuck + self._coroutines.stuck
        if stuck > self._most_stuck:
            self._failure = WorkerError(
                f"{stuck} handlers were told to stop and still run: the worker hands back its "
                "jobs and ends, to be started anew"
            )
        elif self._coroutines.silent_seconds > self._lease:
            self._failure = WorkerError(
                f"the event loop has not answered for {self._lease:g} s, since a coroutine handler "
                "blocks it: the worker hands back its jobs and ends, to be started anew"
            )

    # --- the end --------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Release what has not begun, and wait for what runs."""
        now = time.monotonic()
        # The stop may have come while the loop waited for the database.
        deadline = (now if self._asked_at is None else self._asked_at) + self._grace
        if self._running:
            logger.info(
                "stopping: %d jobs still run, for up to %.3g s",
                len(self._running),
                max(0.0, deadline - now),
            )
        self._withdraw()
        while self._running and self._stops < 2 and self._failure is None:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            self._expire()
            self._try_to_write()
            if self._running:
                writing = self._writer.due_in()
                waits = [left, 1.0, self._next_deadline()]
                self._receive(min(waits if writing is None else [*waits, writing]))

    def _withdraw(self) -> None:
        for running in list(self._running.values()):
            if not running.with_writer and self._slots(running).withdraw(running):
                self._writer.add(running, Released())

    def _try_to_write(self) -> None:
        """Write what is pending, if it is time and the database allows."""
        try:
            if self._write():
                self._recovery.succeeded()
        except Exception as error:
            self._writer.postpone(self._survive(error))

    def _write_the_last(self) -> None:
        """Write what is pending, with a little patience for rows that somebody has locked."""
        give_up_at = time.monotonic() + _LAST_WRITES_SECONDS
        while self._writer.pending:
            self._writer.postpone(0)
            self._write()
            if time.monotonic() > give_up_at:
                return
            if self._writer.pending:
                time.sleep(_LAST_WRITES_SECONDS / 20)

    def _hand_back(self) -> int:
        """Release the jobs that still run, and return the exit code."""
        left = [entry for entry in self._running.values() if not entry.with_writer]
        for running in left:
            running.stop("shutdown")
            self._writer.add(running, Released())
        # The connection may have been lost long since: nothing needed it while all slots were busy.
        patience = _IN_A_HURRY_SECONDS if self.in_a_hurry else _AGAIN_SECONDS
        give_up_at = time.monotonic() + patience
        while True:
            try:
                self._write_the_last()
                if self._in_doubt_until > time.monotonic():
                    self._disowned_at = 0.0
                    self._disown(self._link.connection())
                break
            except Exception as error:
                fault = self._link.fault(error)
                if time.monotonic() >= give_up_at or self._recovery.verdict(fault) is not None:
                    logger.warning("at the end: %s", first_line(fault))
                    break
                time.sleep(patience / 10)
        if self._writer.pending:
            logger.warning(
                "%d jobs could not be written; their leases run out", len(self._writer.pending)
            )
            return EXIT_FAILURE
        return EXIT_HANDED_BACK if left else EXIT_OK
