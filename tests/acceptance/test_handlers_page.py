"""The page about handlers: its Python blocks run as they stand, and its figures are the code's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs.context import MAX_PROGRESS_BYTES
from sa_jobs.limits import MAX_ERROR_BYTES, MAX_PAYLOAD_BYTES
from tests.support.looking import job
from tests.support.running import run_all

pytestmark = pytest.mark.acceptance

PAGE = (Path(__file__).parents[2] / "docs" / "handlers.md").read_text(encoding="utf-8")


def test_the_handlers_run(engine: Engine) -> None:
    module: dict[str, Any] = {"__name__": "handlers_page"}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(block, "docs/handlers.md", "exec", dont_inherit=True), module)
    with Session(engine) as session, session.begin():
        closed = module["jobs"].enqueue(session, "close_account", {"account_id": 7}).id
        paid = module["jobs"].enqueue(session, "pay_invoice", {"invoice_id": 8}).id
    run_all(engine, module["jobs"])

    assert (job(engine, closed).status, job(engine, closed).result) == ("done", {"closed": 7})
    assert job(engine, paid).status == "done"


@pytest.mark.parametrize("limit", [MAX_ERROR_BYTES, MAX_PAYLOAD_BYTES, MAX_PROGRESS_BYTES])
def test_the_limits_are_those_of_the_code(limit: int) -> None:
    assert f"{limit:,} bytes".replace(",", " ") in PAGE
