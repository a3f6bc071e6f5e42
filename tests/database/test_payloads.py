"""Typed payloads through jsonb and a worker, and payloads that do not fit their handler."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import uuid
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, Numeric, cast, func, literal, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from sa_jobs import InvalidJobError, InvalidJobTypeError, Jobs, Row, Worker, fixed, jsontext
from sa_jobs.models import DEFAULT_TABLES
from sa_jobs.payloads import Parameter, PayloadTypes
from tests.support.looking import failures, job
from tests.support.payloads import Address, Colour, Item, Model, Order, anything
from tests.support.running import SHORT, run_all
from tests.unit.test_payloads import AT, ID, shown

ORDER = Order(ID, AT, [Item("tea", Decimal("4.50"), Colour.RED), Item("cup", Decimal("1E+2"))])
MODEL = Model(id=ID, price=Decimal("1.10"), at=AT)


def payloads(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        jobs = DEFAULT_TABLES.jobs
        return list(connection.execute(select(jobs.c.payload).order_by(jobs.c.id)).scalars())


def test_a_handler_gets_what_was_enqueued(engine: Engine) -> None:
    jobs, got = Jobs(), list[Any]()

    @jobs.handler("plain")
    def plain(
        order: Order, model: Model, since: dt.date, address: Address | None = None, n: int = 1
    ) -> None:
        got.append((order, model, since, address, n))

    @jobs.handler("coroutine")
    async def coroutine(order: Order, names: set[str], rest: Any = None) -> None:
        got.append((order, names, rest))

    payload = {"order": ORDER, "model": MODEL, "since": AT.date(), "address": {"street": "Elm"}}
    with Session(engine) as session, session.begin():
        jobs.enqueue(session, plain, payload)
        jobs.enqueue_many(
            session,
            coroutine,
            [{"order": ORDER, "names": {"a"}}, Row({"order": ORDER, "names": set(), "rest": [1]})],
        )
    run_all(engine, jobs)

    got.sort(key=len)
    assert shown(got) == shown(
        [(ORDER, {"a"}, None), (ORDER, set(), [1]), (ORDER, MODEL, AT.date(), {"street": "Elm"}, 1)]
    )
    assert payload["order"] is ORDER  # the caller's own payload stays as it was


def test_an_async_session_takes_them_too(engine: Engine) -> None:
    jobs, got = Jobs(), list[Any]()

    @jobs.handler("send")
    def send(order: Order) -> None:
        got.append(order)

    async def enqueue() -> None:
        async_engine = create_async_engine(engine.url)
        async with AsyncSession(async_engine) as session, session.begin():
            await jobs.enqueue(session, send, {"order": ORDER})
        await async_engine.dispose()

    asyncio.run(enqueue())
    run_all(engine, jobs)
    assert got == [ORDER]


@given(data=st.data())
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_jsonb_changes_nothing(engine: Engine, data: st.DataObject) -> None:
    annotation, values = data.draw(anything)
    types = PayloadTypes("send", None, [Parameter("x", annotation)])
    value = data.draw(values)
    try:
        written = jsontext.dumps(types.encode({"x": value}), what="payload")
    except InvalidJobError:
        return
    with engine.connect() as connection:
        stored = connection.scalar(text("SELECT CAST(CAST(:it AS jsonb) AS text)"), {"it": written})
    payload = json.loads(stored)
    types.decode(payload, stored)
    assert same_but_order(payload["x"], value)


def same_but_order(one: Any, other: Any) -> bool:
    if type(one) is dict and type(other) is dict:
        return one.keys() == other.keys() and all(
            same_but_order(one[key], other[key]) for key in one
        )
    if type(one) in (list, tuple) and type(one) is type(other) and len(one) == len(other):
        return all(map(same_but_order, one, other))
    return bool(shown(one) == shown(other))


def test_a_wrong_payload_is_refused_before_any_sql(engine: Engine) -> None:
    jobs = Jobs()

    @jobs.handler("send")
    def send(order: Order) -> None: ...

    wrong = {"number": ID, "placed_at": AT, "items": [{"sku": "tea", "price": 4.5}]}
    with Session(engine) as session:
        with pytest.raises(InvalidJobTypeError, match=r"payload\.order\.items\[0\]\.price: float"):
            jobs.enqueue(session, send, {"order": wrong})
        with pytest.raises(InvalidJobTypeError, match=r"'send', row 1: payload\.order\.items\[0\]"):
            jobs.enqueue_many(session, send, [{"order": ORDER}, Row({"order": wrong})])
        assert not session.in_transaction()
    assert payloads(engine) == []


def test_rows_of_a_select_are_read_with_all_their_digits(engine: Engine) -> None:
    jobs, got = Jobs(), list[Any]()

    @jobs.handler("bill")
    def bill(
        price: Decimal,
        at: dt.datetime,
        day: dt.date,
        ratio: float,
        id: uuid.UUID,
        span: dt.timedelta,
    ) -> None:
        got.append((price, at, day, ratio, id, span))

    price = Decimal("12345678901234567890.10")
    query = select(
        cast(literal(price), Numeric(30, 2)).label("price"),
        func.make_timestamptz(2030, 5, 17, 12, 30, 1.25, "UTC").label("at"),
        func.make_date(2030, 5, 17).label("day"),
        literal(1).label("ratio"),
        literal(ID).label("id"),
        func.make_interval(0, 0, 0, 0, 1, 30).label("span"),
    )
    with Session(engine) as session, session.begin():
        session.execute(text("SET LOCAL intervalstyle = iso_8601"))
        assert jobs.enqueue_from_select(session, bill, query) == 1
    run_all(engine, jobs)
    assert shown(got) == shown([(price, AT, AT.date(), 1.0, ID, dt.timedelta(minutes=90))])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({}, "lacks 'order'"),
        ({"order": {}, "surplus": "secret"}, "has 'surplus'"),
        ({"order": "secret"}, "payload.order: expected `object`, got `str`"),
        (
            {"order": {"number": str(ID), "placed_at": "2030-01-01T00:00:00Z", "items": [{}]}},
            "payload.order.items[0]: object missing required field `sku`",
        ),
        (
            {
                "order": {
                    "number": str(ID),
                    "placed_at": "2030-01-01T00:00:00Z",
                    "items": [{"sku": "secret", "price": "1", "colour": "secret"}],
                }
            },
            "payload.order.items[0].colour: is none of the values that its type allows",
        ),
        (
            {"order": {"number": str(ID), "placed_at": "2030-01-01", "items": [], "old": "secret"}},
            "payload.order.placed_at: invalid RFC3339 encoded datetime",
        ),
        ([5], "is no JSON object"),
    ],
)
def test_a_payload_that_does_not_fit_any_more_is_a_failed_attempt(
    engine: Engine, payload: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    jobs, ran = Jobs(), list[Any]()

    @jobs.handler("confirm", max_attempts=2, backoff=fixed(0))
    def confirm(order: Order) -> None:
        ran.append(order)

    with engine.begin() as connection:
        id = connection.execute(
            DEFAULT_TABLES.jobs.insert()
            .values(queue="default", handler="confirm", payload=payload, max_attempts=2)
            .returning(DEFAULT_TABLES.jobs.c.id)
        ).scalar_one()
    run_all(engine, jobs)

    assert ran == []
    assert job(engine, id).status == "dead"
    assert len(failures(engine, id)) == 2
    for failure in failures(engine, id):
        assert "PayloadMisfitError: the payload of job" in failure.error
        assert "handler 'confirm' as it is here: " in failure.error
        assert reason in failure.error.splitlines()[-1]
        assert "secret" not in failure.error
    assert "secret" not in caplog.text
    assert "PayloadMisfitError" in caplog.text


def test_a_job_that_met_an_older_worker_is_run_by_one_that_knows_its_payload(
    engine: Engine,
) -> None:
    old, new, got = Jobs(), Jobs(), list[Any]()

    @old.handler("confirm", backoff=fixed(0))
    def confirm_before(order: str) -> None:
        got.append(order)

    @new.handler("confirm", backoff=fixed(0))
    def confirm_after(order: str, copies: int = 1) -> None:
        got.append((order, copies))

    with Session(engine) as session, session.begin():
        id = new.enqueue(session, confirm_after, {"order": "a", "copies": 2}, max_attempts=3).id
    assert Worker(engine, old, **SHORT, max_jobs=1).run_until_empty() == 4
    assert (job(engine, id).status, got) == ("ready", [])
    run_all(engine, new)
    assert (job(engine, id).status, got) == ("done", [("a", 2)])
