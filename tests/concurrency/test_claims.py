"""Many at once: one claim per job, one row per key, whoever comes first."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection, Engine, create_engine, func, select, text

from sa_jobs import ClaimedJob, Enqueued, Row, cancel, claims, enqueue, enqueue_many, retry
from sa_jobs.claims import Settled
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.outcome import Failed, Finished
from tests.support.jobs import add, all_jobs, change, claim, failures, job

pytestmark = pytest.mark.concurrency

T = TypeVar("T")
jobs = DEFAULT_TABLES.jobs


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An engine with a connection for each of the threads here."""
    engine = create_engine(database_url, pool_size=20)
    yield engine
    engine.dispose()


def at_once(count: int, work: Callable[[int], T]) -> list[T]:
    """Run `work(0)`, `work(1)`, ... in a thread each, which start together."""
    barrier = threading.Barrier(count)

    def start(number: int) -> T:
        barrier.wait(30)
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(start, range(count)))


def together(first: Callable[[], T], second: Callable[[], T]) -> list[T]:
    """Run two functions in a thread each, which start together."""
    return at_once(2, lambda number: (first, second)[number]())


def wait_until_blocked(connection: Connection, count: int) -> None:
    """Wait until so many sessions of this database wait for a lock."""
    waiting = text("""
        SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock'
    """)
    found = None
    for _ in range(2_000):
        found = connection.execute(waiting).scalar_one()
        connection.rollback()
        if found == count:
            return
        connection.execute(select(func.pg_sleep(0.005)))
    raise AssertionError(f"{found} sessions wait for a lock, not {count}")


def claim_as(engine: Engine, worker: str, limit: int = 1) -> list[ClaimedJob]:
    with engine.connect() as connection:
        return claim(connection, limit, worker=worker)


def test_ten_workers_and_one_job_are_one_claim(engine: Engine, connection: Connection) -> None:
    connections = [engine.connect() for _ in range(10)]
    for _ in range(30):
        job_id = add(connection)

        def take(number: int) -> list[ClaimedJob]:
            return claim(connections[number], worker=f"worker-{number}")

        taken = [(number, one) for number, got in enumerate(at_once(10, take)) for one in got]
        ((number, one),) = taken
        row = job(connection, job_id)
        assert (one.id, one.attempts, one.claim_no) == (job_id, 1, 1)
        assert (row.locked_by, row.claim_no) == (f"worker-{number}", 1)
    for opened in connections:
        opened.close()


def test_eight_workers_that_claim_in_batches_take_each_job_once(
    engine: Engine, connection: Connection
) -> None:
    count = 1_500
    enqueue_many(connection, "send", [Row({}, priority=n % 3) for n in range(count)])
    connection.commit()

    def take_all(number: int) -> list[ClaimedJob]:
        taken: list[ClaimedJob] = []
        with engine.connect() as own:
            while got := claim(own, 7, worker=f"worker-{number}"):
                taken += got
        return taken

    taken = at_once(8, take_all)
    assert sum(map(len, taken)) == count
    owners = {one.id: f"worker-{number}" for number, got in enumerate(taken) for one in got}
    assert {row.id: row.locked_by for row in all_jobs(connection)} == owners
    assert len(owners) == count


@pytest.mark.parametrize("key", ["idempotency_key", "unique_key"])
def test_the_same_key_at_the_same_time_is_one_row(
    engine: Engine, connection: Connection, key: str
) -> None:
    for turn in range(10):
        options: dict[str, Any] = {key: f"k{turn}"}

        def add_one(number: int, options: dict[str, Any] = options) -> Enqueued:
            with engine.begin() as own:
                return enqueue(own, "send", {"n": number}, **options)

        results = at_once(10, add_one)
        assert len({result.id for result in results}) == 1
        assert [result.created for result in results].count(True) == 1
    assert len(all_jobs(connection)) == 10


@pytest.mark.parametrize("commits", [True, False], ids=["commits", "rolls back"])
def test_those_who_wait_for_a_key_get_an_id_whatever_its_first_holder_does(
    engine: Engine, connection: Connection, commits: bool
) -> None:
    def add_one(number: int) -> Enqueued:
        with engine.begin() as own:
            return enqueue(own, "send", {"n": number}, idempotency_key="k")

    with engine.connect() as first, ThreadPoolExecutor(9) as pool:
        held = enqueue(first, "send", {"n": "first"}, idempotency_key="k")
        waiting = [pool.submit(add_one, number) for number in range(9)]
        wait_until_blocked(connection, 9)
        first.commit() if commits else first.rollback()
        results = [future.result(30) for future in waiting]
    (row,) = all_jobs(connection)
    assert {result.id for result in results} == {row.id}
    assert (row.id == held.id) is commits
    assert [result.created for result in results].count(True) == (not commits)


def test_batches_with_the_same_keys_at_the_same_time_are_one_row_each(
    engine: Engine, connection: Connection
) -> None:
    keys = [f"k{n}" for n in range(300)]

    def add_all(number: int) -> list[Enqueued]:
        with engine.begin() as own:
            return enqueue_many(own, "send", [Row(idempotency_key=key) for key in keys])

    results = at_once(6, add_all)
    assert len(all_jobs(connection)) == len(keys)
    by_key = {row.idempotency_key: row.id for row in all_jobs(connection)}
    for batch in results:
        assert [result.id for result in batch] == [by_key[key] for key in keys]
    assert sum(result.created for batch in results for result in batch) == len(keys)


def test_a_key_whose_holder_ends_meanwhile_always_gives_an_id(
    engine: Engine, connection: Connection
) -> None:
    """The holder may vanish between the insert and the look for it."""
    stop = threading.Event()

    def end_all(own: Connection) -> None:
        while not stop.is_set():
            for one in claim(own, 100):
                claims.settle(own, [Settled(one, Finished())], worker="worker-1")
                own.commit()

    def add_some(number: int) -> list[Enqueued]:
        with engine.connect() as own:
            results = []
            for _ in range(60):
                results.append(enqueue(own, "send", unique_key="k"))
                own.commit()
            return results

    with engine.connect() as own, ThreadPoolExecutor(1) as pool:
        ending = pool.submit(end_all, own)
        results = [result for batch in at_once(4, add_some) for result in batch]
        stop.set()
        ending.result(30)
    created = Counter(result.id for result in results if result.created)
    assert set(created.values()) == {1}
    assert {row.id for row in all_jobs(connection)} == set(created)
    assert {result.id for result in results} <= set(created)


def lapsed(connection: Connection, **values: Any) -> ClaimedJob:
    """Add a job, claim it, and let its lease run out."""
    job_id = add(connection, **values)
    (one,) = claim(connection)
    assert one.id == job_id
    change(connection, job_id, leased_until=func.now())
    return one


def test_a_finish_and_a_reclaim_of_one_lapsed_job_are_one_end(
    engine: Engine, connection: Connection
) -> None:
    outcomes: Counter[str] = Counter()
    for _ in range(40):
        one = lapsed(connection)

        def finish(one: ClaimedJob = one) -> bool:
            with engine.begin() as own:
                return claims.settle(own, [Settled(one, Finished())], worker="worker-1") != set()

        def take_back() -> bool:
            with engine.begin() as own:
                return claims.reclaim(own) != []

        finished, taken_back = together(finish, take_back)
        assert finished != taken_back
        row = job(connection, one.id)
        assert row.status == ("done" if finished else "ready")
        assert len(failures(connection, one.id)) == taken_back
        outcomes["finished" if finished else "taken back"] += 1
        change(connection, one.id, status="cancelled")
    assert sum(outcomes.values()) == 40


def test_two_sweeps_take_each_lapsed_job_back_once(engine: Engine, connection: Connection) -> None:
    add_lapsed(connection, 400)

    def sweep(number: int) -> list[claims.Reclaimed]:
        taken = []
        with engine.connect() as own:
            while got := claims.reclaim(own, limit=50):
                own.commit()
                taken += got
            own.commit()
        return taken

    taken = [one for got in at_once(4, sweep) for one in got]
    taken += sweep(0)
    assert len(taken) == len({one.id for one in taken}) == 400
    rows = all_jobs(connection)
    assert {(row.status, row.attempts, row.claim_no) for row in rows} == {("ready", 1, 1)}
    written = connection.execute(select(func.count()).select_from(DEFAULT_TABLES.failures)).scalar()
    assert written == 400


def add_lapsed(connection: Connection, count: int) -> None:
    enqueue_many(connection, "send", [{}] * count)
    claim(connection, count)
    connection.execute(jobs.update().values(leased_until=func.now()))
    connection.commit()


def test_sweeps_claims_and_late_writes_together_lose_and_double_nothing(
    engine: Engine, connection: Connection
) -> None:
    """Workers whose leases last no time, against sweeps: each claim ends in exactly one way."""
    count = 60
    enqueue_many(connection, "send", [{}] * count, max_attempts=1_000)
    connection.commit()
    done: list[int] = []
    ended: Counter[str] = Counter()
    lock = threading.Lock()

    def work(number: int) -> None:
        worker = f"worker-{number}"
        with engine.connect() as own:
            for turn in range(40):
                got = claims.claim(
                    own,
                    worker=worker,
                    queues=["default"],
                    handlers=["send"],
                    limit=5,
                    lease=0.002,
                )
                own.commit()
                beat = claims.heartbeat(own, [(one, None) for one in got], worker=worker, lease=0)
                own.commit()
                outcome = Finished() if turn % 4 == 3 else Failed("again", 0.0)
                landed = claims.settle(own, [Settled(one, outcome) for one in got], worker=worker)
                own.commit()
                assert not landed & beat.lost
                with lock:
                    ended["landed"] += len(landed)
                    ended["lost"] += len(got) - len(landed)
                    if isinstance(outcome, Finished):
                        done.extend(landed)

    def sweep(number: int) -> None:
        with engine.connect() as own:
            for _ in range(60):
                taken = claims.reclaim(own, limit=10)
                own.execute(
                    jobs.update()
                    .where(jobs.c.id.in_([one.id for one in taken]))
                    .values(run_at=func.now())
                )
                own.commit()
                with lock:
                    ended["taken back"] += len(taken)

    at_once(6, lambda number: (work, work, work, work, sweep, sweep)[number](number))
    claims.reclaim(connection)
    connection.commit()
    rows = all_jobs(connection)
    assert ended["landed"] > 0
    assert ended["taken back"] > 0
    assert len(done) == len(set(done)), "a job was finished twice"
    assert {row.id for row in rows if row.status == "done"} == set(done)
    assert sum(row.claim_no for row in rows) == ended["landed"] + ended["lost"]
    history = connection.execute(
        select(func.count()).select_from(DEFAULT_TABLES.failures)
    ).scalar_one()
    assert history == sum(row.claim_no for row in rows) - len(done)


def test_a_cancel_and_a_claim_of_one_job_agree(engine: Engine, connection: Connection) -> None:
    for _ in range(30):
        job_id = add(connection)

        def stop(job_id: int = job_id) -> str:
            with engine.begin() as own:
                return cancel(own, job_id)

        def take() -> str:
            return "claimed" if claim_as(engine, "worker-1") else "nothing"

        stopped, taken = together(stop, take)
        row = job(connection, job_id)
        assert (stopped, taken, row.status) in {
            ("cancelled", "nothing", "cancelled"),
            ("requested", "claimed", "running"),
        }
        change(connection, job_id, status="dead", locked_by=None, leased_until=None)


def test_a_retry_that_races_with_its_twin_leaves_the_transaction_usable(
    engine: Engine, connection: Connection
) -> None:
    dead = add(connection, status="dead", unique_key="k")

    def retry_dead() -> tuple[str, int]:
        with engine.begin() as own:
            result = retry(own, dead)
            return result, enqueue(own, "send").id

    with engine.connect() as twin, ThreadPoolExecutor(1) as pool:
        enqueue(twin, "send", unique_key="k")
        retried: Future[tuple[str, int]] = pool.submit(retry_dead)
        wait_until_blocked(connection, 1)
        twin.commit()
        result, other = retried.result(30)
    assert result == "duplicate"
    assert job(connection, other).status == "ready"
    assert job(connection, dead).status == "dead"
