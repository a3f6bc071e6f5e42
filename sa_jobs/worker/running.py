"""A claimed job on its way through this worker, and the mailbox by which its parts report."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.handlers import Handler
from sa_jobs.outcome import Outcome

StopReason = Literal["timeout", "cancel", "lost", "shutdown"]

_serial = itertools.count()


class Running:
    """One claim of a job, from dispatch until its outcome is written.

    Written by the control loop, except `started_at`, `error` and `task` (the slot that runs it),
    `deadline` and `stop_reason` (also the heartbeat).
    """

    __slots__ = (
        "context",
        "deadline",
        "error",
        "handler",
        "job",
        "lost",
        "serial",
        "started_at",
        "stop_reason",
        "task",
        "with_writer",
    )

    def __init__(self, job: ClaimedJob, handler: Handler, deadline: float) -> None:
        self.job = job
        self.handler = handler
        self.context = JobContext(job)
        # A lapsed job can come back to this very worker: its id is no key.
        self.serial = next(_serial)
        # Monotonic seconds; the deadline is the lease's, counted from before it was asked for.
        self.deadline = deadline
        self.started_at: float | None = None
        self.stop_reason: StopReason | None = None
        self.lost = False
        # The outcome is on its way to the database: the heartbeat leaves the claim alone.
        self.with_writer = False
        self.task: asyncio.Task[None] | None = None
        # Where there are hooks: the exception that those of on_failure were told by the slot.
        self.error: BaseException | None = None

    def stop(self, reason: StopReason) -> None:
        """Tell the handler to stop; a coroutine is cancelled, once for each reason that comes."""
        if self.stop_reason == reason:
            # As each heartbeat finds a request to cancel. Another cancellation would cut off what
            # the coroutine does to clean up after the first one.
            return
        if self.stop_reason is None:
            self.stop_reason = reason
        self.context.stop()
        task = self.task
        if task is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)


@dataclass(frozen=True, slots=True)
class Committed:
    """The job's finish was committed with the handler's own session: nothing is left to write."""


@dataclass(frozen=True, slots=True)
class LeaseLost:
    """The job was no longer this worker's when its handler ended: nothing is to be written."""


Ending = Outcome | Committed | LeaseLost


@dataclass(frozen=True, slots=True)
class Ended:
    """A handler ended."""

    running: Running
    ending: Ending


@dataclass(frozen=True, slots=True)
class Lost:
    """The heartbeat found that a job is no longer this worker's."""

    running: Running


@dataclass(frozen=True, slots=True)
class Woken:
    """A job may have become ready."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Notifications are known to reach this worker."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The worker is to stop. `asked_at` is monotonic seconds."""

    asked_at: float


@dataclass(frozen=True, slots=True)
class GaveUp:
    """A part of the worker met an error that trying again cannot cure."""

    error: BaseException


Message = Ended | Lost | Woken | Listening | Stop | GaveUp


class Mailbox:
    """Where every thread, and every signal handler, reports to the control loop.

    `SimpleQueue.put` is reentrant, so a signal handler may call it at any instant.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Message] = SimpleQueue()
        self.put = self._queue.put

    def take(self, timeout: float) -> list[Message]:
        """Return all messages there are, waiting up to `timeout` seconds for the first."""
        messages: list[Message] = []
        try:
            messages.append(
                self._queue.get(timeout=timeout) if timeout > 0 else self._queue.get_nowait()
            )
            while True:
                messages.append(self._queue.get_nowait())
        except Empty:
            return messages
