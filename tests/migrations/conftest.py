"""Fixtures of the tests of the migrations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, NullPool, create_engine

from sa_jobs.migrations import _steps
from sa_jobs.migrations._ddl import Target, applies, undoes
from sa_jobs.migrations._steps import Step
from tests.migrations.schema import DEFAULT, Host, Place
from tests.support.postgres import create_database, drop_database


@pytest.fixture
def another_database(server_url: str) -> Iterator[str]:
    """The URL of a second new and empty database."""
    name = f"sa_jobs_test_{uuid4().hex}"
    try:
        yield create_database(server_url, name)
    finally:
        drop_database(server_url, name)


@pytest.fixture
def empty_engine(empty_database: str) -> Engine:
    """An engine on the empty database that keeps no connections."""
    return create_engine(empty_database, poolclass=NullPool)


@pytest.fixture
def make_host(tmp_path: Path, empty_database: str) -> Callable[..., Host]:
    """Make a host application; on the empty database unless another is given."""

    def make(url: str | None = None, place: Place = DEFAULT) -> Host:
        return Host(tmp_path / f"host-{uuid4().hex}", url or empty_database, place)

    return make


@pytest.fixture
def second_step(second_step_later: Callable[[], Step]) -> Step:
    """A step after the ones of the package, which adds a column; gone after the test."""
    return second_step_later()


@pytest.fixture
def second_step_later(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Step]]:
    """Add that step when it is called: the next release of the package."""
    yield lambda: _add_step(monkeypatch)
    monkeypatch.undo()
    _steps.revisions.cache_clear()


def _add_step(monkeypatch: pytest.MonkeyPatch) -> Step:
    real = _steps._modules()
    before = real[-1].STEP.revision
    step = Step(
        f"sa_jobs_{len(real) + 1:04d}",
        before,
        phase="expand",
        min_client="0.1.0",
        released_in="0.2.0",
        summary="Add a column.",
    )

    @applies(step)
    def upgrade(target: Target) -> None:
        target.run(f"ALTER TABLE {target.table()} ADD COLUMN added bigint")

    @undoes(step)
    def downgrade(target: Target) -> None:
        target.run(f"ALTER TABLE {target.table()} DROP COLUMN added")

    module: Any = SimpleNamespace(STEP=step, upgrade=upgrade, downgrade=downgrade)
    monkeypatch.setattr(_steps, "_modules", lambda: (*real, module))
    _steps.revisions.cache_clear()
    return step
