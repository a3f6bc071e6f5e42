"""The shop: orders come in over HTTP, and each gets its receipt from a job.

An order and its receipt job are one transaction. The receipt itself is written by a handler that
takes a session, so it is committed together with the job's finish, and is there exactly once,
whatever fails or is killed on the way.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, BigInteger, DateTime, Identity, MetaData, Text, create_engine, func
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import JobContext, Jobs, attach, full_jitter

if TYPE_CHECKING:
    from flask import Flask

SCHEMA = "sa_jobs_demo"

# The mail server takes a while, and sometimes asks to come back later.
MAIL_SECONDS = 0.1
RECEIPT_ATTEMPTS = 10
PARTNER_ATTEMPTS = 3


class Base(DeclarativeBase):
    """The shop's own tables, with those of the queue beside them."""

    metadata = MetaData(schema=SCHEMA)


class Order(Base):
    """An order that was paid."""

    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    customer: Mapped[str] = mapped_column(Text)
    cents: Mapped[int] = mapped_column(BigInteger)


class Receipt(Base):
    """A receipt that was sent.

    Neither unique nor tied to its order: a receipt too many shall be found, not refused.
    """

    __tablename__ = "receipts"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    order_id: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(BigInteger)
    worker_pid: Mapped[int] = mapped_column(BigInteger)
    sent_at: Mapped[dt.datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.clock_timestamp()
    )


jobs = Jobs(attach(Base))


class MailServerBusyError(Exception):
    """The mail server asks to come back later."""


class PartnerGoneError(Exception):
    """The partner's address does not answer, and never will."""


def refusals(order_id: int) -> int:
    """Return how many times the mail server refuses this order's receipt before it takes it."""
    if order_id % 30 == 13:
        return 2
    return 1 if order_id % 10 == 3 else 0


def has_partner(order_id: int) -> bool:
    """Return whether a partner of the shop wants to hear of this order."""
    return order_id % 20 == 5


def partner_is_gone(order_id: int) -> bool:
    """Return whether that partner has closed."""
    return order_id % 40 == 5


@jobs.handler(
    "send_receipt",
    queue="receipts",
    max_attempts=RECEIPT_ATTEMPTS,
    backoff=full_jitter(base=0.5, cap=2),
)
def send_receipt(order_id: int, session: Session, ctx: JobContext) -> None:
    """Send an order's receipt. The session's commit is also the job's finish."""
    order = session.get_one(Order, order_id)
    session.add(Receipt(order_id=order.id, attempt=ctx.attempt, worker_pid=os.getpid()))
    session.flush()
    ctx.wait(MAIL_SECONDS)
    if ctx.attempt <= refusals(order_id):
        # The receipt above goes with this attempt.
        raise MailServerBusyError("421 the mail server is busy, try again later")


@jobs.handler(
    "tell_partner",
    queue="partners",
    max_attempts=PARTNER_ATTEMPTS,
    backoff=full_jitter(base=0.5, cap=2),
)
async def tell_partner(order_id: int) -> None:
    """Tell a partner of an order. Some have closed: those jobs end dead, with their error kept."""
    await asyncio.sleep(MAIL_SECONDS)
    if partner_is_gone(order_id):
        raise PartnerGoneError("the partner's address does not answer")


def create_app(url: URL) -> Flask:
    """Return the shop's web application."""
    from flask import Flask, request

    app = Flask(__name__)
    engine = create_engine(url)

    @app.post("/orders")
    def place_order() -> tuple[dict[str, Any], int]:
        wanted = request.get_json()
        with Session(engine) as session:
            order = Order(customer=wanted["customer"], cents=wanted["cents"])
            session.add(order)
            session.flush()
            answer = {"order_id": order.id}
            jobs.enqueue(session, send_receipt, {"order_id": order.id})
            if has_partner(order.id):
                jobs.enqueue(session, tell_partner, {"order_id": order.id})
            if not _pay(wanted):
                # No order, and no job for it either.
                session.rollback()
                return answer | {"error": "the card was declined"}, 402
            session.commit()
        return answer, 201

    return app


def _pay(wanted: dict[str, Any]) -> bool:
    return bool(wanted["card"] != "declined")
