"""The page about testing: its projects' tests pass as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from sa_jobs import enqueue
from sa_jobs.models import metadata
from sa_jobs.testing import assert_enqueued

pytestmark = pytest.mark.acceptance

PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\S+\.py)\n(.*?)```", PAGE, re.DOTALL))


@pytest.mark.parametrize(
    ("directory", "passed"), [("", "2 passed"), ("flask", "1 passed"), ("asynchronous", "1 passed")]
)
def test_the_project_passes(directory: str, passed: str, tmp_path: Path, server_url: str) -> None:
    assert len(FILES) == PAGE.count("```python\n")
    for name, text in FILES.items():
        if str(Path(name).parent) == (directory or "."):
            (tmp_path / Path(name).name).write_text(text, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n", encoding="utf-8")

    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "SA_JOBS_TEST_DATABASE_URL": server_url},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )

    assert passed in ended.stdout, ended.stdout + ended.stderr


def test_a_failed_assertion_reads_as_the_page_shows() -> None:
    engine = create_engine("sqlite://")
    metadata.create_all(engine)
    with Session(engine) as session:
        enqueue(session, "charge", {"order_id": 7})
        with pytest.raises(AssertionError) as raised:
            assert_enqueued(session, "charge", {"order_id": 8})
    engine.dispose()
    (shown,) = re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL)
    assert shown == f"AssertionError: {raised.value}"
