"""The listener: it comes back by itself, loses nothing, and holds nobody up."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import Jobs, presence
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.worker import wakeup
from tests.support.faults import kill_backends
from tests.support.gates import open_gates, wait_until_asleep
from tests.support.looking import wait_until_done
from tests.support.proxy import Proxy
from tests.support.running import RunningWorker, running
from tests.support.waiting import wait_until

# Longer than any test: what starts was found by a notification, or by the look after LISTEN.
POLL = 60.0
START_SECONDS = 2.0


class Watched:
    """A worker with a queue of its own, which notes when its jobs start."""

    def __init__(self, engine: Engine, queue: str, stack: ExitStack, **options: Any) -> None:
        self.jobs = Jobs()
        self.started_at: dict[int, float] = {}
        self.jobs.handler("note", queue=queue)(self._note)
        self._engine = engine
        self._running: RunningWorker = stack.enter_context(
            running(engine, self.jobs, **{"poll": POLL, **options})
        )
        self._number = 0

    @property
    def subscriptions(self) -> int:
        return self._running.worker.subscriptions

    def wait_until_subscribed(self, times: int) -> None:
        wait_until(lambda: self.subscriptions == times, f"it has sent LISTEN {times} times")

    def enqueue(self) -> int:
        """Enqueue a job, and return its number."""
        self._number += 1
        with Session(self._engine) as session, session.begin():
            self.jobs.enqueue(session, "note", {"number": self._number})
        return self._number

    def start_of(self, number: int) -> float:
        """Return when a job started, once it has."""
        wait_until(lambda: number in self.started_at, f"job {number} starts")
        return self.started_at[number]

    def _note(self, number: int) -> None:
        self.started_at[number] = time.monotonic()


@pytest.mark.slow
def test_a_listener_that_is_lost_again_and_again_costs_no_wake_up(engine: Engine) -> None:
    """Five workers lose it four times each: a job comes in the gap, another one 3 s later."""
    slowest = 0.0
    with ExitStack() as stack:
        workers = [Watched(engine, f"queue-{number}", stack) for number in range(5)]
        wait_until_asleep(engine, gates=5)
        for losses in range(1, 5):
            assert kill_backends(str(engine.url), "sa-jobs listen") == 5
            lost_at = time.monotonic()
            in_the_gap = [worker.enqueue() for worker in workers]
            back_at = []
            for worker in workers:
                worker.wait_until_subscribed(1 + losses)
                back_at.append(time.monotonic())
            for worker, number, back in zip(workers, in_the_gap, back_at, strict=True):
                slowest = max(slowest, worker.start_of(number) - back)
            time.sleep(max(0.0, lost_at + 3 - time.monotonic()))
            later = [(worker, time.monotonic(), worker.enqueue()) for worker in workers]
            for worker, enqueued_at, number in later:
                slowest = max(slowest, worker.start_of(number) - enqueued_at)
    assert slowest <= START_SECONDS


def test_a_listener_that_cannot_connect_at_the_start_goes_on_trying(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(Proxy(str(engine.url)))
        proxy.refuse()
        direct = create_engine(proxy.url, poolclass=NullPool)
        worker = Watched(engine, "default", stack, listen_engine=direct)
        first = worker.enqueue()
        wait_until(lambda: "listen: " in caplog.text, "it says so")
        assert worker.subscriptions == 0
        proxy.refuse(False)
        worker.wait_until_subscribed(1)
        back_at = time.monotonic()
        assert worker.start_of(first) - back_at <= START_SECONDS
        wait_until_asleep(engine)
        enqueued_at = time.monotonic()
        assert worker.start_of(worker.enqueue()) - enqueued_at <= START_SECONDS


def test_a_worker_that_hears_nothing_of_its_own_says_so_once_and_polls(
    engine: Engine,
    empty_database: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when the URL that it is to listen on names another database."""
    monkeypatch.setattr(wakeup, "ECHO_SECONDS", 0.5)
    other = create_engine(empty_database, poolclass=NullPool)
    with ExitStack() as stack:
        worker = Watched(engine, "default", stack, listen_engine=other, poll=0.2)
        wait_until(lambda: "it polls instead" in caplog.text, "it says so")
        wait_until(lambda: not listeners(other), "the connection is closed")
        for _ in range(3):
            enqueued_at = time.monotonic()
            assert worker.start_of(worker.enqueue()) - enqueued_at <= START_SECONDS
        # Nobody is to pay for notifications that nobody hears.
        assert open_gates(engine) == 0
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert "a notification to itself has not arrived" in warnings[0].message


def listeners(engine: Engine) -> list[Any]:
    """Return what the server says of the listeners in this database."""
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT state, wait_event, backend_xmin, xact_start FROM pg_stat_activity WHERE"
                " application_name = 'sa-jobs listen' AND datname = current_database()"
            )
        )
        return [tuple(row) for row in rows]


def test_a_flood_of_notifications_passes_a_worker_whose_handlers_are_all_busy(
    engine: Engine,
) -> None:
    go = threading.Event()
    jobs = Jobs()
    jobs.handler("waits")(lambda: bool(go.wait(60)))
    with engine.connect() as connection:
        channel = presence.channel_name(connection, DEFAULT_TABLES)
    fullest = 0.0
    with running(engine, jobs, concurrency=4, poll=POLL) as worker:
        wait_until(lambda: worker.worker.subscriptions, "it listens")
        with Session(engine) as session, session.begin():
            ids = [entry.id for entry in jobs.enqueue_many(session, "waits", [{}] * 4)]
        wait_until(lambda: busy(engine) == 4, "all handlers are busy")
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for batch in range(50):
                connection.execute(
                    text(
                        # Every other one is a wake-up; none is like another in its transaction.
                        "SELECT pg_notify(:channel, CASE WHEN n % 2 = 0 THEN :queue || n ELSE"
                        " left(encode(sha256('default'), 'hex'), 16) END)"
                        " FROM generate_series(1, 1000) n"
                    ),
                    {"channel": channel, "queue": f"{batch} "},
                )
                fullest = max(
                    fullest,
                    connection.execute(text("SELECT pg_notification_queue_usage()")).scalar_one(),
                )
        wait_until(
            lambda: (
                [tuple(row) for row in listeners(engine)] == [("idle", "ClientRead", None, None)]
            ),
            "the listener waits, and holds no snapshot",
        )
        go.set()
        for job_id in ids:
            wait_until_done(engine, job_id)
    assert fullest < 0.01


def busy(engine: Engine) -> int:
    with engine.connect() as connection:
        return int(
            connection.execute(
                text("SELECT count(*) FROM sa_jobs WHERE status = 'running'")
            ).scalar_one()
        )
