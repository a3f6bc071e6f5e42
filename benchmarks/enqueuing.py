"""One job per transaction, as an application does it, and the same by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.orm import Session

from benchmarks.server import Database
from sa_jobs import enqueue
from sa_jobs.models import DEFAULT_TABLES

_jobs = DEFAULT_TABLES.jobs
_PREBUILT = insert(_jobs).returning(_jobs.c.id)

Add = Callable[[Any, int], object]


def by_sa_jobs(caller: Session | Connection, job: int) -> int:
    """Add a job with the public function."""
    return enqueue(caller, "noop", {"i": job}).id


def by_prebuilt_insert(caller: Session | Connection, job: int) -> object:
    """Add a job with a Core INSERT that was built once, and return its id as enqueue does."""
    values = {"queue": "default", "handler": "noop", "payload": {"i": job}}
    return caller.execute(_PREBUILT, values).scalar_one()


def by_insert(caller: Session | Connection, job: int) -> object:
    """Add a job with a Core INSERT as one writes it without a thought."""
    statement = insert(_jobs).values(queue="default", handler="noop", payload={"i": job})
    return caller.execute(statement.returning(_jobs.c.id)).scalar_one()


def session_rate(engine: Engine, transactions: int, add: Add) -> float:
    """Return the jobs per second with a new Session for each."""
    began = time.perf_counter()
    for job in range(transactions):
        with Session(engine) as session:
            add(session, job)
            session.commit()
    return transactions / (time.perf_counter() - began)


def connection_rate(engine: Engine, transactions: int, add: Add) -> float:
    """Return the jobs per second with a transaction on a pooled Connection for each."""
    began = time.perf_counter()
    for job in range(transactions):
        with engine.begin() as connection:
            add(connection, job)
    return transactions / (time.perf_counter() - began)


def bare_rate(database: Database, transactions: int, statement: str) -> float:
    """Return the executions per second of a statement through psycopg, each committed."""
    with database.connect() as connection:
        began = time.perf_counter()
        for _ in range(transactions):
            connection.execute(statement)
        return transactions / (time.perf_counter() - began)
