"""What follows a claim: heartbeat, every outcome, the fence, and the reclaim of a lapsed lease."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, text

from sa_jobs import ClaimedJob, cancel, claims
from sa_jobs.claims import Settled
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.outcome import Failed, Finished, Outcome, Released, Snoozed
from tests.support.jobs import add, change, claim, failures, job

OUTCOMES: dict[str, Outcome] = {
    "finish": Finished('{"sent": true}'),
    "fail": Failed("no paper", delay=60.0),
    "fail for good": Failed("no paper", final=True),
    "snooze": Snoozed(60.0),
    "release": Released(),
}
MINUTE = dt.timedelta(minutes=1)


def claimed(connection: Connection, worker: str = "worker-1", **values: Any) -> ClaimedJob:
    """Add a job and claim it."""
    job_id = add(connection, **values)
    (one,) = claim(connection, worker=worker)
    assert one.id == job_id
    return one


def settle(
    connection: Connection, one: ClaimedJob, outcome: Outcome, worker: str = "worker-1"
) -> set[int]:
    landed = claims.settle(connection, [Settled(one, outcome)], worker=worker)
    connection.commit()
    return landed


def beat(
    connection: Connection, *jobs: ClaimedJob, worker: str = "worker-1", progress: str | None = None
) -> claims.Heartbeat:
    result = claims.heartbeat(
        connection, [(one, progress) for one in jobs], worker=worker, lease=60
    )
    connection.commit()
    return result


def lapse(connection: Connection, one: ClaimedJob) -> None:
    """Let a claim's lease run out."""
    change(connection, one.id, leased_until=func.now() - dt.timedelta(seconds=1))


def reclaim(connection: Connection) -> list[claims.Reclaimed]:
    taken = claims.reclaim(connection)
    connection.commit()
    return taken


# --- heartbeat ----------------------------------------------------------------------------------


def test_a_heartbeat_pushes_the_lease_out(connection: Connection) -> None:
    one = claimed(connection)
    before = job(connection, one.id)
    result = beat(connection, one)
    after = job(connection, one.id)
    assert result == claims.Heartbeat({one.id}, set(), set(), set())
    assert after.leased_until > before.leased_until
    assert after.leased_until - after.updated_at == MINUTE
    assert (after.status, after.attempts, after.claim_no) == ("running", 1, 1)


def test_a_heartbeat_of_many_is_one_statement(connection: Connection) -> None:
    for _ in range(5):
        add(connection)
    jobs = claim(connection, 5)
    assert beat(connection, *jobs).renewed == {one.id for one in jobs}
    assert beat(connection) == claims.Heartbeat(set(), set(), set(), set())


def test_a_heartbeat_stays_within_the_page(connection: Connection) -> None:
    """An update that touches no index is HOT; it leaves no dead index entries behind."""
    one = claimed(connection)
    count = text("SELECT n_tup_hot_upd FROM pg_stat_xact_user_tables WHERE relname = 'sa_jobs'")
    before = connection.execute(count).scalar_one()
    for _ in range(20):
        claims.heartbeat(connection, [(one, "1")], worker="worker-1", lease=60)
    assert connection.execute(count).scalar_one() == before + 20


def test_a_heartbeat_says_which_rows_are_locked(connection: Connection, engine: Engine) -> None:
    free, held = claimed(connection), claimed(connection)
    with engine.connect() as other:
        other.execute(text("SELECT 1 FROM sa_jobs WHERE id = :id FOR UPDATE"), {"id": held.id})
        result = beat(connection, free, held)
        other.rollback()
    assert result == claims.Heartbeat({free.id}, set(), {held.id}, set())


def test_a_hosts_foreign_key_does_not_stop_a_heartbeat(
    connection: Connection, engine: Engine
) -> None:
    one = claimed(connection)
    with engine.connect() as other:
        other.execute(text("SELECT 1 FROM sa_jobs WHERE id = :id FOR KEY SHARE"), {"id": one.id})
        assert beat(connection, one).renewed == {one.id}
        other.rollback()


def taken_over(connection: Connection, one: ClaimedJob, worker: str = "worker-2") -> ClaimedJob:
    """Let the lease lapse and another worker claim the job."""
    lapse(connection, one)
    reclaim(connection)
    (again,) = claim(connection, worker=worker)
    assert again.id == one.id
    return again


@pytest.mark.parametrize("worker", ["worker-1", "worker-2"])
def test_a_heartbeat_says_which_claims_are_lost(connection: Connection, worker: str) -> None:
    one = claimed(connection)
    again = taken_over(connection, one, worker)
    before = job(connection, one.id)
    assert beat(connection, one).lost == {one.id}
    assert job(connection, one.id) == before
    assert beat(connection, again, worker=worker).renewed == {one.id}


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
def test_a_claim_that_its_worker_has_ended_is_neither_lost_nor_locked(
    connection: Connection, outcome: Outcome
) -> None:
    one = claimed(connection)
    settle(connection, one, outcome)
    assert beat(connection, one) == claims.Heartbeat(set(), set(), set(), set())


def test_a_job_that_is_gone_is_lost(connection: Connection) -> None:
    one = claimed(connection)
    connection.execute(DEFAULT_TABLES.jobs.delete())
    assert beat(connection, one).lost == {one.id}


def test_a_heartbeat_carries_a_cancel_request(connection: Connection) -> None:
    one, other = claimed(connection), claimed(connection)
    assert cancel(connection, one.id) == "requested"
    connection.commit()
    result = beat(connection, one, other)
    assert (result.renewed, result.cancel_requested) == ({one.id, other.id}, {one.id})


def test_a_heartbeat_stores_progress_and_keeps_it(connection: Connection) -> None:
    one = claimed(connection, meta={"kept": 1})
    beat(connection, one, progress='{"page": 2}')
    beat(connection, one)
    assert job(connection, one.id).meta == {"kept": 1, "progress": {"page": 2}}
    beat(connection, one, progress="null")
    assert job(connection, one.id).meta == {"kept": 1, "progress": None}


# --- outcomes -----------------------------------------------------------------------------------


def test_a_finished_job_is_done_and_keeps_its_result(connection: Connection) -> None:
    one = claimed(connection)
    assert settle(connection, one, Finished('{"sent": true}')) == {one.id}
    row = job(connection, one.id)
    assert (row.status, row.result, row.attempts) == ("done", {"sent": True}, 1)
    assert (row.leased_until, row.locked_by) == (None, "worker-1")
    assert row.finished_at is not None
    assert failures(connection, one.id) == []


def test_a_finished_job_without_a_result_has_sql_null(connection: Connection) -> None:
    one = claimed(connection)
    settle(connection, one, Finished())
    assert connection.execute(text("SELECT result IS NULL FROM sa_jobs")).scalar() is True


def test_a_failed_attempt_waits_and_leaves_a_row_of_history(connection: Connection) -> None:
    one = claimed(connection)
    assert settle(connection, one, Failed("no paper", delay=60.0)) == {one.id}
    row = job(connection, one.id)
    assert (row.status, row.attempts, row.last_error) == ("ready", 1, "no paper")
    assert row.run_at - row.updated_at == MINUTE
    assert (row.leased_until, row.finished_at) == (None, None)
    (failure,) = failures(connection, one.id)
    assert (failure.worker, failure.attempt, failure.claim_no) == ("worker-1", 1, 1)
    assert (failure.queue, failure.handler, failure.error) == ("default", "send", "no paper")
    assert (failure.claimed_at, failure.failed_at) == (one.claimed_at, row.updated_at)


def test_a_final_failure_is_dead(connection: Connection) -> None:
    one = claimed(connection)
    settle(connection, one, Failed("no paper", delay=60.0, final=True))
    row = job(connection, one.id)
    assert (row.status, row.last_error, row.attempts) == ("dead", "no paper", 1)
    assert row.finished_at is not None
    assert row.run_at == one.run_at
    assert len(failures(connection, one.id)) == 1


def test_a_snoozed_job_waits_at_no_cost_of_an_attempt(connection: Connection) -> None:
    one = claimed(connection)
    settle(connection, one, Snoozed(60.0))
    row = job(connection, one.id)
    assert (row.status, row.attempts, row.claim_no) == ("ready", 0, 1)
    assert row.run_at - row.updated_at == MINUTE
    assert failures(connection, one.id) == []


def test_a_released_job_keeps_its_place_at_no_cost_of_an_attempt(connection: Connection) -> None:
    one = claimed(connection)
    settle(connection, one, Released())
    row = job(connection, one.id)
    assert (row.status, row.attempts, row.claim_no, row.run_at) == ("ready", 0, 1, one.run_at)
    (again,) = claim(connection, worker="worker-2")
    assert (again.attempts, again.claim_no) == (1, 2)


def test_the_error_of_an_earlier_attempt_survives_a_release(connection: Connection) -> None:
    one = claimed(connection)
    settle(connection, one, Failed("no paper"))
    (again,) = claim(connection)
    settle(connection, again, Released())
    assert job(connection, one.id).last_error == "no paper"


STATUS_AFTER_A_CANCEL_REQUEST = {
    "finish": "done",
    "fail": "cancelled",
    "fail for good": "cancelled",
    "snooze": "cancelled",
    "release": "cancelled",
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_job_that_was_asked_to_cancel_never_becomes_ready(
    connection: Connection, name: str
) -> None:
    one = claimed(connection)
    assert cancel(connection, one.id) == "requested"
    connection.commit()
    settle(connection, one, OUTCOMES[name])
    row = job(connection, one.id)
    assert row.status == STATUS_AFTER_A_CANCEL_REQUEST[name]
    assert row.finished_at is not None
    assert len(failures(connection, one.id)) == name.startswith("fail")


def test_outcomes_of_all_kinds_are_written_together(connection: Connection) -> None:
    for _ in OUTCOMES:
        add(connection)
    jobs = claim(connection, len(OUTCOMES))
    settled = [Settled(*pair) for pair in zip(jobs, OUTCOMES.values(), strict=True)]
    landed = claims.settle(connection, settled[::-1], worker="worker-1")
    assert landed == {one.id for one in jobs}
    statuses = [job(connection, one.id).status for one in jobs]
    assert statuses == ["done", "ready", "dead", "ready", "ready"]
    assert claims.settle(connection, [], worker="worker-1") == set()


def test_many_outcomes_of_a_kind_keep_apart(connection: Connection) -> None:
    for _ in range(20):
        add(connection)
    jobs = claim(connection, 20)
    settled = [Settled(one, Finished(str(one.id))) for one in jobs]
    assert len(claims.settle(connection, settled, worker="worker-1")) == 20
    assert all(job(connection, one.id).result == one.id for one in jobs)


def test_a_heavy_error_and_any_text_are_stored(connection: Connection) -> None:
    one = claimed(connection)
    error = "😀 'quoted' \"{x}\" \\ %s :name\n" * 400
    settle(connection, one, Failed(error))
    assert job(connection, one.id).last_error == failures(connection, one.id)[0].error == error


# --- the fence ----------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
@pytest.mark.parametrize("worker", ["worker-1", "worker-2"])
def test_a_stale_worker_writes_nothing(
    connection: Connection, outcome: Outcome, worker: str
) -> None:
    """Also where the same worker has claimed the job again."""
    one = claimed(connection)
    taken_over(connection, one, worker)
    before, history = job(connection, one.id), failures(connection, one.id)
    assert settle(connection, one, outcome) == set()
    assert claims.standing(connection, [one], worker="worker-1") == {}
    assert job(connection, one.id) == before
    assert failures(connection, one.id) == history


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    ("stale", "outcome", "status"),
    [
        (Failed("late", delay=60.0), Failed("no paper", final=True), "dead"),
        (Failed("late", final=True), Failed("no paper", delay=60.0), "ready"),
        (Finished('"late"'), Finished('"in time"'), "done"),
        (Snoozed(0.0), Snoozed(60.0), "ready"),
    ],
)
def test_of_two_claims_of_one_job_that_are_written_together_the_last_one_counts(
    connection: Connection, stale: Outcome, outcome: Outcome, status: str, turned: bool
) -> None:
    """As of a worker that lost the job, claimed it again, and has both outcomes at once."""
    one = claimed(connection)
    lapse(connection, one)
    reclaim(connection)
    (two,) = claim(connection)
    assert (two.id, two.claim_no) == (one.id, 2)
    settled = [Settled(one, stale), Settled(two, outcome)]
    claims.settle(connection, settled[::-1] if turned else settled, worker="worker-1")
    connection.commit()

    row = job(connection, one.id)
    assert row.status == status
    if isinstance(outcome, Failed):
        assert row.last_error == "no paper"
        assert [failure.error for failure in failures(connection, one.id)] == [
            "lease expired",
            "no paper",
        ]
    if isinstance(outcome, Finished):
        assert row.result == "in time"
    if status == "ready":
        assert row.run_at - row.updated_at == MINUTE


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
def test_a_worker_whose_job_was_taken_back_writes_nothing(
    connection: Connection, outcome: Outcome
) -> None:
    one = claimed(connection)
    lapse(connection, one)
    reclaim(connection)
    before = job(connection, one.id)
    assert settle(connection, one, outcome) == set()
    assert beat(connection, one).lost == {one.id}
    assert job(connection, one.id) == before


@pytest.mark.parametrize("first", OUTCOMES)
@pytest.mark.parametrize("second", OUTCOMES)
def test_a_claim_ends_once(connection: Connection, first: str, second: str) -> None:
    one = claimed(connection)
    assert settle(connection, one, OUTCOMES[first]) == {one.id}
    before, history = job(connection, one.id), failures(connection, one.id)
    assert settle(connection, one, OUTCOMES[second]) == set()
    assert job(connection, one.id) == before
    assert failures(connection, one.id) == history


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
def test_a_worker_can_tell_that_its_lost_write_had_landed(
    connection: Connection, outcome: Outcome
) -> None:
    one = claimed(connection)
    assert claims.standing(connection, [one], worker="worker-1") == {one.id: "held"}
    settle(connection, one, outcome)
    status = job(connection, one.id).status
    assert claims.standing(connection, [one], worker="worker-1") == {one.id: status}
    assert claims.standing(connection, [one], worker="worker-2") == {}


def test_a_late_finish_within_a_lapsed_lease_still_lands(connection: Connection) -> None:
    """As long as nobody took the job back, its worker may end it."""
    one = claimed(connection)
    lapse(connection, one)
    assert beat(connection, one).renewed == {one.id}
    lapse(connection, one)
    assert settle(connection, one, Finished()) == {one.id}


@pytest.mark.parametrize(
    "change_claim",
    [
        lambda one: one._replace(claim_no=one.claim_no + 1),
        lambda one: one._replace(claim_no=one.claim_no - 1),
        lambda one: one._replace(id=one.id + 1),
    ],
    ids=["next claim", "claim before", "another job"],
)
def test_a_write_must_name_the_very_claim(
    connection: Connection, change_claim: Callable[[ClaimedJob], ClaimedJob]
) -> None:
    one = claimed(connection)
    assert settle(connection, change_claim(one), Finished()) == set()
    assert settle(connection, one, Finished(), worker="worker-10") == set()
    assert job(connection, one.id).status == "running"


def test_only_the_stale_rows_of_a_batch_are_left_out(connection: Connection) -> None:
    stale = claimed(connection)
    taken_over(connection, stale)
    good = claimed(connection)
    settled = [Settled(one, Finished()) for one in (stale, good)]
    assert claims.settle(connection, settled, worker="worker-1") == {good.id}


# --- reclaim ------------------------------------------------------------------------------------


def test_a_lapsed_lease_makes_the_job_ready_in_its_old_place(connection: Connection) -> None:
    one = claimed(connection, run_at=func.now() - dt.timedelta(hours=1))
    lapse(connection, one)
    (taken,) = reclaim(connection)
    assert taken == claims.Reclaimed(one.id, "default", "send", 1, "worker-1", "ready")
    row = job(connection, one.id)
    assert (row.status, row.attempts, row.claim_no) == ("ready", 1, 1)
    assert (row.locked_by, row.leased_until, row.finished_at) == (None, None, None)
    assert (row.run_at, row.last_error) == (one.run_at, "lease expired")
    (failure,) = failures(connection, one.id)
    assert (failure.worker, failure.error, failure.attempt) == ("worker-1", "lease expired", 1)
    assert failure.claimed_at == one.claimed_at


def test_a_lease_that_runs_is_left_alone(connection: Connection) -> None:
    one = claimed(connection)
    assert reclaim(connection) == []
    assert job(connection, one.id).status == "running"


def test_from_the_second_lapse_in_a_row_on_the_job_waits(connection: Connection) -> None:
    one = claimed(connection, max_attempts=100)
    waits = []
    for _ in range(40):
        lapse(connection, one)
        reclaim(connection)
        row = job(connection, one.id)
        waits.append((row.run_at - row.updated_at).total_seconds())
        change(connection, one.id, run_at=one.run_at)
        (one,) = claim(connection)
    assert waits[0] <= 0
    assert all(0 <= wait <= min(300, 2**attempt) for attempt, wait in enumerate(waits[1:], 2))
    assert max(waits) > 100
    assert len({round(wait, 3) for wait in waits}) > 30


def test_a_failure_between_two_lapses_starts_the_count_anew(connection: Connection) -> None:
    one = claimed(connection)
    lapse(connection, one)
    reclaim(connection)
    (again,) = claim(connection)
    settle(connection, again, Failed("no paper"))
    (third,) = claim(connection)
    lapse(connection, third)
    reclaim(connection)
    row = job(connection, one.id)
    assert row.run_at == third.run_at
    assert [failure.error for failure in failures(connection, one.id)] == [
        "lease expired",
        "no paper",
        "lease expired",
    ]


def test_a_lapse_of_the_last_attempt_is_dead_with_the_reason(connection: Connection) -> None:
    one = claimed(connection, max_attempts=1)
    lapse(connection, one)
    (taken,) = reclaim(connection)
    assert taken.status == "dead"
    row = job(connection, one.id)
    assert (row.status, row.last_error) == ("dead", "lease expired on final attempt")
    assert row.finished_at is not None
    assert [failure.error for failure in failures(connection, one.id)] == [row.last_error]


@pytest.mark.parametrize("max_attempts", [1, 20])
def test_a_lapsed_job_that_was_asked_to_cancel_is_cancelled(
    connection: Connection, max_attempts: int
) -> None:
    one = claimed(connection, max_attempts=max_attempts)
    cancel(connection, one.id)
    lapse(connection, one)
    (taken,) = reclaim(connection)
    assert taken.status == "cancelled"
    row = job(connection, one.id)
    assert (row.status, row.finished_at is not None) == ("cancelled", True)


def test_a_poison_job_is_claimed_as_often_as_it_has_attempts(connection: Connection) -> None:
    job_id = add(connection, max_attempts=3)
    starts = 0
    while job(connection, job_id).status == "ready":
        change(connection, job_id, run_at=func.now())
        (one,) = claim(connection)
        starts += 1
        lapse(connection, one)
        reclaim(connection)
    assert starts == 3
    assert job(connection, job_id).status == "dead"
    assert len(failures(connection, job_id)) == 3


def test_a_sweep_skips_what_another_holds(connection: Connection, engine: Engine) -> None:
    held, free = claimed(connection), claimed(connection)
    lapse(connection, held)
    lapse(connection, free)
    with engine.connect() as other:
        other.execute(text("SELECT 1 FROM sa_jobs WHERE id = :id FOR UPDATE"), {"id": held.id})
        assert [taken.id for taken in reclaim(connection)] == [free.id]
        other.rollback()
    assert [taken.id for taken in reclaim(connection)] == [held.id]


def test_a_sweep_takes_no_more_than_its_limit(connection: Connection) -> None:
    jobs = [claimed(connection) for _ in range(5)]
    for one in jobs:
        lapse(connection, one)
    assert len(claims.reclaim(connection, limit=2)) == 2
    assert len(claims.reclaim(connection, limit=2)) == 2
    assert len(claims.reclaim(connection, limit=2)) == 1


def test_one_sweep_at_a_time(connection: Connection, engine: Engine) -> None:
    one = claimed(connection)
    lapse(connection, one)
    with engine.connect() as other:
        assert claims.reclaim(other, alone=True) != []
        assert claims.reclaim(connection, alone=True) == []
        connection.commit()
        other.rollback()
    assert [taken.id for taken in claims.reclaim(connection, alone=True)] == [one.id]
