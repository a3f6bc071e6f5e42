"""What the views write and enqueue."""

from flask.testing import FlaskClient
from shop.extensions import registry
from shop.jobs import REMIND_AFTER, remind_to_pay, report_sales, send_receipt, tell_partner
from shop.models import Order
from sqlalchemy import func, select
from sqlalchemy.orm import Session, scoped_session

from sa_jobs.testing import assert_enqueued, drain, refute_enqueued

NEW = {"email": "ann@example.org", "product": "teapot", "cents": 2500}

DbSession = scoped_session[Session]


def place_order(client: FlaskClient) -> int:
    answer = client.post("/orders", json=NEW)
    assert answer.status_code == 201
    return int(answer.get_json()["id"])


def test_an_order_enqueues_its_receipt_and_a_reminder(
    client: FlaskClient, session: DbSession
) -> None:
    order_id = place_order(client)

    [job] = assert_enqueued(session, send_receipt, {"order_id": order_id}, queue="mail", count=1)
    assert job.idempotency_key == f"order:{order_id}:receipt"
    assert_enqueued(session, remind_to_pay, {"order_id": order_id}, delay=REMIND_AFTER)
    refute_enqueued(session, tell_partner)


def test_an_order_that_is_refused_enqueues_nothing(client: FlaskClient, session: DbSession) -> None:
    answer = client.post("/orders", json={**NEW, "card": "declined"})

    assert answer.status_code == 402
    refute_enqueued(session, send_receipt)
    assert session.scalar(select(func.count()).select_from(Order)) == 0


def test_the_receipt_is_sent(client: FlaskClient, session: DbSession) -> None:
    order_id = place_order(client)

    assert [ran.status for ran in drain(session, registry)] == ["done"]

    shown = client.get(f"/orders/{order_id}").get_json()
    assert shown == {
        "id": order_id,
        "product": "teapot",
        "paid": False,
        "mails": ["Your order of teapot"],
    }


def test_who_does_not_pay_is_reminded_once(client: FlaskClient, session: DbSession) -> None:
    order_id = place_order(client)

    drain(session, registry, advance=REMIND_AFTER * 2)

    mails = client.get(f"/orders/{order_id}").get_json()["mails"]
    assert mails == ["Your order of teapot", "Please pay for your teapot"]


def test_who_has_paid_is_not_reminded(client: FlaskClient, session: DbSession) -> None:
    order_id = place_order(client)
    assert client.post(f"/orders/{order_id}/pay").get_json()["paid"] is True

    ran = drain(session, registry, advance=REMIND_AFTER * 2)

    assert [(one.job.handler, one.status) for one in ran] == [
        ("send_receipt", "done"),
        ("remind_to_pay", "dead"),
    ]
    assert client.get(f"/orders/{order_id}").get_json()["mails"] == ["Your order of teapot"]


def test_one_report_of_a_day_waits_however_often_it_is_asked_for(
    client: FlaskClient, session: DbSession
) -> None:
    first = client.post("/reports/2030-01-31").get_json()
    second = client.post("/reports/2030-01-31").get_json()

    assert (first["created"], second["created"]) == (True, False)
    assert first["job"] == second["job"]
    assert_enqueued(session, report_sales, {"day": "2030-01-31"}, count=1)
    assert client.post("/reports/today").status_code == 404
