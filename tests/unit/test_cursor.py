"""Where claims begin to read, and when they read from the start again."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from sa_jobs.claims import Lanes, Place
from sa_jobs.context import ClaimedJob
from sa_jobs.worker import cursor as module
from sa_jobs.worker.cursor import Cursor

NOW = dt.datetime(2026, 1, 1, 12, tzinfo=dt.timezone.utc)
SLACK = dt.timedelta(seconds=module.SLACK_SECONDS)
HOUR = dt.timedelta(hours=1)
BERLIN = ZoneInfo("Europe/Berlin")
ids = itertools.count(1)


def job(queue: str = "q", priority: int = 0, run_at: dt.datetime = NOW - HOUR) -> ClaimedJob:
    number = next(ids)
    return ClaimedJob(
        number, queue, "send", "{}", priority, None, run_at, None, 1, 20, 1, None, None, "{}",
        run_at, NOW,
    )  # fmt: skip


def scanned(cursor: Cursor, lanes: list[tuple[str, int]], now: float = 100.0) -> Cursor:
    """Have a cursor read from the start at `NOW`, and find nothing, at a high price."""
    cursor.claimed([], places=None, limit=9, asked_at=now, answered_at=now, seconds=0.5, scan=False)
    assert cursor.wants_scan(now)
    cursor.begin(Lanes(lanes, NOW), now)
    return cursor


def take(
    cursor: Cursor,
    *jobs: ClaimedJob,
    limit: int = 2,
    now: float = 100.0,
    seconds: float = 0.0,
    takes: float = 0.0,
    queues: tuple[str, ...] = ("q",),
    scan: bool = False,
) -> list[Place]:
    places: Any = cursor.places(queues)
    cursor.claimed(
        jobs, places=places, limit=limit, asked_at=now, answered_at=now + takes, seconds=seconds,
        scan=scan,
    )  # fmt: skip
    return list(cursor.places(queues) or ())


def test_a_worker_whose_claims_are_cheap_has_no_cursor() -> None:
    cursor = Cursor()
    cursor.claimed(
        [], places=None, limit=9, asked_at=1.0, answered_at=1.0, seconds=0.0009, scan=False
    )
    assert cursor.places(["q"]) is None
    assert not cursor.wants_scan(99.0)


def test_what_jobs_add_to_a_claim_is_no_cost_of_reading() -> None:
    cursor = Cursor()
    jobs = [job() for _ in range(100)]
    cursor.claimed(
        jobs, places=None, limit=100, asked_at=1.0, answered_at=1.0, seconds=0.002, scan=False
    )
    assert cursor.places(["q"]) is None


def test_a_scan_that_has_become_cheap_ends_the_cursor() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, job(), seconds=0.0005, scan=True)
    assert cursor.places(["q"]) is None
    assert not cursor.wants_scan(1e9)


def test_lanes_are_read_by_rank_each_after_what_may_lie_above_it() -> None:
    cursor = scanned(Cursor(), [("b", 0), ("a", 5), ("a", -1)])
    places: Any = cursor.places(["a", "b", "c"])
    assert [(place.queue, place.above, place.priority) for place in places] == [
        ("a", None, 5),
        ("b", None, 0),
        ("c", None, None),
        ("a", 5, -1),
        ("b", 0, None),
        ("a", -1, None),
    ]


def test_a_claim_that_took_all_it_could_moves_to_its_last_job() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    first, last = job(), job()
    (place, _) = take(cursor, first, last)
    assert (place.since_at, place.since_id) == (last.run_at, last.id)


def test_no_place_comes_closer_to_the_databases_clock_than_the_slack() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    (place, _) = take(cursor, job(run_at=NOW), job(run_at=NOW))
    assert (place.since_at, place.since_id) == (NOW - SLACK, 0)


def test_a_claim_that_ran_dry_moves_all_lanes_to_the_slack() -> None:
    cursor = scanned(Cursor(), [("q", 3), ("q", 0)])
    high, low, _ = take(cursor, job(priority=3), limit=2)
    assert high.since_at == low.since_at == NOW - SLACK


def test_lanes_that_gave_nothing_on_the_way_to_the_last_job_are_past() -> None:
    """As those whose due jobs have a handler that this worker does not know."""
    cursor = scanned(Cursor(), [("q", 9), ("q", 3), ("q", 0)])
    last = job(priority=3)
    unknown, known, beyond, _ = take(cursor, job(priority=3), last)
    assert unknown.since_at == NOW - SLACK
    assert (known.since_at, known.since_id) == (last.run_at, last.id)
    assert beyond.since_at is None


def test_a_place_never_moves_back() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    (before, _) = take(cursor, limit=1)
    (after, _) = take(cursor, job())
    assert before == after


def test_the_clock_goes_on_between_looks_at_it() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    (place, _) = take(cursor, now=107.0)
    assert place.since_at == NOW - SLACK + dt.timedelta(seconds=7)


def test_an_answer_that_took_long_brings_no_place_closer_to_the_clock() -> None:
    """The database may have read its clock at the end of that time."""
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, job(), limit=1, now=100.0, takes=5.0)
    (place, _) = take(cursor, now=105.0)
    assert place.since_at == NOW - SLACK


def test_an_hour_that_the_wall_clock_shows_twice_brings_no_place_closer() -> None:
    twice = dt.datetime(2025, 10, 26, 0, 59, 59, tzinfo=dt.timezone.utc)
    cursor = Cursor()
    cursor.claimed(
        [], places=None, limit=9, asked_at=100.0, answered_at=100.0, seconds=0.5, scan=False
    )
    cursor.begin(Lanes([("q", 0)], twice.astimezone(BERLIN)), 100.0)
    (place, _) = take(cursor, now=110.0)
    assert place.since_at == twice + dt.timedelta(seconds=10) - SLACK
    (place, _) = take(cursor, now=111.0)
    assert place.since_at == twice + dt.timedelta(seconds=11) - SLACK


def test_a_job_of_a_priority_that_is_new_makes_the_next_claim_read_from_the_start() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, job(priority=7), now=100.1)
    assert cursor.wants_scan(100.2)


def test_lanes_without_a_job_are_kept() -> None:
    cursor = scanned(Cursor(), [("q", 7), ("q", 0)])
    cursor.begin(Lanes([("q", 0)], NOW), 101.0)
    places: Any = cursor.places(["q"])
    assert [place.priority for place in places] == [7, 0, None]


def test_a_dear_look_for_new_priorities_waits_for_the_next_scan() -> None:
    cursor = scanned(Cursor(), [("q", 7), ("q", 0)])
    places = take(cursor, job(), seconds=0.5)
    assert [(place.above, place.priority) for place in places] == [(8, 7), (1, 0), (0, None)]
    cursor.begin(Lanes([], NOW), 101.0)
    places = list(cursor.places(["q"]) or ())
    assert [(place.above, place.priority) for place in places] == [(None, 7), (7, 0), (0, None)]


def test_a_worker_without_jobs_looks_for_new_priorities_whatever_it_costs() -> None:
    """What is scheduled for later notifies nobody, and the next scan may be far off."""
    cursor = scanned(Cursor(), [("q", 7), ("q", 0)])
    take(cursor, job(), seconds=0.5)
    places = take(cursor, seconds=0.5)
    assert [(place.above, place.priority) for place in places] == [(None, 7), (7, 0), (0, None)]


def test_too_many_lanes_are_too_many() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    cursor.begin(Lanes([(f"q{n}", 0) for n in range(module.MOST_LANES + 1)], NOW), 101.0)
    assert cursor.places(["q"]) is None


def test_a_worker_with_jobs_reads_from_the_start_by_what_it_costs() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, job(), seconds=0.010, now=100.0, scan=True)
    take(cursor, job(), seconds=0.010 * (module.TIMES_AS_LONG - 1), now=100.1)
    assert not cursor.wants_scan(100.3)
    take(cursor, job(), seconds=0.011, now=100.4)
    assert cursor.wants_scan(100.5)


def test_and_once_a_second_whatever_it_costs() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, job(), seconds=5.0, now=100.0, scan=True)
    assert not cursor.wants_scan(100.0 + module.LONGEST_SECONDS - 0.1)
    assert cursor.wants_scan(100.0 + module.LONGEST_SECONDS)


@pytest.mark.parametrize(
    ("seconds", "apart"),
    [(0.0015, 1.5), (0.012, 12.0), (1.0, module.LONGEST_IDLE_SECONDS)],
)
def test_a_worker_without_jobs_spends_little_time_on_it(seconds: float, apart: float) -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, seconds=seconds, scan=True)
    assert not cursor.wants_scan(100.0 + apart - 0.1)
    assert cursor.wants_scan(100.0 + apart + 0.1)


def test_a_notification_makes_it_read_from_the_start_at_once() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    take(cursor, seconds=1.0, scan=True)
    cursor.renew()
    assert cursor.wants_scan(100.0)


def test_a_lost_connection_ends_the_cursor() -> None:
    cursor = scanned(Cursor(), [("q", 0)])
    cursor.drop()
    assert cursor.places(["q"]) is None
