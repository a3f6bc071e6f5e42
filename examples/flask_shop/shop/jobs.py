"""The shop's handlers. Each runs in an application context of its own."""

import datetime as dt
import json
import urllib.error
import urllib.request

from flask import current_app
from sqlalchemy import Date, cast, func, select
from sqlalchemy.orm import Session

from sa_jobs import Discard, JobContext, full_jitter
from shop.extensions import db, registry
from shop.models import Mail, Order, Report

REMIND_AFTER = dt.timedelta(days=3)
PARTNER_SECONDS = 5


@registry.handler("send_receipt", queue="mail", max_attempts=8, timeout=60)
def send_receipt(order_id: int, session: Session, ctx: JobContext) -> None:
    """Write the receipt. It is committed together with the job's finish, so there is one."""
    order = session.get_one(Order, order_id)
    write_mail(order, f"Your order of {order.product}")
    ctx.log.info("receipt for order %s", order.id)


@registry.handler("remind_to_pay", queue="mail")
def remind_to_pay(order_id: int, session: Session) -> None:
    """Remind of an order that is not paid; enqueued with a delay when it is placed."""
    order = session.get_one(Order, order_id)
    if order.paid_at is not None:
        raise Discard(f"order {order.id} is paid")
    write_mail(order, f"Please pay for your {order.product}")


def write_mail(order: Order, subject: str) -> None:
    """Write a mail through `db.session`, which is the session of a job that asks for one."""
    db.session.add(Mail(order_id=order.id, subject=subject))


@registry.handler("tell_partner", queue="partner", max_attempts=5, backoff=full_jitter(2, 300))
def tell_partner(order_id: int) -> int:
    """Call the partner's webhook. No transaction is open while it answers.

    A partner that fails is asked again after a back-off: it may be told of an order twice.
    """
    order = db.session.get_one(Order, order_id)
    body = json.dumps({"order": order.id, "product": order.product}).encode()
    url = current_app.config["PARTNER_URL"]
    db.session.rollback()
    request = urllib.request.Request(
        url, body, {"Content-Type": "application/json", "Idempotency-Key": f"order-{order_id}"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PARTNER_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            if error.code < 500:
                # Asking again would not help.
                raise Discard(f"the partner answered {error.code}") from error
            raise


@registry.handler("report_sales", queue="reports")
def report_sales(day: str, session: Session) -> dict[str, int]:
    """Write the report of a day, also over an earlier one."""
    orders, cents = session.execute(
        select(func.count(), func.coalesce(func.sum(Order.cents), 0)).where(
            cast(func.timezone("UTC", Order.placed_at), Date) == dt.date.fromisoformat(day)
        )
    ).one()
    session.merge(Report(day=dt.date.fromisoformat(day), orders=orders, cents=cents))
    return {"orders": orders, "cents": cents}
