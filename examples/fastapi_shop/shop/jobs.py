"""The shop's handlers: coroutines whose session commits with their job."""

import datetime as dt

from sqlalchemy.ext.asyncio import AsyncSession

from sa_jobs import Discard, JobContext, Jobs
from shop.models import Mail, Order, tables

REVIEW_AFTER = dt.timedelta(days=7)

jobs = Jobs(tables)


@jobs.handler("confirm_order", max_attempts=5, timeout=30)
async def confirm_order(order_id: int, session: AsyncSession, ctx: JobContext) -> None:
    order = await session.get(Order, order_id)
    if order is None:
        raise Discard(f"there is no order {order_id}")
    order.status = "confirmed"
    session.add(
        Mail(order_id=order.id, recipient=order.email, subject=f"Your order of {order.product}")
    )
    # In the same transaction: asked for exactly once, however often this handler is tried.
    await jobs.enqueue(session, ask_for_review, {"order_id": order.id}, delay=REVIEW_AFTER)
    ctx.log.info("confirmed order %s", order.id)


@jobs.handler("ask_for_review", queue="mail")
async def ask_for_review(order_id: int, session: AsyncSession) -> None:
    order = await session.get_one(Order, order_id)
    session.add(
        Mail(order_id=order.id, recipient=order.email, subject=f"How is your {order.product}?")
    )


@jobs.on_dead
def call_somebody(ctx: JobContext, error: BaseException) -> None:
    ctx.log.critical("gave up: %s", error)
