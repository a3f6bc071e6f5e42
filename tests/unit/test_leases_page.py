"""The page about leases names the defaults that the worker has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from sa_jobs import Worker

PAGE = Path(__file__).parents[2] / "docs" / "leases.md"


def test_the_defaults_on_the_page_are_the_workers() -> None:
    rows = re.findall(r"\| `--(\w+)` \| `(\w+)` \| ([\d.]+) s \|", PAGE.read_text(encoding="utf-8"))
    parameters = inspect.signature(Worker).parameters
    assert len(rows) == 6
    for option, argument, seconds in rows:
        assert option == argument
        assert parameters[argument].default == float(seconds), argument
