"""docs/flask.md: its table of settings is the code's."""

from __future__ import annotations

import inspect
import re

import pytest

from sa_jobs import Worker
from tests.support.commands import ROOT

pytest.importorskip("flask")


def test_the_table_of_settings_is_whole_and_has_the_defaults() -> None:
    from sa_jobs.flask import setting_names

    page = (ROOT / "docs/flask.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(SA_JOBS_\w+)` \| `([^`]+)` \|", page, re.MULTILINE))
    parameters = inspect.signature(Worker).parameters
    names = setting_names()

    assert rows == {
        key: "None" if option == "listen_url" else repr(parameters[option].default)
        for key, option in names.items()
    }
