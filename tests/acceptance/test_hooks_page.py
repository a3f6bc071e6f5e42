"""The page about hooks: its Python blocks run as they stand, with the real libraries they name."""

from __future__ import annotations

import contextvars
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sentry_sdk
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from sa_jobs import Jobs
from sa_jobs.meta import MAX_META_BYTES
from sa_jobs.worker.notices import LAST_CALLS_SECONDS
from tests.support.looking import job
from tests.support.running import run_all

pytestmark = pytest.mark.acceptance

PAGE = (Path(__file__).parents[2] / "docs" / "hooks.md").read_text(encoding="utf-8")


@pytest.fixture
def sent_to_sentry() -> Iterator[list[Any]]:
    """Events as Sentry's SDK would send them."""
    events: list[Any] = []

    def keep(event: Any, hint: Any) -> None:
        events.append(event)

    sentry_sdk.init(
        dsn="https://key@sentry.invalid/1", before_send=keep, default_integrations=False
    )
    yield events
    sentry_sdk.init()


def test_the_blocks_run(
    engine: Engine, sent_to_sentry: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    tenant: contextvars.ContextVar[str | None] = contextvars.ContextVar("tenant", default=None)
    module: dict[str, Any] = {"__name__": "hooks_page", "current_tenant": tenant, "engine": engine}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        # The page's first worker has nothing to do.
        code = block.replace(".run()", ".stop()")
        module.setdefault("jobs", with_one_handler(Jobs()))
        exec(compile(code, "docs/hooks.md", "exec", dont_inherit=True), module)
        with_one_handler(module["jobs"])
    jobs: Jobs = module["jobs"]
    seen: list[str] = []

    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        seen.append(module["request_id"].get())
        raise LookupError("no such invoice")

    module["request_id"].set("request 7")
    with Session(engine) as session, session.begin():
        one = jobs.enqueue(session, fails).id
    with caplog.at_level(logging.INFO, "sa_jobs"):
        run_all(engine, jobs, around=module["sentry_scope"])

    assert seen == ["request 7"]
    assert job(engine, one).meta["request_id"] == "request 7"
    [event] = sent_to_sentry
    assert event["exception"]["values"][-1]["value"] == "no such invoice"
    assert event["tags"]["job.handler"] == "fails"
    assert event["contexts"]["job"]["id"] == one
    [line] = [record for record in caplog.records if record.getMessage() == "job ended"]
    assert line.__dict__["end"] == "failed"
    assert line.__dict__["job_id"] == one
    assert line.__dict__["seconds"] >= 0
    assert f"job {one} is dead" in caplog.messages
    assert not [record for record in caplog.records if record.name == "sa_jobs.hooks"]


def with_one_handler(jobs: Jobs) -> Jobs:
    """Give a registry a handler, without which no worker is made."""
    if not len(jobs):
        jobs.handler("nothing")(lambda: None)
    return jobs


def test_the_figures_are_those_of_the_code() -> None:
    assert f"{MAX_META_BYTES:,} bytes".replace(",", " ") in PAGE
    assert f"up to {LAST_CALLS_SECONDS:g} s" in PAGE
