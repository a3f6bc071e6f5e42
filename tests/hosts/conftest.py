"""Fixtures of the tests on whole host applications."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.hosts.application import PLAIN, Host, Layout
from tests.hosts.environments import Environments
from tests.support.postgres import create_database, drop_database

MakeHost = Callable[..., Host]


@pytest.fixture(scope="session")
def environments(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Environments:
    """The environments of the hosts, which the processes of pytest-xdist share."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    assert pytestconfig.cache is not None
    return Environments(shared, pytestconfig.cache.mkdir("hosts"))


@pytest.fixture
def another_database(server_url: str) -> Iterator[str]:
    """The URL of a second new and empty database."""
    name = f"sa_jobs_test_{uuid4().hex}"
    try:
        yield create_database(server_url, name)
    finally:
        drop_database(server_url, name)


@pytest.fixture
def make_host(tmp_path: Path, environments: Environments, empty_database: str) -> MakeHost:
    """Make a host application on the empty database, or another one that is given."""

    def make(layout: Layout = PLAIN, url: str | None = None, **options: Any) -> Host:
        options.setdefault("environment", environments.get())
        return Host(tmp_path / "host", url=url or empty_database, layout=layout, **options)

    return make
