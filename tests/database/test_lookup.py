"""Jobs as operators look at them: lists and single ones, payloads only on request."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, insert, text, update

from sa_jobs import InvalidJobError, InvalidJobTypeError, lookup
from sa_jobs.models import DEFAULT_TABLES
from tests.database.callers import Caller
from tests.support.jobs import add

MINUTE = dt.timedelta(minutes=1)


def fail(connection: Connection, job_id: int, attempt: int, error: str) -> None:
    connection.execute(
        insert(DEFAULT_TABLES.failures).values(
            job_id=job_id,
            queue="default",
            handler="send",
            attempt=attempt,
            claim_no=attempt,
            worker="worker-1",
            error=error,
        )
    )
    connection.commit()


def ids(connection: Connection, **conditions: Any) -> list[int]:
    return [row.id for row in lookup.list_jobs(connection, **conditions)]


def test_a_list_has_the_newest_first_and_ends_at_its_limit(connection: Connection) -> None:
    first, second, third = (add(connection) for _ in range(3))

    assert ids(connection) == [third, second, first]
    assert ids(connection, limit=2) == [third, second]


def test_a_list_holds_only_what_meets_all_conditions(connection: Connection) -> None:
    wanted = add(connection, "a", queue="q", status="done")
    add(connection, "b", queue="q", status="done")
    add(connection, "a", queue="other", status="done")
    add(connection, "a", queue="q", status="dead")

    assert ids(connection, handler="a", queue="q", status="done") == [wanted]
    assert ids(connection, handler="none") == []


def test_ready_jobs_are_listed_as_their_queue_runs_them(connection: Connection) -> None:
    late = add(connection, run_at=func.now() + MINUTE)
    low = add(connection, priority=-1, run_at=func.now() - MINUTE)
    early = add(connection, run_at=func.now() - MINUTE)
    high = add(connection, priority=1)

    assert ids(connection, status="ready") == [high, early, late, low]


def test_dead_jobs_are_listed_by_when_they_died(connection: Connection) -> None:
    second = add(connection, status="dead", finished_at=func.now() - MINUTE)
    first = add(connection, status="dead", finished_at=func.now())

    assert ids(connection, status="dead") == [first, second]


def test_an_unknown_status_is_refused_before_any_sql(engine: Engine) -> None:
    with engine.connect() as connection:
        with pytest.raises(InvalidJobError, match="status must be one of ready, running"):
            lookup.list_jobs(connection, status="scheduled")
        assert not connection.in_transaction()


def test_a_row_has_the_last_line_of_its_error(connection: Connection) -> None:
    plain = add(connection)
    failed = add(connection, last_error="Traceback\n" + "x" * 5_000 + "\nValueError: bad\n")

    assert [row.error for row in lookup.list_jobs(connection)] == ["ValueError: bad", None]
    found = lookup.find_job(connection, failed)
    assert found is not None
    assert found.error == "ValueError: bad"
    other = lookup.find_job(connection, plain)
    assert other is not None
    assert other.error is None


def test_a_job_that_is_not_there_is_none(connection: Connection) -> None:
    assert lookup.find_job(connection, 2**62) is None
    assert lookup.contents_of(connection, 2**62) is None
    assert lookup.failures_of(connection, 2**62) == []


def test_contents_are_the_json_that_is_stored(connection: Connection) -> None:
    job_id = add(connection, payload={"n": 12345678901234567890, "x": 1.5})

    contents = lookup.contents_of(connection, job_id)

    assert contents is not None
    assert contents.payload == '{"n": 12345678901234567890, "x": 1.5}'
    assert contents.result is None
    assert contents.meta == "{}"


def test_failed_attempts_come_in_their_order_the_last_ones_if_there_are_many(
    connection: Connection,
) -> None:
    job_id = add(connection)
    for attempt in range(1, 5):
        fail(connection, job_id, attempt, f"error {attempt}")

    found = lookup.failures_of(connection, job_id)
    assert [(row.attempt, row.error) for row in found] == [(n, f"error {n}") for n in range(1, 5)]
    assert found[0].worker == "worker-1"
    assert [row.attempt for row in lookup.failures_of(connection, job_id, limit=2)] == [3, 4]


def test_every_kind_of_session_and_connection_can_look(
    caller: Caller, connection: Connection
) -> None:
    job_id = add(connection, payload={"a": 1})
    fail(connection, job_id, 1, "error")

    assert [row.id for row in caller(lookup.list_jobs, queue="default")] == [job_id]
    assert caller(lookup.find_job, job_id).handler == "send"
    assert caller(lookup.contents_of, job_id).payload == '{"a": 1}'
    assert [row.error for row in caller(lookup.failures_of, job_id)] == ["error"]


FIRST = dt.datetime(1, 1, 2, tzinfo=dt.timezone.utc)
LAST = dt.datetime(9999, 12, 30, 23, 59, 59, 999_999, dt.timezone.utc)
JOB_TIMES = (
    "run_at",
    "created_at",
    "claimed_at",
    "leased_until",
    "cancel_requested_at",
    "finished_at",
)


def write_times(connection: Connection, job_id: int, moment: str) -> None:
    """Write one time into all of a job's and its failures' columns of times, by plain SQL."""
    value = text(f"timestamptz '{moment}'")
    jobs, failures = DEFAULT_TABLES.jobs, DEFAULT_TABLES.failures
    connection.execute(
        update(jobs)
        .where(jobs.c.id == job_id)
        .values(
            {
                **{column.name: value for column in jobs.c if column.name.endswith("_at")},
                "status": "running",
                "locked_by": "w",
                "leased_until": value,
            }
        )
    )
    connection.execute(update(failures).values(claimed_at=value, failed_at=value))
    connection.commit()


OUT_OF_RANGE = [
    ("infinity", LAST),
    ("-infinity", FIRST),
    ("4713-01-01 00:00:00+00 BC", FIRST),
    ("0001-12-31 23:59:59+00 BC", FIRST),
    ("0001-01-01 00:00:00+00", FIRST),
    ("9999-12-31 00:00:00+00", LAST),
    ("10000-01-01 00:00:00+00", LAST),
    ("294276-12-31 00:00:00+00", LAST),
]


@pytest.mark.parametrize(("moment", "shown"), OUT_OF_RANGE)
def test_times_that_no_datetime_can_hold_are_shown_as_the_first_or_the_last(
    caller: Caller, connection: Connection, moment: str, shown: dt.datetime
) -> None:
    job_id = add(connection)
    fail(connection, job_id, 1, "error")
    write_times(connection, job_id, moment)

    (listed,) = caller(lookup.list_jobs)
    (failure,) = caller(lookup.failures_of, job_id)

    assert caller(lookup.find_job, job_id) == listed
    assert {getattr(listed, name) for name in JOB_TIMES} == {shown}
    assert (failure.claimed_at, failure.failed_at) == (shown, shown)


@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "Pacific/Kiritimati"])
@pytest.mark.parametrize("moment", [FIRST, LAST])
def test_the_first_and_the_last_time_are_read_in_every_time_zone(
    connection: Connection, zone: str, moment: dt.datetime
) -> None:
    job_id = add(connection, run_at=moment)
    connection.execute(text(f"SET TIME ZONE '{zone}'"))

    found = lookup.find_job(connection, job_id)

    assert found is not None
    assert found.run_at == moment
    assert found.finished_at is None


@pytest.mark.parametrize("name", ["queue", "handler"])
def test_a_list_can_be_of_any_name_that_a_row_may_have(connection: Connection, name: str) -> None:
    for value in ("", "a\nb\x1b", "\u202e", "x" * 3_000, "{}%s:x'\"\\"):
        job_id = add(connection, **{name: value}) if name == "queue" else add(connection, value)
        assert ids(connection, **{name: value}) == [job_id]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"limit": 0}, "limit must be from 1 to "),
        ({"limit": -1}, "limit must be from 1 to "),
        ({"limit": 2**63}, "limit must be from 1 to "),
        ({"limit": 10**5_000}, "limit must be from 1 to "),
        ({"limit": True}, "limit must be an int"),
        ({"queue": "a\x00"}, "queue contains a NUL"),
        ({"handler": "\udcff"}, "handler contains a lone surrogate"),
        ({"handler": 1}, "handler must be a str"),
    ],
)
def test_what_no_row_can_meet_is_refused_before_any_sql(
    engine: Engine, arguments: dict[str, Any], says: str
) -> None:
    with engine.connect() as connection:
        with pytest.raises((InvalidJobError, InvalidJobTypeError), match=says):
            lookup.list_jobs(connection, **arguments)
        with pytest.raises(InvalidJobError, match="limit must be from 1"):
            lookup.failures_of(connection, 1, limit=0)
        assert not connection.in_transaction()
    with engine.connect() as connection:
        assert lookup.list_jobs(connection, limit=2**62) == []


@pytest.mark.slow
def test_lists_of_large_jobs_read_no_payload(connection: Connection) -> None:
    connection.execute(
        text(
            "INSERT INTO sa_jobs (queue, handler, payload, last_error)"
            " SELECT 'default', 'send',"
            " jsonb_build_object('data', (SELECT string_agg(md5(random()::text), '')"
            " FROM generate_series(1, 3000))), repeat('x', 16000)"
            " FROM generate_series(1, 200)"
        )
    )
    rows = connection.execute(
        lookup._list(DEFAULT_TABLES, None, frozenset()), {"limit": 1_000}
    ).all()

    assert len(rows) == 200
    assert sum(len(str(row)) for row in rows) < 300_000
