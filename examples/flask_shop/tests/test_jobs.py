"""What the handlers do."""

import datetime as dt
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from flask import Flask
from shop.extensions import db, registry
from shop.jobs import report_sales, tell_partner
from shop.models import Order, Report
from sqlalchemy.orm import Session, scoped_session

from sa_jobs.testing import drain, run_job

DbSession = scoped_session[Session]


def new_order(session: DbSession, placed_at: str = "2030-01-31T12:00:00Z") -> Order:
    moment = dt.datetime.fromisoformat(placed_at.replace("Z", "+00:00"))
    order = Order(email="ann@example.org", product="teapot", cents=2500, placed_at=moment)
    session.add(order)
    session.commit()
    return order


def test_a_report_counts_the_orders_of_its_day(session: DbSession) -> None:
    for placed_at in ("2030-01-30T23:59:59Z", "2030-01-31T00:00:00Z", "2030-01-31T23:59:59Z"):
        new_order(session, placed_at)
    job = registry.enqueue(session, report_sales, {"day": "2030-01-31"})

    ran = run_job(session, registry, job)

    assert ran.result == {"orders": 2, "cents": 5000}
    report = session.get_one(Report, dt.date(2030, 1, 31))
    assert (report.orders, report.cents) == (2, 5000)


class Partner(HTTPServer):
    """A partner's webhook, which answers with these codes, one after the other."""

    def __init__(self, *codes: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answering)
        self.codes = list(codes)
        self.heard: list[str | None] = []


class _Answering(BaseHTTPRequestHandler):
    server: Partner

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.heard.append(self.headers["Idempotency-Key"])
        self.send_response(self.server.codes.pop(0))
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        pass


@pytest.fixture
def partner(app: Flask, monkeypatch: pytest.MonkeyPatch) -> Iterator[Partner]:
    with Partner() as server:
        monkeypatch.setitem(app.config, "PARTNER_URL", f"http://127.0.0.1:{server.server_port}/")
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_partner_that_is_down_is_told_again(session: DbSession, partner: Partner) -> None:
    order = new_order(session)
    partner.codes = [503, 200]
    registry.enqueue(session, tell_partner, {"order_id": order.id})

    ran = drain(session, registry, advance=dt.timedelta(hours=1), raise_errors=False)

    assert [(one.attempt, one.status) for one in ran] == [(1, "ready"), (2, "done")]
    assert partner.heard == [f"order-{order.id}"] * 2


def test_a_partner_that_refuses_is_not_told_again(session: DbSession, partner: Partner) -> None:
    order = new_order(session)
    partner.codes = [400]
    job = registry.enqueue(session, tell_partner, {"order_id": order.id})

    ran = run_job(session, registry, job)

    assert ran.status == "dead"
    assert "the partner answered 400" in (ran.job.last_error or "")


def test_an_order_goes_to_the_partner_if_there_is_one(
    app: Flask, session: DbSession, partner: Partner
) -> None:
    partner.codes = [200]
    app.test_client().post(
        "/orders", json={"email": "ann@example.org", "product": "teapot", "cents": 2500}
    )

    drain(session, registry, queues=["partner"])

    assert len(partner.heard) == 1
    assert db.session.query(Order).count() == 1
