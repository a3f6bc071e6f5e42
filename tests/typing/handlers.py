"""Handlers and their payloads as users write them. Checked by mypy and pyright, never run."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypedDict
from uuid import UUID

import pydantic
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session
from typing_extensions import assert_type

from sa_jobs import (
    Enqueued,
    InvalidJobError,
    JobContext,
    Jobs,
    PayloadMisfitError,
    Row,
    SaJobsError,
    equal_jitter,
)
from sa_jobs.backoff import Backoff

jobs = Jobs()


@dataclass
class Item:
    sku: str
    price: Decimal


class Address(TypedDict):
    street: str


class Customer(pydantic.BaseModel):
    id: UUID


# --- a decorated handler is still the function that it was --------------------------------------


@jobs.handler
def bare(order_id: int, note: str = "") -> dict[str, int]:
    return {"order": order_id}


@jobs.handler("ship", queue="mail", backoff=equal_jitter(1, 60))
def ship(items: list[Item], to: Address, session: Session, ctx: JobContext) -> None:
    for item in items:
        assert_type(item.price, Decimal)
    ctx.log.info("to %s", to["street"])


@jobs.handler("welcome", timeout=dt.timedelta(seconds=5))
async def welcome(
    customer: Customer, session: AsyncSession, *, at: dt.datetime | None = None
) -> UUID:
    return customer.id


class Mailer:
    def send(self, address: str) -> bool:
        return bool(address)


assert_type(bare(1), dict[str, int])
assert_type(bare(order_id=1, note="x"), dict[str, int])
assert_type(jobs.handler("mail")(Mailer().send)("a@example.org"), bool)
one_more: Callable[[int], dict[str, int]] = bare


def call_them(session: Session, ctx: JobContext, customer: Customer, other: AsyncSession) -> None:
    ship([Item("tea", Decimal("4.50"))], {"street": "Elm"}, session, ctx)
    result: Coroutine[Any, Any, UUID] = welcome(customer, other, at=None)
    result.close()


def what_the_checker_refuses(session: Session, ctx: JobContext) -> None:
    bare("1")  # type: ignore[arg-type]
    bare(1, nota="x")  # type: ignore[call-arg]
    ship([], {"street": 5}, session, ctx)  # type: ignore[typeddict-item]
    ship([])  # type: ignore[call-arg]
    jobs.handler(5)  # type: ignore[call-overload]
    jobs.handler("ship", queue=5)  # type: ignore[call-overload]


# --- payloads -----------------------------------------------------------------------------------


def enqueue_them(
    session: Session, scoped: scoped_session[Session], connection: Connection, customer: Customer
) -> None:
    item = Item("tea", Decimal("4.50"))
    to: Address = {"street": "Elm"}
    payload: Mapping[str, object] = {"items": [item], "to": to}
    assert_type(jobs.enqueue(session, ship, payload, priority=5), Enqueued)
    assert_type(jobs.enqueue(scoped, ship, {"items": [item], "to": to}), Enqueued)
    assert_type(jobs.enqueue(connection, "welcome", {"customer": customer}), Enqueued)
    rows = [Row({"order_id": 1}, idempotency_key="order:1"), Row({"order_id": 2}, delay=5)]
    assert_type(jobs.enqueue_many(session, bare, rows), list[Enqueued])
    assert_type(jobs.enqueue_many(session, bare, [{"order_id": 1}, None]), list[Enqueued])
    jobs.enqueue(session, ship, [item])  # type: ignore[call-overload]
    jobs.enqueue(session, ship, item)  # type: ignore[call-overload]


async def enqueue_them_async(session: AsyncSession, customer: Customer) -> None:
    enqueued = await jobs.enqueue(session, welcome, {"customer": customer})
    assert_type(enqueued, Enqueued)


def what_goes_wrong(session: Session) -> str:
    try:
        jobs.enqueue(session, bare, {})
    except InvalidJobError as error:
        return str(error)
    errors: list[type[SaJobsError]] = [PayloadMisfitError]
    return errors[0].__name__


# --- the registry -------------------------------------------------------------------------------


def look_up() -> None:
    handler = jobs["ship"]
    assert_type(handler.name, str)
    assert_type(handler.timeout, float | None)
    assert_type(handler.backoff(1), float)
    policy: Backoff = handler.backoff
    names = [registered.name for registered in jobs]
    assert_type(names, list[str])
    assert_type(len(jobs), int)
    jobs.handler("later", backoff=policy)
