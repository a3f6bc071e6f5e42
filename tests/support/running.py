"""A worker on a thread of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, text

from sa_jobs import Jobs, Worker

SHORT: dict[str, Any] = {"lease": 3.0, "heartbeat": 1.0, "poll": 0.2, "sweep": 0.5, "grace": 5.0}


class RunningWorker:
    """A worker that runs on a thread; `code` or `error` say how it ended."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.code: int | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="worker under test")
        self.thread.start()

    def stop(self) -> int | None:
        """Drain the worker, and return its exit code."""
        self.worker.stop()
        self.join()
        return self.code

    def join(self) -> None:
        """Wait for the worker's end."""
        self.thread.join(30)
        assert not self.thread.is_alive(), "the worker does not end"

    def _run(self) -> None:
        try:
            self.code = self.worker.run()
        except BaseException as error:
            self.error = error


@contextmanager
def running(engine: Any, jobs: Jobs, **options: Any) -> Iterator[RunningWorker]:
    """Run a worker with short periods for the block; an error of it fails the test."""
    running_worker = RunningWorker(Worker(engine, jobs, **{**SHORT, **options}))
    try:
        yield running_worker
    finally:
        running_worker.stop()
    if running_worker.error is not None:
        raise running_worker.error


def run_all(engine: Any, jobs: Jobs, **options: Any) -> None:
    """Run every job that is due."""
    assert Worker(engine, jobs, **{**SHORT, **options}).run_until_empty() == 0


@contextmanager
def constraint(engine: Engine, condition: str) -> Iterator[None]:
    """Let the jobs table refuse rows that break a condition, for the block."""
    with engine.begin() as connection:
        connection.execute(text(f"ALTER TABLE sa_jobs ADD CONSTRAINT odd CHECK ({condition})"))
    try:
        yield
    finally:
        with engine.begin() as connection:
            connection.execute(text("ALTER TABLE sa_jobs DROP CONSTRAINT odd"))
