"""Engines in processes that are forked: the child opens connections of its own.

A socket to the server that both the parent and a child use mixes up their answers.
"""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

from sqlalchemy import Engine

_engines: WeakSet[Engine] = WeakSet()


def dispose_after_fork(engine: Any) -> None:
    """Give an engine a new and empty pool in every process that is forked from now on.

    For an Engine or AsyncEngine that is used before a server with preloading, or multiprocessing,
    forks. The parent's connections stay open, and are the parent's alone. Of the engine only a weak
    reference is kept. A session or connection that is in use at the moment of the fork must not be
    used by the child.
    """
    _engines.add(getattr(engine, "sync_engine", engine))


def _begin_anew() -> None:
    for engine in list(_engines):
        # Closing them would tell the server that the parent's sessions are over.
        engine.dispose(close=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
