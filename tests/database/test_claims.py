"""The claim: which jobs it takes, in which order, and what it locks."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, insert, select, text

from sa_jobs import claims, presence
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.outcome import Finished
from tests.support.jobs import add, all_jobs, change, claim, job

jobs = DEFAULT_TABLES.jobs
HOUR = dt.timedelta(hours=1)


def test_a_claim_gives_the_job_and_takes_it_for_the_lease(connection: Connection) -> None:
    job_id = add(
        connection,
        queue="mail",
        payload={"a": 1},
        priority=3,
        tenant="t",
        idempotency_key="i",
        unique_key="u",
        meta={"m": 1},
    )
    (claimed,) = claim(connection, queues=("mail",), lease=30)
    assert (claimed.id, claimed.queue, claimed.handler) == (job_id, "mail", "send")
    assert (claimed.payload, claimed.priority, claimed.tenant) == ({"a": 1}, 3, "t")
    assert (claimed.idempotency_key, claimed.unique_key) == ("i", "u")
    assert (claimed.attempts, claimed.claim_no, claimed.max_attempts) == (1, 1, 20)
    row = job(connection, job_id)
    assert (row.status, row.locked_by, row.attempts, row.claim_no) == ("running", "worker-1", 1, 1)
    assert row.leased_until - row.claimed_at == dt.timedelta(seconds=30)
    assert row.claimed_at == claimed.claimed_at
    assert row.max_attempts == 20


def test_jobs_run_by_priority_then_time_then_id(connection: Connection) -> None:
    now = connection.execute(select(func.now())).scalar_one()
    late, high, early, low, tie = (
        add(connection, priority=priority, run_at=now - age)
        for priority, age in ((0, HOUR), (7, HOUR), (0, 2 * HOUR), (-7, 9 * HOUR), (0, HOUR))
    )
    wanted = [high, early, late, tie, low]
    assert [one.id for one in claim(connection, 10)] == wanted
    change_all(connection, status="ready", locked_by=None, leased_until=None)
    assert [claim(connection, 1)[0].id for _ in wanted] == wanted


def change_all(connection: Connection, **values: Any) -> None:
    connection.execute(jobs.update().values(**values))
    connection.commit()


def test_every_queue_is_served_before_the_second_priority_of_one(connection: Connection) -> None:
    for queue in ("a", "b", "c"):
        for priority in (5, 0):
            add(connection, queue=queue, priority=priority)
    taken = claim(connection, 3, queues=("c", "a", "b"))
    assert sorted((one.queue, one.priority) for one in taken) == [("a", 5), ("b", 5), ("c", 5)]


def test_the_queue_named_first_is_served_first(connection: Connection) -> None:
    for queue in ("a", "b"):
        add(connection, queue=queue)
    assert claim(connection, 1, queues=("b", "a"))[0].queue == "b"


def test_another_queue_is_left_alone(connection: Connection) -> None:
    add(connection, queue="other")
    assert claim(connection, 5) == []


def test_a_queue_that_is_named_twice_is_served_once(connection: Connection) -> None:
    for _ in range(3):
        add(connection)
    assert len(claim(connection, 3, queues=("default", "default"))) == 3


@pytest.mark.parametrize("handler", ["os.system", "SEND", "send ", "", "sends", "__import__"])
def test_an_unknown_handler_is_never_claimed(connection: Connection, handler: str) -> None:
    add(connection, handler=handler, priority=9)
    known = add(connection, priority=-9)
    assert [one.id for one in claim(connection, 5)] == [known]
    assert claim(connection, 5, handlers=()) == []


def test_a_job_for_later_is_not_claimed(connection: Connection) -> None:
    add(connection, run_at=func.now() + func.make_interval(0, 0, 0, 0, 0, 1), priority=9)
    due = add(connection)
    assert [one.id for one in claim(connection, 5)] == [due]


def test_work_for_later_at_a_higher_priority_hides_no_due_job(connection: Connection) -> None:
    for priority in (9, 5, 1):
        add(connection, priority=priority, run_at=func.now() + HOUR)
    due = [add(connection, priority=priority) for priority in (3, -3)]
    assert [one.id for one in claim(connection, 5)] == due


@pytest.mark.parametrize("status", ["done", "dead", "cancelled"])
def test_an_ended_job_is_not_claimed(connection: Connection, status: str) -> None:
    add(connection, status=status)
    assert claim(connection, 5) == []


def test_a_running_job_is_not_claimed_even_after_its_lease(connection: Connection) -> None:
    """Taking it back is the reclaim's work, which also counts and writes the history."""
    add(connection)
    claim(connection, lease=0)
    assert claim(connection, 5, worker="worker-2") == []


def test_a_job_that_another_claim_holds_uncommitted_is_skipped(
    connection: Connection, engine: Engine
) -> None:
    first, second = add(connection), add(connection)
    with engine.connect() as other:
        held = claims.claim(
            other, worker="w", queues=["default"], handlers=["send"], limit=1, lease=30
        )
        assert [one.id for one in held] == [first]
        assert [one.id for one in claim(connection, 5)] == [second]
        other.rollback()
    assert [one.id for one in claim(connection, 5)] == [first]


def test_a_hosts_foreign_key_to_the_job_does_not_hide_it(
    connection: Connection, engine: Engine
) -> None:
    connection.execute(text("CREATE TABLE exports (job_id bigint REFERENCES sa_jobs (id))"))
    job_id = add(connection)
    with engine.connect() as host:
        host.execute(text("INSERT INTO exports VALUES (:id)"), {"id": job_id})
        assert [one.id for one in claim(connection)] == [job_id]
        host.rollback()


def test_text_like_sql_in_names_is_only_text(connection: Connection) -> None:
    names = ["o'x", 'a"b', "a;drop table sa_jobs;--", "a$$b", "a\\b", "é" * 40, " x", "{a,b}"]
    for name in names:
        add(connection, handler=name, queue=name)
    taken = claim(connection, 20, queues=tuple(names), handlers=tuple(names))
    assert sorted(one.handler for one in taken) == sorted(names)


def test_a_limit_of_none_takes_none(connection: Connection) -> None:
    add(connection)
    assert claim(connection, 0) == []


def fill(connection: Connection, queues: int, priorities: int, each: int) -> None:
    numbers = func.generate_series(1, queues * priorities * each).table_valued("n")
    n = numbers.render_derived().c.n
    connection.execute(
        insert(jobs).from_select(
            ["queue", "handler", "priority"],
            select(func.concat("q", n % queues), text("'send'"), -((n / queues) % priorities)),
        )
    )
    connection.commit()


PLANNERS = {
    "no statistics": [],
    "statistics of an empty table": ["before"],
    "fresh statistics": ["after"],
    "no nested loops": ["SET enable_nestloop = off"],
    "no index scans": [
        "SET enable_indexscan = off",
        "SET enable_indexonlyscan = off",
        "SET enable_bitmapscan = off",
    ],
    "no sequential scans": ["SET enable_seqscan = off"],
    "no sorts": ["after", "SET enable_sort = off", "SET enable_incremental_sort = off"],
    "generic plans": ["after", "SET plan_cache_mode = force_generic_plan"],
}


@pytest.mark.parametrize("from_places", [False, True], ids=["from the start", "from places"])
@pytest.mark.parametrize("queues", [1, 100])
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_claim_takes_and_locks_exactly_its_limit_whatever_the_planner_does(
    engine: Engine, connection: Connection, planner: str, queues: int, from_places: bool
) -> None:
    priorities, each = 4, 500 // queues
    connection.execute(text("ALTER TABLE sa_jobs SET (autovacuum_enabled = off)"))
    connection.commit()
    steps = PLANNERS[planner]
    if "before" in steps:
        connection.execute(text("ANALYZE sa_jobs"))
        connection.commit()
    fill(connection, queues, priorities, each)
    if "after" in steps:
        connection.execute(text("ANALYZE sa_jobs"))
        connection.commit()
    names = tuple(f"q{n}" for n in range(queues))
    ranks = [*range(priorities), None]
    places = [
        claims.Place(name, None if rank is None else -rank, 1 - (rank or 0), None)
        for rank in ranks
        for name in names
    ]
    left = queues * priorities * each
    with engine.connect() as worker:
        for step in steps:
            if step.startswith("SET"):
                worker.execute(text(step))
        for limit in (1, 7, 250):
            taken = claims.claim(
                worker,
                worker="w",
                queues=names,
                handlers=["send"],
                limit=limit,
                lease=30,
                places=places if from_places else None,
            )
            assert len(taken) == len({one.id for one in taken}) == limit
            free = select(jobs.c.id).with_for_update(skip_locked=True)
            unlocked = len(connection.execute(free.where(jobs.c.status == "ready")).all())
            connection.rollback()
            assert unlocked == left - limit
            worker.commit()
            left -= limit


def test_a_claim_of_more_than_there_is_takes_all(connection: Connection) -> None:
    fill(connection, 10, 2, 3)
    names = tuple(f"q{n}" for n in range(10))
    assert len(claim(connection, 1_000, queues=names)) == 60
    assert {row.status for row in all_jobs(connection)} == {"running"}


def test_each_queue_keeps_its_order_over_many_claims(connection: Connection) -> None:
    fill(connection, 3, 4, 10)
    order: dict[str, list[tuple[int, dt.datetime, int]]] = {}
    while taken := claim(connection, 7, queues=("q0", "q1", "q2")):
        for one in taken:
            order.setdefault(one.queue, []).append((-one.priority, one.run_at, one.id))
    assert sum(map(len, order.values())) == 120
    assert all(seen == sorted(seen) for seen in order.values())


def test_the_claim_number_rises_with_each_claim_and_never_falls(connection: Connection) -> None:
    job_id = add(connection)
    seen = []
    for _ in range(3):
        (claimed,) = claim(connection)
        seen.append(claimed.claim_no)
        change(connection, job_id, status="ready", locked_by=None, leased_until=None)
    assert seen == [1, 2, 3]


@pytest.mark.parametrize("name", ["run_at", "scheduled_for", "created_at"])
@pytest.mark.parametrize(
    "moment",
    ["-infinity", "infinity", "4713-01-01 00:00+00 BC", "294276-12-31 00:00+00", "9999-12-31"],
)
def test_a_time_that_no_datetime_can_hold_stops_no_claim(
    connection: Connection, name: str, moment: str
) -> None:
    """Only plain SQL can write one; such a job must not keep its queue from being served."""
    bad, good = add(connection), add(connection)
    connection.execute(
        text(f"UPDATE sa_jobs SET {name} = CAST(:moment AS timestamptz) WHERE id = {bad}"),
        {"moment": moment},
    )
    connection.commit()
    due = name != "run_at" or moment.startswith("-") or moment.endswith("BC")
    for zone in ("UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"):
        connection.execute(text(f"SET TIME ZONE '{zone}'"))
        change_all(connection, status="ready", locked_by=None, leased_until=None)
        claimed = {one.id: one for one in claim(connection, 5)}
        assert claimed.keys() == ({good, bad} if due else {good})
        assert claimed[good].scheduled_for is None
        if due:
            assert getattr(claimed[bad], name).year in (1, 9999)


@pytest.mark.parametrize("prepared", [True, False], ids=["as a worker", "as anybody"])
def test_no_plan_from_a_table_that_was_nearly_empty_reads_the_whole_one_later(
    engine: Engine, connection: Connection, prepared: bool
) -> None:
    """A worker's statements are prepared, and vacuum had left the table a page, or none."""
    connection.execute(text("ALTER TABLE sa_jobs SET (autovacuum_enabled = off)"))
    fill(connection, 1, 1, 1)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as vacuum:
        vacuum.execute(text("VACUUM ANALYZE sa_jobs"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as worker:
        if prepared:
            presence.prepare_session(worker, "test")
        for _ in range(12):
            take_and_finish(worker)
        fill(connection, 1, 1, 20_000)
        before = scans(worker)
        take_and_finish(worker)
        assert (scans(worker) > before) is not prepared


def take_and_finish(worker: Connection) -> None:
    queue, sending = ["q0"], ["send"]
    taken = claims.claim(worker, worker="w", queues=queue, handlers=sending, limit=1, lease=30)
    claims.finish_and_claim(
        worker,
        [claims.Settled(one, Finished()) for one in taken],
        worker="w",
        queues=queue,
        handlers=sending,
        limit=1,
        lease=30,
    )
    claims.reclaim(worker)


def scans(worker: Connection) -> int:
    """Return how often the whole table was read, by the statements of this connection alone."""
    worker.execute(select(func.pg_stat_force_next_flush()))
    found = select(text("seq_scan")).select_from(text("pg_stat_user_tables"))
    return int(worker.execute(found.where(text("relname = 'sa_jobs'"))).scalar_one())
