"""The shop over HTTP. What a request writes and what it enqueues is one transaction."""

import datetime as dt
from typing import Any

from flask import Blueprint, abort, current_app, request
from sqlalchemy import func, select

from shop.extensions import db, registry
from shop.jobs import REMIND_AFTER, remind_to_pay, report_sales, send_receipt, tell_partner
from shop.models import Mail, Order

shop = Blueprint("shop", __name__)


@shop.post("/orders")
def place_order() -> tuple[dict[str, Any], int]:
    wanted = request.get_json()
    order = Order(email=wanted["email"], product=wanted["product"], cents=wanted["cents"])
    db.session.add(order)
    db.session.flush()
    payload = {"order_id": order.id}
    registry.enqueue(db.session, send_receipt, payload, idempotency_key=f"order:{order.id}:receipt")
    registry.enqueue(db.session, remind_to_pay, payload, delay=REMIND_AFTER)
    if current_app.config["PARTNER_URL"]:
        registry.enqueue(db.session, tell_partner, payload)
    answer = {"id": order.id}
    if wanted.get("card") == "declined":
        # No order, and no job for it either.
        db.session.rollback()
        return {"error": "the card was declined"}, 402
    db.session.commit()
    return answer, 201


@shop.get("/orders/<int:order_id>")
def show_order(order_id: int) -> dict[str, Any]:
    order = db.get_or_404(Order, order_id)
    mails = select(Mail.subject).where(Mail.order_id == order.id).order_by(Mail.id)
    return {
        "id": order.id,
        "product": order.product,
        "paid": order.paid_at is not None,
        "mails": list(db.session.scalars(mails)),
    }


@shop.post("/orders/<int:order_id>/pay")
def pay_order(order_id: int) -> dict[str, Any]:
    order = db.get_or_404(Order, order_id)
    order.paid_at = func.now()
    db.session.commit()
    return {"id": order_id, "paid": True}


@shop.post("/reports/<day>")
def ask_for_report(day: str) -> tuple[dict[str, Any], int]:
    try:
        dt.date.fromisoformat(day)
    except ValueError:
        abort(404)
    # However often it is asked for, one of them waits.
    job = registry.enqueue(db.session, report_sales, {"day": day}, unique_key=f"report:{day}")
    db.session.commit()
    return {"job": job.id, "created": job.created}, 202
