"""The shop as it runs: its chain, a real worker, and its commands. What is committed is removed."""

from collections.abc import Iterator

import flask_migrate
import pytest
from flask import Flask
from shop.extensions import db, registry, sa_jobs
from shop.models import Mail, Order
from sqlalchemy import delete


@pytest.fixture
def committed(app: Flask) -> Iterator[Flask]:
    yield app
    with app.app_context():
        for table in (Mail, Order, registry.tables.Job):
            db.session.execute(delete(table))
        db.session.commit()


def test_a_worker_sends_the_receipt(committed: Flask) -> None:
    order = {"email": "ann@example.org", "product": "teapot", "cents": 2500}
    placed = committed.test_client().post("/orders", json=order).get_json()

    with committed.app_context():
        worker = sa_jobs.worker()
    assert worker.concurrency == 4
    assert worker.run_until_empty() == 0

    shown = committed.test_client().get(f"/orders/{placed['id']}").get_json()
    assert shown["mails"] == ["Your order of teapot"]
    listed = committed.test_cli_runner().invoke(args=["jobs", "list", "--status", "done"])
    assert listed.exit_code == 0
    assert "send_receipt" in listed.output


def test_the_chain_makes_what_the_models_say(app: Flask, migrations: str) -> None:
    with app.app_context():
        flask_migrate.check(migrations)
