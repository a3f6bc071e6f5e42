"""The gates through which enqueues notify: seen from outside, and held open as a worker does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Engine, NullPool, create_engine, text

from sa_jobs import presence
from sa_jobs.models import DEFAULT_TABLES, Tables
from tests.support.waiting import wait_until

# All advisory locks but those of sweeps; a session has no name of ours through a pooler.
_OPEN = text("""
    SELECT pid FROM pg_locks JOIN pg_database ON pg_database.oid = database
    WHERE datname = current_database() AND locktype = 'advisory' AND mode = 'ExclusiveLock'
    AND granted AND classid <> :sweeps
""").bindparams(sweeps=int.from_bytes(b"swp", "big"))


def holders(engine: Engine) -> list[int]:
    """Return the server process that holds each open gate."""
    with engine.connect() as connection:
        return list(connection.execute(_OPEN).scalars())


def open_gates(engine: Engine) -> int:
    """Return how many gates workers hold open."""
    return len(holders(engine))


def wait_until_asleep(engine: Engine, gates: int = 1) -> None:
    """Wait until workers sleep, which hold so many gates open."""
    wait_until(lambda: open_gates(engine) == gates, "the worker sleeps")


@contextmanager
def gates_held_open(url: str, *queues: str, tables: Tables = DEFAULT_TABLES) -> Iterator[None]:
    """Let enqueues on these queues notify, as if a worker slept."""
    engine = create_engine(url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        opened = connection.execute(presence.open_gates(tables), {"queues": list(queues)}).all()
        assert {tuple(row) for row in opened} == {(queue, presence.SELF) for queue in queues}
        yield
    engine.dispose()
