"""Modules that need an extra say which one, where it is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize("extra", ["flask", "opentelemetry"])
def test_a_module_names_the_extra_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, extra: str
) -> None:
    monkeypatch.delitem(sys.modules, f"sa_jobs.{extra}", raising=False)
    monkeypatch.setitem(sys.modules, extra, None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install \"sa-jobs\[{extra}\]\"") as raised:
        importlib.import_module(f"sa_jobs.{extra}")
    assert raised.value.name == extra
