"""Engines that were used before a fork: the child has connections of its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text

from sa_jobs import dispose_after_fork, forks
from tests.support.commands import ROOT

# A process of its own, since pytest's has threads, which a fork leaves behind.
PROGRAM = """
import gc, json, os, sys, traceback
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session
from sa_jobs import dispose_after_fork, enqueue

engine = create_engine(sys.argv[1], pool_size=1, max_overflow=0)
asynchronous = create_async_engine(sys.argv[1])
dispose_after_fork(engine)
dispose_after_fork(asynchronous)
pool = asynchronous.sync_engine.pool


def backend():
    with engine.connect() as connection:
        return connection.execute(text("SELECT pg_backend_pid()")).scalar_one()


def enqueue_some():
    pid = backend()
    for number in range(200):
        with Session(engine) as session, session.begin():
            enqueue(session, "send", {"number": number})
    assert backend() == pid
    assert asynchronous.sync_engine.pool is not pool
    engine.dispose()
    return pid


def in_child(call):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = call()
        except BaseException:
            said = traceback.format_exc()
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.close(writing)
    return pid, open(reading)


before = backend()
# The first one leaves at once, with all that it has inherited.
children = [in_child(call) for call in (gc.collect, *[enqueue_some] * 4)]
os.waitpid(children[0][0], 0)
meanwhile = backend()
said = [json.load(file) for pid, file in children]
for pid, file in children[1:]:
    os.waitpid(pid, 0)
assert asynchronous.sync_engine.pool is pool
print(json.dumps({"parent": [before, meanwhile, backend()], "children": said[1:]}))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_no_child_uses_a_connection_of_the_parent(engine: Engine, database_url: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, database_url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert all(isinstance(pid, int) for pid in said["children"]), said
    assert len(set(said["parent"])) == 1
    assert len({*said["children"], *said["parent"]}) == 5
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one() == 800


def test_an_engine_is_not_kept_for_it(database_url: str) -> None:
    engine: Any = create_engine(database_url)
    dispose_after_fork(engine)
    dispose_after_fork(engine)
    gone = weakref.ref(engine)
    assert engine in forks._engines
    del engine
    gc.collect()

    assert gone() is None
