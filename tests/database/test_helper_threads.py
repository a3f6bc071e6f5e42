"""The worker's own threads, ended by an exception inside them: it goes on whole, or says so."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs import Jobs, Worker, WorkerError
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.running import SHORT, RunningWorker, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    jobs = Jobs()
    jobs.handler("noop")(lambda: None)
    return jobs


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


def raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in a thread, as soon as it runs Python code."""
    assert thread.ident is not None
    raised = ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(kind)
    )
    assert raised == 1


def thread_named(name: str) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == name)


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_a_slot_whose_thread_dies_is_filled_again(
    engine: Engine, jobs: Jobs, kind: type[BaseException]
) -> None:
    slots: list[threading.Thread] = []

    @jobs.handler("note")
    def note() -> None:
        slots.append(threading.current_thread())

    with running(engine, jobs, concurrency=1):
        for _ in range(3):
            (job_id,) = add(engine, jobs, "note")
            wait_until_done(engine, job_id)
            raise_in(slots[-1], kind)
        after = add(engine, jobs, "noop", *[{}] * 20)
        wait_until(lambda: {status(engine, job_id) for job_id in after} == {"done"}, "all are done")

    assert {job(engine, job_id).attempts for job_id in after} == {1}
    assert len(set(slots)) == 3


@pytest.mark.parametrize("kind", [RuntimeError, SystemExit])
def test_an_exception_sent_into_a_handler_costs_this_attempt_alone(
    engine: Engine, jobs: Jobs, kind: type[BaseException]
) -> None:
    slots: list[threading.Thread] = []

    @jobs.handler("spins", max_attempts=1)
    def spins() -> None:
        slots.append(threading.current_thread())
        while True:
            time.sleep(0.01)

    (bad,) = add(engine, jobs, "spins")
    with running(engine, jobs, concurrency=1):
        wait_until(lambda: slots, "it runs")
        raise_in(slots[0], kind)
        wait_until(lambda: status(engine, bad) == "dead", "the attempt is booked")
        after = add(engine, jobs, "noop", *[{}] * 20)
        wait_until(lambda: {status(engine, job_id) for job_id in after} == {"done"}, "all are done")

    (failure,) = failures(engine, bad)
    assert kind.__name__ in failure.error


@pytest.mark.parametrize("name", ["heartbeat", "sweep", "listen", "watch", "answers"])
def test_a_worker_that_loses_a_part_of_itself_hands_back_and_ends(
    engine: Engine, jobs: Jobs, name: str
) -> None:
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    (held,) = add(engine, jobs, "waits")
    options = {**SHORT, "lease": 30.0, "heartbeat": 0.2, "answer": 0.5}
    worker = RunningWorker(Worker(engine, jobs, **options))
    wait_until(lambda: status(engine, held) == "running", "it runs")
    began = time.monotonic()
    raise_in(thread_named(f"sa-jobs-{name}"), SystemExit)
    worker.thread.join(10)
    took = time.monotonic() - began
    go.set()
    worker.join()

    assert isinstance(worker.error, WorkerError)
    assert f"the thread sa-jobs-{name} ended by SystemExit" in str(worker.error)
    assert took < 5
    assert (status(engine, held), job(engine, held).attempts) == ("ready", 0)
