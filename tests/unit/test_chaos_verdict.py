"""The verdict of `benchmarks.chaos`: each thing that must not be is noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.chaos.application import jobs
from benchmarks.chaos.enqueuers import SHARES
from benchmarks.chaos.evidence import (
    Effect,
    Evidence,
    Failure,
    Job,
    PlacedOrder,
    Request,
    Start,
    Transaction,
)
from benchmarks.chaos.fleet import Death
from benchmarks.chaos.serverlog import deadlocks, unexpected
from benchmarks.chaos.verdict import (
    Restart,
    holds,
    judge,
    merged,
    p95,
    restarts,
    resumptions,
)

PID = 4711
WORKER = f"host:{PID}:abc"
# Job 1 is done at its second claim, after its worker was killed at 100 s. Job 2 failed and is dead.
# Job 3 was cancelled. Job 4 is that of two orders with one key. A fifth order was rolled back.
SOUND = Evidence(
    jobs=[
        Job(1, "transactional", "done", 2, 1000, 2, 2, "one"),
        Job(2, "fails", "dead", 1, 1, 1, None, "two"),
        Job(3, "plain", "cancelled", 0, 1000, 0, None, "three"),
        Job(4, "plain", "done", 1, 1000, 1, 1, "twin"),
    ],
    failures=[
        Failure(1, 1, WORKER, "lease expired", 99.4),
        Failure(2, 1, WORKER, "ValueError", 97.9),
    ],
    starts=[
        Start(2, 1, 1, PID, 98.0),
        Start(1, 1, 1, PID, 99.5),
        Start(1, 2, 2, 4712, 103.5),
        Start(4, 1, 1, 4712, 104.0),
    ],
    effects=[Effect(1, 2), Effect(4, 1)],
    orders=[
        PlacedOrder("a", "one", 1),
        PlacedOrder("b", "two", 1),
        PlacedOrder("c", "three", 1),
        PlacedOrder("d", "twin", 1),
        PlacedOrder("e", "twin", 1),
    ],
    transactions=[
        Transaction("a", "committed", (1,)),
        Transaction("b", "unknown", (2,)),
        Transaction("c", "committed", (3,)),
        Transaction("d", "committed", (4,)),
        Transaction("e", "committed", (4,)),
        Transaction("f", "rolled back", (5,)),
        Transaction("g", "unknown"),
    ],
    requests=[Request(3, "cancel")],
    deaths=[Death(PID, -9, 100.0, "killed"), Death(4712, 0, 110.0, "drained")],
    enqueuer_codes=[0, 0],
)


def reasons(evidence: Evidence, *, restart_seconds: float = 4.0) -> dict[str, int]:
    """Return how many reasons there are against each line that does not hold."""
    lines = judge(evidence, restart_seconds=restart_seconds, resume_seconds=15.0)
    found = {line.what: len(line.reasons) for line in lines if line.reasons}
    assert holds(lines) is not bool(found)
    return found


def without(field: str, **values: Any) -> Evidence:
    """Return the sound evidence without the records that have these values."""
    kept = [
        record
        for record in getattr(SOUND, field)
        if any(getattr(record, name) != value for name, value in values.items())
    ]
    assert len(kept) == len(getattr(SOUND, field)) - 1
    return replace(SOUND, **{field: kept})  # type: ignore[arg-type]


def changed(job_id: int, **values: Any) -> Evidence:
    """Return the sound evidence with a job that differs."""
    return replace(
        SOUND, jobs=[replace(job, **values) if job.id == job_id else job for job in SOUND.jobs]
    )


def added(field: str, record: object) -> Evidence:
    return replace(SOUND, **{field: [*getattr(SOUND, field), record]})  # type: ignore[arg-type]


def test_a_sound_run_holds() -> None:
    assert reasons(SOUND) == {}


@pytest.mark.parametrize(
    ("what", "evidence"),
    [
        ("jobs lost", without("orders", token="a", name="one")),
        ("jobs of no transaction", added("orders", PlacedOrder("f", "three", 1))),
        ("jobs of no transaction", added("jobs", Job(6, "fails", "dead", 0, 0, 0, None, "six"))),
        ("jobs of no transaction", without("orders", token="b")),
        ("jobs stuck", changed(3, status="ready")),
        ("jobs stuck", changed(3, status="running")),
        ("effects twice (transactional)", added("effects", Effect(1, 2))),
        ("done without an effect", without("effects", job_id=4)),
        ("effects without a finish (transactional)", changed(1, claim_no=3, result=3)),
        ("finished by a claim that was over", changed(4, result=2)),
        ("finished by a claim that was over", changed(4, result=None)),
        ("starts beyond attempts", added("starts", Start(4, 1, 1, 4713, 105.0))),
        ("starts beyond attempts", added("starts", Start(4, 1, 2, 4713, 105.0))),
        ("starts beyond attempts", added("starts", Start(3, 1001, 0, 4713, 105.0))),
        ("starts beyond attempts", added("starts", Start(5, 1, 1, 4713, 105.0))),
        ("attempts without an outcome", changed(3, attempts=1)),
        ("attempts without an outcome", without("failures", job_id=2)),
        ("dead without a cause", changed(2, max_attempts=2)),
        ("cancelled by nobody", without("requests", job_id=3)),
        ("deadlocks", replace(SOUND, deadlocks=1)),
        ("errors in the workers' logs", replace(SOUND, worker_errors=["unexpected"])),
        (
            "workers that died by themselves",
            added("deaths", Death(4713, 1, 100.0, "itself")),
        ),
        (
            # Of no worker that ran a job which kills it.
            "workers that died by themselves",
            added("deaths", Death(4713, 137, 100.0, "itself")),
        ),
        ("enqueuers that died by themselves", replace(SOUND, enqueuer_codes=[0, 1])),
        ("faults that the harness could not do", replace(SOUND, harness_errors=["failover"])),
    ],
)
def test_one_thing_that_must_not_be_fails_the_run(what: str, evidence: Evidence) -> None:
    assert reasons(evidence)[what] == 1


def test_a_run_in_which_nothing_happened_shows_nothing() -> None:
    assert reasons(Evidence())["signs that nothing happened"] == 3


def test_a_job_that_is_gone_is_lost() -> None:
    found = reasons(without("jobs", id=4))
    # As both of its transactions were told, and as their order says.
    assert found["jobs lost"] == 3


def test_an_effect_of_a_job_that_failed_is_noticed() -> None:
    assert reasons(changed(1, status="cancelled")) == {
        "effects without a finish (transactional)": 1,
        "attempts without an outcome": 1,
        "cancelled by nobody": 1,
    }


def test_a_handler_that_does_not_fail_must_not_end_dead() -> None:
    dead = changed(3, status="dead", attempts=1000)
    assert reasons(dead)["dead without a cause"] == 1


def test_retried_jobs_begin_to_count_anew() -> None:
    evidence = changed(2, attempts=0, status="cancelled")
    retried = [Request(2, "retry"), Request(2, "cancel")]
    assert reasons(replace(evidence, requests=[*SOUND.requests, *retried])) == {}


def test_a_worker_killed_by_its_job_did_not_die_by_itself() -> None:
    evidence = replace(
        SOUND,
        jobs=[*SOUND.jobs, Job(7, "kills_its_worker", "dead", 1, 1, 1, None, "seven")],
        orders=[*SOUND.orders, PlacedOrder("h", "seven", 1)],
        starts=[*SOUND.starts, Start(7, 1, 1, 4713, 105.0)],
        failures=[*SOUND.failures, Failure(7, 1, "host:4713:x", "lease expired on final", 104.9)],
        deaths=[*SOUND.deaths, Death(4713, 137, 105.0, "itself")],
    )
    assert reasons(evidence) == {}
    # After its last attempt there is no restart.
    assert len(restarts(evidence)) == 1


def test_the_time_from_crash_to_restart_is_judged_where_something_could_be_done() -> None:
    assert restarts(SOUND) == [Restart(3.5, 3.5, in_a_row=False)]
    late = {"    with a database and a worker, p95": 1}
    assert reasons(SOUND, restart_seconds=3.4) == late
    before = replace(SOUND, outages=[(90.0, 95.0)], unattended=[(98.0, 100.0)])
    assert reasons(before, restart_seconds=3.4) == late
    # Once the database is back, a worker may wait for its next try as long as it was away.
    away = replace(SOUND, outages=[(101.0, 101.2), (103.3, 120.0)])
    assert restarts(away)[0].net == pytest.approx(3.5 - 0.4 - 0.2)
    assert reasons(away, restart_seconds=3.4) == {}
    unattended = replace(away, unattended=[(99.0, 101.1), (102.0, 102.1)])
    assert restarts(unattended)[0].net == pytest.approx(3.5 - 1.4 - 0.1 - 0.2)


def test_workers_work_again_soon_after_an_outage() -> None:
    # Of the handlers' starts one was at 103.5 s, and the last one at 104 s.
    away = replace(SOUND, outages=[(99.6, 100.0), (103.6, 103.8), (104.5, 105.0)])
    assert resumptions(away) == [pytest.approx(3.5), pytest.approx(0.2)]
    unattended = replace(away, unattended=[(99.0, 103.0)])
    assert resumptions(unattended) == [pytest.approx(0.5), pytest.approx(0.2)]
    late = replace(
        SOUND, outages=[(100.0, 105.0)], starts=[*SOUND.starts, Start(4, 1, 1, 4712, 121.0)]
    )
    assert reasons(late)["  end of an outage to a start, longest"] == 1


def test_periods_that_overlap_are_counted_once() -> None:
    assert merged([]) == []
    assert merged([(5, 6), (1, 3), (2, 4), (2, 3), (4, 4.5)]) == [(1, 4.5), (5, 6)]


def test_a_second_lapse_in_a_row_waits_on_purpose() -> None:
    evidence = replace(
        SOUND,
        jobs=[replace(SOUND.jobs[0], attempts=3, claim_no=3, result=3), *SOUND.jobs[1:]],
        effects=[Effect(1, 3), Effect(4, 1)],
        failures=[*SOUND.failures, Failure(1, 2, "host:4712:x", "lease expired", 103.4)],
        starts=[*SOUND.starts, Start(1, 3, 3, 4713, 120.0)],
        deaths=[SOUND.deaths[0], Death(4712, -9, 110.0, "killed")],
    )
    assert reasons(evidence) == {}
    assert [restart.in_a_row for restart in restarts(evidence)] == [False, True]


@pytest.mark.parametrize("what", ["cancel", "retry"])
def test_a_job_that_somebody_cancelled_or_retried_shows_no_time_to_restart(what: str) -> None:
    assert restarts(added("requests", Request(1, what))) == []


def test_a_claim_counts_as_a_restart_though_its_worker_was_killed_before_the_start() -> None:
    evidence = replace(
        SOUND,
        jobs=[replace(SOUND.jobs[0], attempts=3, claim_no=3, result=3), *SOUND.jobs[1:]],
        effects=[Effect(1, 3), Effect(4, 1)],
        failures=[*SOUND.failures, Failure(1, 2, "host:4712:x", "lease expired", 103.4)],
        starts=[SOUND.starts[1], replace(SOUND.starts[2], claim_no=3, at=120.0)],
        deaths=[SOUND.deaths[0]],
    )
    assert restarts(evidence)[0].seconds == pytest.approx(3.4)


def test_p95() -> None:
    assert p95([]) == 0.0
    assert p95([7.0]) == 7.0
    assert p95(range(1, 101)) == 95
    assert p95([*[1.0] * 19, 2.0]) == 1.0


@pytest.mark.parametrize(
    ("line", "find"),
    [
        ("40P01 postgres@chaos sa-jobs claim ERROR:  deadlock detected", deadlocks),
        ("23505 postgres@chaos chaos handler ERROR:  duplicate key value", unexpected),
        ("57014 postgres@chaos chaos handler ERROR:  canceling statement", unexpected),
        ("57P01 PANIC:  could not write", unexpected),
    ],
)
def test_an_error_in_the_log_that_no_fault_explains_fails_the_run(
    line: str, find: Callable[[str], list[object]]
) -> None:
    log = f"2026-01-01 00:00:00.000 UTC [17] {line}\n"
    assert len(find(log)) == 1
    assert len(reasons(replace(SOUND, server_log=log))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "57P01 postgres@chaos sa-jobs claim FATAL:  terminating connection due to administrator",
        "25006 postgres@chaos sa-jobs listen ERROR:  cannot execute LISTEN during recovery",
        "57014 postgres@chaos sa-jobs sweep ERROR:  canceling statement due to user request",
        "57014 postgres@chaos [unknown] FATAL:  canceling authentication due to timeout",
        "57P03 [unknown]@[unknown] [unknown] FATAL:  the database system is starting up",
        "00000 LOG:  database system is ready to accept connections",
        "08006 postgres@chaos sa-jobs claim LOG:  could not receive data from client",
        "08006 FATAL:  could not receive data from WAL stream: server closed the connection",
    ],
)
def test_what_the_faults_bring_about_is_expected(line: str) -> None:
    log = f"2026-01-01 00:00:00.000 UTC [17] {line}\n"
    assert reasons(replace(SOUND, server_log=log)) == {}


def test_every_handler_is_enqueued() -> None:
    assert set(SHARES) == set(jobs.names) - {"kills_its_worker"}
