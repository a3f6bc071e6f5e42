"""Workers whose claims begin where the last one ended: what comes before that place is found too.

The cursor is switched on whatever claims cost, and the worker has jobs all the while.
"""

from __future__ import annotations

import datetime as dt
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from sqlalchemy import Connection, Engine, func, select, text

from sa_jobs import Jobs, Worker, cancel, claims, enqueue, enqueue_many, retry
from sa_jobs.claims import Place, Settled
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.outcome import Finished, Released
from sa_jobs.worker import cursor
from tests.support.gates import holders, wait_until_asleep
from tests.support.jobs import add, claim, job
from tests.support.running import run_all, running
from tests.support.waiting import wait_until

AGO = dt.timedelta(hours=1)


@pytest.fixture(autouse=True)
def always_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursor, "CHEAP_SECONDS", -1.0)


@pytest.fixture
def registry() -> Jobs:
    jobs = Jobs()

    @jobs.handler("send")
    def send() -> None: ...

    @jobs.handler("again", max_attempts=2, backoff=lambda attempt: 0.5)
    def again() -> None:
        raise RuntimeError("again")

    return jobs


@contextmanager
def busy(engine: Engine, registry: Jobs) -> Iterator[None]:
    """Run a worker that has one job after the other, and hears of nothing by notifications."""
    worker = Worker(engine, registry, queues=["default", "other"], concurrency=4, listen=False)
    working = threading.Thread(target=worker.run)
    ended = threading.Event()

    def keep_busy() -> None:
        while not ended.wait(0.02):
            with engine.begin() as connection:
                enqueue_many(connection, "send", [{}] * 4)

    feeding = threading.Thread(target=keep_busy)
    with engine.begin() as connection:
        # The lanes that the cursor knows from its first scan.
        enqueue_many(connection, "send", [{}] * 50)
        enqueue_many(connection, "send", [{}] * 50, queue="other")
    working.start()
    feeding.start()
    try:
        wait_until(lambda: count(engine, "done") > 150, "a busy worker", seconds=60)
        yield
    finally:
        ended.set()
        feeding.join()
        worker.stop()
        working.join(60)
        assert not working.is_alive()


def count(engine: Engine, status: str) -> int:
    jobs = DEFAULT_TABLES.jobs
    with engine.connect() as connection:
        return connection.execute(
            select(func.count()).select_from(jobs).where(jobs.c.status == status)
        ).scalar_one()


def status(engine: Engine, job_id: int) -> str:
    with engine.connect() as connection:
        return str(job(connection, job_id).status)


def is_done(engine: Engine, job_id: int) -> Callable[[], bool]:
    return lambda: status(engine, job_id) == "done"


def test_a_transaction_that_commits_long_after_its_start_is_found(
    engine: Engine, registry: Jobs
) -> None:
    with busy(engine, registry):
        with engine.begin() as late:
            job_id = enqueue(late, "send").id
            time.sleep(2 * cursor.SLACK_SECONDS)
        wait_until(is_done(engine, job_id), "the job", seconds=30)


def test_a_job_for_a_time_in_the_past_is_found(engine: Engine, registry: Jobs) -> None:
    with busy(engine, registry), engine.connect() as connection:
        job_id = enqueue(connection, "send", run_at=dt.datetime.now(dt.timezone.utc) - AGO).id
        connection.commit()
        wait_until(is_done(engine, job_id), "the job", seconds=30)


@pytest.mark.parametrize(("queue", "priority"), [("default", 9), ("default", -9), ("other", 9)])
def test_a_priority_that_is_new_is_found(
    engine: Engine, registry: Jobs, queue: str, priority: int
) -> None:
    with busy(engine, registry), engine.connect() as connection:
        job_id = enqueue(connection, "send", queue=queue, priority=priority).id
        connection.commit()
        wait_until(is_done(engine, job_id), "the job", seconds=30)


def test_a_retry_is_found(engine: Engine, registry: Jobs) -> None:
    with busy(engine, registry), engine.connect() as connection:
        failing = enqueue(connection, "again", max_attempts=2).id
        cancelled = enqueue(connection, "send", delay=3600).id
        connection.commit()
        wait_until(lambda: count(engine, "dead") == 1, "the second attempt", seconds=30)
        assert cancel(connection, cancelled) == "cancelled"
        assert retry(connection, cancelled) == "ready"
        connection.commit()
        wait_until(is_done(engine, cancelled), "the job that is retried", seconds=30)
        assert job(connection, failing).attempts == 2


def test_what_another_worker_gives_back_is_found(
    engine: Engine, connection: Connection, registry: Jobs
) -> None:
    old = add(connection, run_at=dt.datetime.now(dt.timezone.utc) - AGO)
    (held,) = claim(connection, worker="other")
    lapsed = add(connection, run_at=dt.datetime.now(dt.timezone.utc) - AGO)
    claim(connection, worker="dead", lease=0.0)
    with busy(engine, registry):
        claims.settle(connection, [Settled(held, Released())], worker="other")
        connection.commit()
        wait_until(is_done(engine, old), "the released job", seconds=30)
        # Taken back by this worker's own sweep, in its old place.
        wait_until(is_done(engine, lapsed), "the reclaimed job", seconds=60)


def test_a_handler_that_the_worker_learns_is_served(engine: Engine, registry: Jobs) -> None:
    with busy(engine, registry), engine.connect() as connection:
        job_id = enqueue(connection, "later").id
        connection.commit()
        time.sleep(2 * cursor.SLACK_SECONDS)
        registry.handler("later")(lambda: None)
        wait_until(is_done(engine, job_id), "the job", seconds=30)


def test_a_clock_that_is_set_back_hides_nothing(
    engine: Engine, registry: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places are ahead of the database's clock by then, as if with a slack below zero."""
    slack = cursor.SLACK_SECONDS
    # A worker that finds nothing reads from the start as often as one with jobs.
    monkeypatch.setattr(cursor, "IDLE_SHARE", 1e9)
    with busy(engine, registry):
        monkeypatch.setattr(cursor, "SLACK_SECONDS", -3600.0)
        done = count(engine, "done")
        wait_until(lambda: count(engine, "done") > done + 4, "claims with places ahead")
        monkeypatch.setattr(cursor, "SLACK_SECONDS", slack)
        done = count(engine, "done")
        # With places ahead each reading from the start gives no more jobs than there are slots.
        wait_until(lambda: count(engine, "done") > done + 200, "the jobs before the places")


def test_without_reading_from_the_start_they_would_not_be_found(
    engine: Engine, registry: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above show something."""
    monkeypatch.setattr(cursor, "LONGEST_SECONDS", 1e9)
    monkeypatch.setattr(cursor, "TIMES_AS_LONG", 1e9)
    with busy(engine, registry), engine.connect() as connection:
        job_id = enqueue(connection, "send", run_at=dt.datetime.now(dt.timezone.utc) - AGO).id
        connection.commit()
        done = count(engine, "done")
        wait_until(lambda: count(engine, "done") > done + 50, "many other jobs", seconds=30)
        assert job(connection, job_id).status == "ready"


@pytest.fixture
def no_scans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a worker, which knows a lane, read from the start only where something has happened."""
    monkeypatch.setattr(cursor, "LONGEST_SECONDS", 1e9)
    monkeypatch.setattr(cursor, "TIMES_AS_LONG", 1e9)
    with engine.begin() as connection:
        enqueue(connection, "send", delay=3600)


@pytest.mark.usefixtures("no_scans")
def test_a_worker_that_works_until_nothing_is_due_looks_before_the_places_too(
    engine: Engine, registry: Jobs
) -> None:
    @registry.handler("chain")
    def chain(left: int) -> None:
        if left:
            at = dt.datetime.now(dt.timezone.utc) - AGO * (9 - left)
            with engine.begin() as own:
                enqueue(own, "chain", {"left": left - 1}, run_at=at)

    with engine.begin() as connection:
        enqueue(connection, "chain", {"left": 5})
    run_all(engine, registry, concurrency=1, listen=False)
    assert count(engine, "done") == 6


@contextmanager
def late_and_silent(engine: Engine, sent: list[int]) -> Iterator[None]:
    """Commit a job after the block, long after its start, and notify nobody."""
    with engine.begin() as late:
        late.execute(text("SET LOCAL sa_jobs.notify = off"))
        sent.append(enqueue(late, "send").id)
        yield
        time.sleep(3 * cursor.SLACK_SECONDS)


@pytest.mark.usefixtures("no_scans")
def test_a_worker_that_listens_anew_looks_before_the_places_too(
    engine: Engine, registry: Jobs
) -> None:
    """What was committed meanwhile has notified nobody."""
    sent: list[int] = []
    with running(engine, registry, poll=600.0) as working:
        wait_until_asleep(engine)
        with late_and_silent(engine, sent):
            pass
        (listener,) = holders(engine)
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": listener})
        wait_until(lambda: working.worker.subscriptions > 1, "another connection")
        wait_until(is_done(engine, sent[0]), "the job", seconds=30)


@pytest.mark.usefixtures("no_scans")
def test_a_worker_whose_gates_were_shut_looks_before_the_places_too(
    engine: Engine, registry: Jobs
) -> None:
    sent: list[int] = []
    with ExitStack() as second:
        with running(engine, registry, poll=600.0):
            wait_until_asleep(engine)
            second.enter_context(running(engine, registry, poll=600.0))
            with late_and_silent(engine, sent):
                pass
            assert status(engine, sent[0]) == "ready"
        # The second one opens the gate that the first one has held.
        wait_until(is_done(engine, sent[0]), "the job", seconds=30)


@pytest.mark.usefixtures("no_scans")
def test_an_idle_worker_finds_what_becomes_due_at_a_priority_that_is_new(
    engine: Engine, registry: Jobs
) -> None:
    with running(engine, registry, listen=False), engine.connect() as connection:
        known = enqueue(connection, "send").id
        connection.commit()
        wait_until(is_done(engine, known), "a job of the priority that is known", seconds=30)
        time.sleep(cursor.SLACK_SECONDS)
        later = enqueue(connection, "send", priority=9, delay=0.5).id
        connection.commit()
        wait_until(is_done(engine, later), "the job for later", seconds=30)


def test_an_hour_that_the_wall_clock_shows_twice_keeps_its_order(connection: Connection) -> None:
    connection.execute(text("SET timezone = 'Europe/Berlin'"))
    first = add(connection, run_at=dt.datetime(2025, 10, 26, 0, 50, tzinfo=dt.timezone.utc))
    second = add(connection, run_at=dt.datetime(2025, 10, 26, 1, 10, tzinfo=dt.timezone.utc))
    try:
        assert [one.id for one in claim(connection, limit=2)] == [first, second]
    finally:
        connection.execute(text("RESET timezone"))


def test_a_claim_reads_lanes_in_the_order_given_from_their_places(connection: Connection) -> None:
    times = [
        connection.execute(text(f"SELECT now() - interval '{hours} hours'")).scalar_one()
        for hours in (3, 2, 1)
    ]
    low = [add(connection, run_at=run_at) for run_at in times]
    new = add(connection, priority=4)
    high = add(connection, priority=5)
    above = add(connection, priority=6)

    def taken(limit: int, *places: Place) -> list[int]:
        found = claims.claim(
            connection, worker="w", queues=["default"], handlers=["send"], limit=limit,
            lease=30, places=places,
        )  # fmt: skip
        connection.rollback()
        return [one.id for one in found]

    everything = Place("default", 5), Place("default", 0, 5), Place("default", None, 0)
    assert taken(9, *everything) == [above, high, new, *low]
    assert [taken(n, *everything)[-1] for n in (1, 2, 3, 4)] == [above, high, new, low[0]]
    assert taken(9, Place("default", 0, 1, times[0], low[0])) == low[1:]
    assert taken(9, Place("default", 0, 1, times[1], 0)) == low[1:]
    assert taken(9, Place("default", None, 0)) == []
    assert taken(9) == []


def test_a_finish_and_a_claim_go_in_one_statement(connection: Connection) -> None:
    first, second, third = (add(connection) for _ in range(3))
    (held,) = claim(connection)
    assert held.id == first
    landed, found = claims.finish_and_claim(
        connection, [Settled(held, Finished('{"a": 1}'))],
        worker="worker-1", queues=["default"], handlers=["send"], limit=1, lease=30,
    )  # fmt: skip
    connection.commit()
    assert (landed, [one.id for one in found]) == ({first}, [second])
    assert (job(connection, first).status, job(connection, first).result) == ("done", {"a": 1})
    assert job(connection, second).status == "running"

    stale = held._replace(claim_no=held.claim_no + 1)
    landed, found = claims.finish_and_claim(
        connection, [Settled(stale, Finished()), Settled(found[0], Finished())],
        worker="worker-1", queues=["default"], handlers=["none"], limit=1, lease=30,
    )  # fmt: skip
    connection.commit()
    assert (landed, found) == ({second}, [])
    assert job(connection, third).status == "ready"
