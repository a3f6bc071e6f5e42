"""What users' tests say of jobs that were enqueued, and how they are told that it is not so."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest
from sqlalchemy import Connection, MetaData
from sqlalchemy.orm import Session

from sa_jobs import InvalidJobError, InvalidJobTypeError, Jobs, attach, cancel, enqueue
from sa_jobs.models import Job
from sa_jobs.testing import assert_enqueued, drain, enqueued, refute_enqueued

jobs = Jobs()
NOON = dt.datetime(2090, 1, 1, 12, tzinfo=dt.timezone.utc)
MINUTE = dt.timedelta(minutes=1)


@jobs.handler(queue="mail")
def send_receipt(order_id: int, options: Any = None) -> None: ...


@jobs.handler
def anything(**payload: Any) -> None: ...


def add(session: Session, payload: dict[str, Any] | None = None, **options: Any) -> int:
    return jobs.enqueue(session, send_receipt, payload or {"order_id": 1842}, **options).id


def text_of(raised: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return [re.sub(r"job \d+", "job N", line) for line in str(raised.value).splitlines()]


# --- what is found ------------------------------------------------------------------------------


def test_the_jobs_that_are_meant_are_returned(session: Session) -> None:
    first, other, second = (add(session, {"order_id": number}) for number in (1, 2, 1))
    enqueue(session, "unrelated")
    found = assert_enqueued(session, send_receipt, {"order_id": 1})
    assert [job.id for job in found] == [first, second]
    assert [job.id for job in assert_enqueued(session, "send_receipt")] == [first, other, second]


def test_a_job_shows_what_it_has(session: Session) -> None:
    job_id = add(
        session,
        {"order_id": 1, "options": {"a": [1.5, None]}},
        run_at=NOON,
        priority=3,
        tenant="acme",
        idempotency_key="i",
        unique_key="u",
        max_attempts=4,
    )
    (job,) = enqueued(session)
    assert (job.id, job.handler, job.queue, job.status) == (
        job_id,
        "send_receipt",
        "mail",
        "ready",
    )
    assert job.payload == {"order_id": 1, "options": {"a": [1.5, None]}}
    assert (job.run_at, job.priority, job.tenant) == (NOON, 3, "acme")
    assert (job.idempotency_key, job.unique_key, job.max_attempts) == ("i", "u", 4)
    assert (job.attempts, job.result, job.last_error, job.meta) == (0, None, None, {})
    with pytest.raises(AttributeError):
        job.status = "done"  # type: ignore[misc]


def test_jobs_that_the_session_has_not_flushed_are_seen(session: Session) -> None:
    job = Job()
    job.queue, job.handler, job.payload = "default", "by hand", {}
    session.add(job)
    assert len(assert_enqueued(session, "by hand")) == 1


def test_a_connection_will_do(connection: Connection) -> None:
    enqueue(connection, "send")
    assert_enqueued(connection, "send")
    refute_enqueued(connection, "other")


def test_other_tables_are_looked_at_if_given(session: Session) -> None:
    tables = attach(MetaData(), name="elsewhere", register=False)
    tables.jobs.metadata.create_all(session.connection())
    enqueue(session, "send", tables=tables)
    assert_enqueued(session, "send", tables=tables)
    refute_enqueued(session, "send")


@pytest.mark.parametrize(
    ("part", "meets"),
    [
        ({}, True),
        ({"order_id": 1}, True),
        ({"order_id": ANY}, True),
        ({"order_id": True}, False),
        ({"order_id": 1.0}, True),
        ({"order_id": 2}, False),
        ({"order_id": None}, False),
        ({"options": {"deep": {"a": 1}}}, True),
        ({"options": {"deep": {"a": 1, "b": 2}}}, True),
        ({"options": {"deep": {"c": 1}}}, False),
        ({"options": {"list": [1, {"x": 1}]}}, True),
        ({"options": {"list": [1]}}, False),
        ({"options": {"list": [1, {}]}}, False),
        ({"options": {"flag": 1}}, False),
        ({"options": {"flag": True}}, True),
        ({"options": None}, False),
        ({"order_id": {}}, False),
    ],
)
def test_a_part_of_the_payload_is_compared(
    session: Session, part: dict[str, Any], meets: bool
) -> None:
    options = {"deep": {"a": 1, "b": 2}, "list": [1, {"x": 1}], "flag": True}
    add(session, {"order_id": 1, "options": options})
    assert len(enqueued(session, send_receipt, part)) == meets
    if not meets:
        with pytest.raises(AssertionError, match=r"order_id|options"):
            assert_enqueued(session, send_receipt, part)


@pytest.mark.parametrize(
    ("options", "meets"),
    [
        ({"queue": "mail"}, True),
        ({"queue": "default"}, False),
        ({"priority": 3}, True),
        ({"priority": 0}, False),
        ({"tenant": "acme"}, True),
        ({"tenant": "other"}, False),
        ({"unique_key": "u"}, True),
        ({"unique_key": "i"}, False),
        ({"idempotency_key": "i"}, True),
        ({"idempotency_key": "u"}, False),
        ({"run_at": NOON}, True),
        ({"run_at": NOON + dt.timedelta(seconds=1)}, True),
        ({"run_at": NOON + dt.timedelta(seconds=2)}, False),
        ({"run_at": (NOON - MINUTE, NOON + MINUTE)}, True),
        ({"run_at": (NOON, NOON)}, True),
        ({"run_at": (None, NOON)}, True),
        ({"run_at": (NOON, None)}, True),
        ({"run_at": (None, NOON - MINUTE)}, False),
        ({"run_at": (NOON + MINUTE, None)}, False),
        ({"delay": (3600, None)}, True),
        ({"delay": (None, dt.timedelta(hours=1))}, False),
        ({"status": None}, True),
        ({"status": "done"}, False),
    ],
)
def test_each_option_is_compared(session: Session, options: dict[str, Any], meets: bool) -> None:
    add(session, run_at=NOON, priority=3, tenant="acme", idempotency_key="i", unique_key="u")
    if meets:
        assert_enqueued(session, send_receipt, **options)
        with pytest.raises(AssertionError):
            refute_enqueued(session, send_receipt, **options)
    else:
        refute_enqueued(session, send_receipt, **options)
        with pytest.raises(AssertionError, match=f"{next(iter(options))} is "):
            assert_enqueued(session, send_receipt, **options)


def test_a_delay_counts_from_the_jobs_creation(session: Session) -> None:
    add(session, delay=90)
    assert_enqueued(session, send_receipt, delay=90)
    assert_enqueued(session, send_receipt, delay=dt.timedelta(seconds=90))
    assert_enqueued(session, send_receipt, delay=(60, MINUTE * 2))
    refute_enqueued(session, send_receipt, delay=0)
    add(session)
    assert_enqueued(session, send_receipt, delay=0, count=1)


def test_only_jobs_that_wait_are_meant_unless_said_otherwise(session: Session) -> None:
    add(session)
    drain(session, jobs)
    cancelled = add(session)
    cancel(session, cancelled)
    refute_enqueued(session, send_receipt)
    assert len(enqueued(session, status=None)) == 2
    assert_enqueued(session, send_receipt, status="cancelled", count=1)
    with pytest.raises(AssertionError, match="status is 'done', not 'ready'"):
        assert_enqueued(session, send_receipt)


def test_exactly_as_many_as_counted(session: Session) -> None:
    assert assert_enqueued(session, send_receipt, count=0) == []
    add(session)
    add(session)
    assert len(assert_enqueued(session, send_receipt, count=2)) == 2
    for count in (0, 1, 3):
        with pytest.raises(AssertionError, match=f"expected to find {count}, and found 2"):
            assert_enqueued(session, send_receipt, count=count)


@dataclass
class Address:
    city: str
    street: str = ""


@jobs.handler
def ship(order: UUID, at: dt.datetime, price: Decimal, to: Address) -> None: ...


ORDER = UUID(int=5)


@pytest.mark.parametrize(
    ("part", "meets"),
    [
        ({"order": ORDER, "at": NOON, "price": Decimal("1.50")}, True),
        ({"to": Address("Ulm", "Main")}, True),
        ({"to": {"city": "Ulm"}}, True),
        ({"order": ANY, "to": ANY}, True),
        ({"order": str(ORDER)}, True),
        ({"order": UUID(int=6)}, False),
        ({"at": NOON + MINUTE}, False),
        ({"to": Address("Ulm")}, False),
        ({"to": {"city": "Bonn"}}, False),
    ],
)
def test_typed_values_are_compared_as_they_are_stored(
    session: Session, part: dict[str, Any], meets: bool
) -> None:
    payload = {"order": ORDER, "at": NOON, "price": Decimal("1.50"), "to": Address("Ulm", "Main")}
    jobs.enqueue(session, ship, payload)
    assert len(enqueued(session, ship, part)) == meets


# --- what is refused ----------------------------------------------------------------------------


def test_a_key_that_no_payload_of_the_handler_has_is_refused(session: Session) -> None:
    """Else a misspelt key would make every refutation pass."""
    for check in (refute_enqueued, assert_enqueued, enqueued):
        with pytest.raises(
            InvalidJobError, match=r"'ordr_id' in its payload: .* options, order_id"
        ):
            check(session, send_receipt, {"ordr_id": 1})
    refute_enqueued(session, anything, {"ordr_id": 1})
    refute_enqueued(session, "send_receipt", {"ordr_id": 1})


@pytest.mark.parametrize(
    ("error", "options"),
    [
        (InvalidJobError, {"run_at": dt.datetime(2090, 1, 1)}),  # noqa: DTZ001
        (InvalidJobTypeError, {"run_at": 5}),
        (InvalidJobError, {"delay": -1}),
        (InvalidJobTypeError, {"delay": ("1", None)}),
        (InvalidJobError, {"status": "waiting"}),
        (InvalidJobTypeError, {"payload_subset": [1]}),
        (InvalidJobTypeError, {"handler": len}),
    ],
)
def test_what_no_job_can_meet_is_refused(
    session: Session, error: type[Exception], options: dict[str, Any]
) -> None:
    with pytest.raises(error):
        refute_enqueued(session, **{"handler": send_receipt, **options})


# --- how it is said -----------------------------------------------------------------------------


def test_the_nearest_miss_comes_first(session: Session) -> None:
    enqueue(session, "other", {"order_id": 1842}, queue="mail")
    add(session, {"order_id": 7}, queue="default", priority=2)
    add(session, {"order_id": 1842, "options": {"copy": False}}, delay=60)
    with pytest.raises(AssertionError) as raised:
        assert_enqueued(
            session, send_receipt, {"order_id": 1842, "options": {"copy": True}}, queue="mail"
        )
    assert text_of(raised) == [
        (
            "expected to find: ready, a job of handler 'send_receipt', with queue='mail', "
            "with {'order_id': 1842, 'options': {'copy': True}} in its payload"
        ),
        "there is, the nearest first:",
        (
            "  job N 'send_receipt', ready, queue='mail', delay=0:01:00: "
            "{'options': {'copy': False}, 'order_id': 1842}"
        ),
        "      payload['options']['copy'] is False, not True",
        "  job N 'send_receipt', ready, queue='default', priority=2: {'order_id': 7}",
        "      queue is 'default', not 'mail'",
        "      payload['order_id'] is 7, not 1842",
        "      payload['options'] is not there, and should be {'copy': True}",
        "  job N 'other', ready, queue='mail': {'order_id': 1842}",
        "      handler is 'other', not 'send_receipt'",
        "      payload['options'] is not there, and should be {'copy': True}",
    ]


def test_an_empty_table_is_said_to_be_one(session: Session) -> None:
    with pytest.raises(AssertionError) as raised:
        assert_enqueued(session, send_receipt, run_at=(NOON, None))
    assert text_of(raised) == [
        (
            "expected to find: ready, a job of handler 'send_receipt', "
            "with run_at from 2090-01-01 12:00:00+00:00 on"
        ),
        (
            "there are no jobs at all: they may have been enqueued in another session or other "
            "tables (tables=), or rolled back"
        ),
    ]


def test_a_count_that_differs_shows_what_was_found(session: Session) -> None:
    add(session)
    with pytest.raises(AssertionError) as raised:
        assert_enqueued(session, send_receipt, count=0)
    assert text_of(raised) == [
        "expected to find 0, and found 1: ready, a job of handler 'send_receipt'",
        "found:",
        "  job N 'send_receipt', ready, queue='mail': {'order_id': 1842}",
    ]


def test_a_refutation_shows_what_there_is(session: Session) -> None:
    add(session, tenant="acme", unique_key="k")
    with pytest.raises(AssertionError) as raised:
        refute_enqueued(session, send_receipt, delay=0)
    assert text_of(raised) == [
        "expected not to find: ready, a job of handler 'send_receipt', with delay 0:00:00",
        "there is:",
        (
            "  job N 'send_receipt', ready, queue='mail', tenant='acme', unique_key='k': "
            "{'order_id': 1842}"
        ),
    ]


def test_many_jobs_and_large_payloads_are_cut(session: Session) -> None:
    jobs.enqueue_many(session, anything, [{"text": "x" * 10_000}] * 15)
    with pytest.raises(AssertionError) as raised:
        refute_enqueued(session, anything)
    lines = text_of(raised)
    assert lines[-1] == "  ... and 5 more"
    assert max(map(len, lines)) < 700


def test_the_traceback_ends_in_the_test(session: Session) -> None:
    add(session)
    for check in (
        lambda: assert_enqueued(session, send_receipt, {"order_id": 5}),
        lambda: refute_enqueued(session, send_receipt),
    ):
        with pytest.raises(AssertionError) as raised:
            check()
        shown = raised.traceback.filter(raised)
        assert [Path(entry.path).name for entry in shown] == ["test_testing_assertions.py"] * 2
