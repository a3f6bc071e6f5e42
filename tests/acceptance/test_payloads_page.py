"""The page about typed payloads: its Python block and its query run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from sa_jobs import enqueue_many
from sa_jobs.models import Job
from tests.support.running import run_all

pytestmark = pytest.mark.acceptance

PAGE = (Path(__file__).parents[2] / "docs" / "payloads.md").read_text(encoding="utf-8")


def test_the_order_is_confirmed(engine: Engine) -> None:
    module: dict[str, Any] = {"__name__": "payloads_page"}
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(block, "docs/payloads.md", "exec", dont_inherit=True), module)
    with Session(engine) as session, session.begin():
        module["place"](session)
    run_all(engine, module["jobs"])

    with Session(engine) as session:
        job = session.scalars(select(Job)).one()
        assert (job.status, job.result) == ("done", f"{job.created_at:%Y}: 4.50")
        assert job.payload["order"]["items"] == [{"sku": "tea", "price": "4.50"}]


def test_the_query_finds_jobs_that_hold_a_key(engine: Engine) -> None:
    (query,) = re.findall(r"`(SELECT .*?)`", PAGE, re.DOTALL)
    with Session(engine) as session:
        enqueue_many(session, "confirm", [{"old_name": 1}, {"order": {}}])
        assert session.scalar(text(query)) == 1
