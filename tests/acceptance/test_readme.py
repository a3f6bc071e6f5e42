"""The README's Python blocks run as they stand, one after the other in one module."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from sa_jobs.testing import rolled_back
from tests.support.running import run_all

pytestmark = pytest.mark.acceptance

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def shop() -> dict[str, Any]:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    module: dict[str, Any] = {"__name__": "readme_shop"}
    for block in blocks:
        exec(compile(block, str(README), "exec", dont_inherit=True), module)
    return module


def test_the_order_and_its_receipt_job_are_one_transaction(
    shop: dict[str, Any], empty_database: str
) -> None:
    engine = create_engine(empty_database)
    shop["Base"].metadata.create_all(engine)
    with Session(engine) as session:
        shop["place_order"](session, "rolled-back@example.org")
        session.rollback()
        kept = shop["place_order"](session, "kept@example.org")
        session.commit()
        order_id = kept.id

    run_all(engine, shop["jobs"])

    with Session(engine) as session:
        (order,) = session.query(shop["Order"]).all()
        (job,) = session.query(shop["jobs"].tables.Job).all()
        assert (order.id, order.email) == (order_id, "kept@example.org")
        assert order.receipt_sent is True
        assert (job.status, job.queue, job.max_attempts) == ("done", "mail", 8)
    engine.dispose()


def test_a_handler_says_how_it_ends(shop: dict[str, Any], empty_database: str) -> None:
    engine = create_engine(empty_database)
    shop["Base"].metadata.create_all(engine)
    with Session(engine) as session:
        shop["jobs"].enqueue(session, "fetch", {"url": "ftp://example.org"})
        shop["jobs"].enqueue(session, "fetch", {"url": "https://example.org"})
        session.commit()

    run_all(engine, shop["jobs"])

    with Session(engine) as session:
        mapped = shop["jobs"].tables.Job
        discarded, retried = session.query(mapped).order_by(mapped.id)
        assert (discarded.status, discarded.last_error) == (
            "dead",
            "discarded: not https: ftp://example.org",
        )
        assert (retried.status, retried.last_error) == ("ready", "the server is busy")
    engine.dispose()


def test_the_test_passes(shop: dict[str, Any], empty_database: str) -> None:
    engine = create_engine(empty_database)
    shop["Base"].metadata.create_all(engine)
    with rolled_back(engine) as session:
        shop["test_an_order_gets_its_receipt"](session)
    engine.dispose()
