"""What a handler may know of its job: the claimed job, and a context to talk back to the worker."""

from __future__ import annotations

import datetime as dt
import logging
import threading
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, NamedTuple

from sa_jobs import jsontext
from sa_jobs.error_text import message_text
from sa_jobs.errors import InvalidJobError
from sa_jobs.meta import meta_of

logger = logging.getLogger("sa_jobs.job")

MAX_PROGRESS_BYTES = 10_000


class ClaimedJob(NamedTuple):
    """A job as it was claimed: plain values, tied to no session.

    `attempts` counts this attempt; `claim_no`, unlike `attempts`, never falls. `payload_text` and
    `meta_text` are JSON.
    """

    id: int
    queue: str
    handler: str
    payload_text: str
    priority: int
    tenant: str | None
    run_at: dt.datetime
    scheduled_for: dt.datetime | None
    attempts: int
    max_attempts: int
    claim_no: int
    idempotency_key: str | None
    unique_key: str | None
    meta_text: str
    created_at: dt.datetime
    claimed_at: dt.datetime

    @property
    def payload(self) -> dict[str, Any]:
        """The payload, decoded anew at each access."""
        payload = jsontext.loads(self.payload_text)
        if not isinstance(payload, dict):
            raise InvalidJobError(
                f"the payload of job {self.id} is no JSON object, whose keys would be the "
                "handler's arguments"
            )
        return payload

    @property
    def meta(self) -> dict[str, Any]:
        """What the job carries beside its payload, decoded anew at each access."""
        return meta_of(self.meta_text)

    @property
    def final_attempt(self) -> bool:
        """Whether a failure of this attempt makes the job dead."""
        return self.attempts >= self.max_attempts


def log_fields(job: ClaimedJob) -> dict[str, Any]:
    """Return the fields that every log record about a job carries; never the payload."""
    return {
        "job_id": job.id,
        "job_handler": job.handler,
        "job_queue": job.queue,
        "job_attempt": job.attempts,
    }


# Subscriptable at run time from Python 3.11 on.
if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class _JobLog(_Adapter):
    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {**(self.extra or {}), **(kwargs.get("extra") or {})}
        return msg, kwargs


_making_event = threading.Lock()


class JobContext:
    """Handed to a handler whose parameter is annotated with it.

    `job` is the claimed job, `attempt` the number of this try from 1. `cancelled` is true once the
    job was asked to cancel, timed out, lost its lease, or the worker stops: return or raise soon.
    Safe to use from any thread.
    """

    # Weakly referable, so that hooks can keep what they know of an attempt for as long as it lasts.
    __slots__ = ("__weakref__", "_event", "_log", "_progress", "_stopped", "job")

    def __init__(self, job: ClaimedJob) -> None:
        self.job = job
        self._stopped = False
        # Made by the first wait: most handlers never do, and it is dearer than all else here.
        self._event: threading.Event | None = None
        self._progress: str | None = None
        self._log: _JobLog | None = None

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self.job.attempts

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop."""
        return self._stopped

    @property
    def log(self) -> logging.LoggerAdapter[logging.Logger]:
        """A logger that adds the job's id, handler, queue and attempt to each record."""
        if self._log is None:
            self._log = _JobLog(logger, log_fields(self.job))
        return self._log

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds`, or until the handler should stop; return whether it should."""
        with _making_event:
            event = self._event
            if event is None:
                event = self._event = threading.Event()
        # `stop` sets the flag before it looks for the event.
        return self._stopped or event.wait(seconds)

    def progress(self, value: Any) -> None:
        """Keep a JSON value that the next heartbeat stores as `meta.progress`.

        Never fails the job: a value that cannot be stored is logged and left out.
        """
        try:
            self._progress = jsontext.dumps(value, what="progress", max_bytes=MAX_PROGRESS_BYTES)
        except Exception as error:
            # As text: a log record that is kept would keep the value with the traceback's frames.
            self.log.warning("progress left out: %s", message_text(error))

    def stop(self) -> None:
        """Tell the handler to stop (called by the worker)."""
        self._stopped = True
        event = self._event
        if event is not None:
            event.set()

    def take_progress(self) -> str | None:
        """Return the progress that was reported since the last call, as JSON (for the worker)."""
        progress, self._progress = self._progress, None
        return progress

    def keep_progress(self, progress: str | None) -> None:
        """Take back what could not be stored, unless there is newer (for the worker)."""
        if self._progress is None:
            self._progress = progress
