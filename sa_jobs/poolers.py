"""Connection poolers, such as PgBouncer, and what must not be done through one.

In transaction mode a pooler gives each transaction to whichever of its connections to the server is
free. What belongs to a session there, a setting, a prepared statement, a LISTEN, an advisory lock,
stays behind for somebody else.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Engine, event, func, select

NO_TRANSACTIONS = (
    "the database is behind a connection pooler in statement mode, which allows no transactions: "
    "set the pooler to transaction mode, or name the server itself"
)

_NOTE = "sa_jobs_pooled"


def avoid_prepared_statements(engine: Engine) -> None:
    """Let an engine's new connections prepare no statements on the server if they are pooled.

    psycopg names them by a count of its own: through a pooler it meets the statements of other
    clients under the same names.
    """
    event.listen(engine, "connect", _opened)


def is_pooled(connection: Connection) -> bool:
    """Return whether a pooler stands between this connection and the server.

    Poolers tell their clients a process id of their own making. False where a driver does not tell
    the one that it was told.
    """
    noted: bool | None = connection.info.get(_NOTE)
    if noted is None:
        return _differs(connection.connection.driver_connection, server_process(connection))
    return noted


def prepares_statements(connection: Connection) -> bool:
    """Return whether psycopg prepares on the server what this connection executes often."""
    return getattr(connection.connection.driver_connection, "prepare_threshold", None) is not None


def is_shared(connection: Connection, other: Connection, looks: int = 10) -> bool:
    """Return whether a connection was seen to change its server process, or to be in another's.

    So it is with one in autocommit mode through a pooler in transaction mode, if the pool is such
    that it shows within so many looks.
    """
    process = server_process(connection)
    for _ in range(looks):
        if server_process(other) == process or server_process(connection) != process:
            return True
    return False


def forbids_transactions(error: BaseException) -> bool:
    """Return whether this is what PgBouncer in statement mode answers to BEGIN."""
    # By its words too, since PgBouncer has one SQLSTATE for whatever it refuses.
    state = getattr(getattr(error, "orig", error), "sqlstate", None)
    return state == "08P01" and "not allowed in statement pooling mode" in str(error)


def server_process(connection: Connection) -> int:
    """Return the id of the server process that this statement ran in."""
    return int(connection.execute(select(func.pg_backend_pid())).scalar_one())


def _opened(connection: Any, record: Any) -> None:
    try:
        cursor = connection.cursor()
        try:
            cursor.execute("SELECT pg_backend_pid()")
            pooled = _differs(record.driver_connection, cursor.fetchone()[0])
        finally:
            cursor.close()
    finally:
        # Not left to the garbage collector where the answer is lost half-way.
        connection.rollback()
    record.info[_NOTE] = pooled
    if pooled:
        record.driver_connection.prepare_threshold = None


def _differs(raw: Any, process: int) -> bool:
    if hasattr(raw, "get_server_pid"):  # asyncpg
        told = raw.get_server_pid()
    else:
        told = getattr(getattr(raw, "info", None), "backend_pid", None)
    return told is not None and told != process
