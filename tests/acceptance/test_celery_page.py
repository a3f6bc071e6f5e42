"""The page for those who come from Celery or RQ: its Python blocks and its command run."""

from __future__ import annotations

import datetime as dt
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session

from sa_jobs.cli import main
from tests.support.running import run_all

pytestmark = pytest.mark.acceptance

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "coming-from-celery.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    module: dict[str, Any] = {"__name__": "celery_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/coming-from-celery.md", "exec", dont_inherit=True), module)
    return module


@pytest.fixture
def host(page: dict[str, Any], empty_database: str) -> Iterator[Engine]:
    engine = create_engine(empty_database)
    page["Base"].metadata.create_all(engine)
    yield engine
    engine.dispose()


def test_a_receipt_is_sent_retried_or_given_up(page: dict[str, Any], host: Engine) -> None:
    with Session(host) as session:
        sent = page["bill"](session, "a@example.org")
        busy = page["bill"](session, "a@example.busy")
        without = page["bill"](session, None)
    run_all(host, page["jobs"])

    with Session(host) as session:
        mapped = page["jobs"].tables.Job
        found = {job.payload["invoice_id"]: job for job in session.scalars(select(mapped))}
        assert found[sent].status == "done"
        assert (found[busy].status, found[busy].last_error) == ("ready", "greylisted")
        assert found[busy].run_at - found[busy].created_at > dt.timedelta(minutes=4)
        assert (found[without].status, found[without].attempts) == ("dead", 1)
        assert session.get_one(page["Invoice"], sent).receipts == 1


def test_what_takes_the_place_of_chains_chords_and_results(
    page: dict[str, Any], host: Engine
) -> None:
    with Session(host) as session, session.begin():
        fetched = page["jobs"].enqueue(session, "fetch_report", {"day": dt.date(2030, 1, 1)}).id
        gallery = page["upload"](session, ["a.png", "b.png", "c.png"])
        invoice = page["Invoice"](email="a@example.org")
        session.add(invoice)
        session.flush()
        reminder = page["remind"](session, invoice.id)
    run_all(host, page["jobs"])

    with Session(host) as session:
        assert page["state"](session, fetched) == ("done", None)
        assert page["state"](session, reminder.id) == ("done", None)
        mapped = page["jobs"].tables.Job
        rendered = session.scalars(select(mapped).where(mapped.handler == "render_report")).one()
        assert page["state"](session, rendered.id) == ("done", "report-2030.pdf")
        assert session.get_one(page["Gallery"], gallery).published is True
        published = session.scalars(select(mapped).where(mapped.handler == "publish")).all()
        assert len(published) == 1


def test_the_command_for_cron_adds_one_job_that_the_handler_takes(
    page: dict[str, Any],
    host: Engine,
    empty_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SA_JOBS_DATABASE_URL", empty_database)
    (line,) = re.findall(r"```console\n\$ sa-jobs (.*?)\n```", PAGE)
    for _ in range(2):
        assert main(shlex.split(line)) == 0
    run_all(host, page["jobs"])

    with Session(host) as session:
        mapped = page["jobs"].tables.Job
        jobs = session.scalars(select(mapped).order_by(mapped.id)).all()
        assert [job.status for job in jobs] == ["done", "done"]
        assert jobs[1].result == "report-2030.pdf"


def test_links_lead_somewhere() -> None:
    for name in re.findall(r"\]\(([\w-]+\.md)[^)]*\)", PAGE):
        assert (DOCS / name).is_file(), name
