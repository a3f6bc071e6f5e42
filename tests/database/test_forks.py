"""Engines that were used before a fork: the child has connections of its own."""

from __future__ import annotations

import gc
import os
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs import dispose_after_fork, enqueue, forks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")


def backend(engine: Engine) -> int:
    """Return the server process of a connection of the pool."""
    with engine.connect() as connection:
        return int(connection.execute(text("SELECT pg_backend_pid()")).scalar_one())


def in_child(call: Callable[[], str]) -> int:
    """Fork, let the child write what the call returns, and return where that can be read."""
    reading, writing = os.pipe()
    # Python warns of a fork where other threads run, which here are the test's own.
    pid = os.fork()
    if pid == 0:
        try:
            said = call()
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    return reading


def all_of(reading: int) -> str:
    with os.fdopen(reading) as file:
        said = file.read()
    os.wait()
    return said


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_no_child_uses_a_connection_of_the_parent(engine: Engine, database_url: str) -> None:
    own = create_engine(database_url, pool_size=1, max_overflow=0)
    dispose_after_fork(own)
    parents = backend(own)

    def enqueue_some() -> str:
        pid = backend(own)
        for number in range(50):
            with Session(own) as session, session.begin():
                enqueue(session, "send", {"number": number})
        assert backend(own) == pid
        own.dispose()
        return str(pid)

    def collect_garbage() -> str:
        gc.collect()
        return "gone"

    early = in_child(collect_garbage)
    children = [in_child(enqueue_some) for _ in range(4)]
    assert backend(own) == parents
    said = [all_of(child) for child in children]
    assert all_of(early) == "gone"

    assert all(line.isdigit() for line in said), said
    assert len({*map(int, said), parents}) == 5
    assert backend(own) == parents
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one() == 200
    own.dispose()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_an_asynchronous_engine_has_a_new_pool_too(database_url: str) -> None:
    asyncio = pytest.importorskip("sqlalchemy.ext.asyncio")
    engine = asyncio.create_async_engine(database_url)
    dispose_after_fork(engine)
    before = engine.sync_engine.pool

    child = in_child(lambda: str(engine.sync_engine.pool is before))

    assert all_of(child) == "False"
    assert engine.sync_engine.pool is before


def test_an_engine_is_not_kept_for_it(database_url: str) -> None:
    engine: Any = create_engine(database_url)
    dispose_after_fork(engine)
    dispose_after_fork(engine)
    gone = weakref.ref(engine)
    assert engine in forks._engines
    del engine
    gc.collect()

    assert gone() is None
