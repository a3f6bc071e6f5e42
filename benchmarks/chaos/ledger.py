"""What happened, as those who did it saw it, in tables on a server that no fault touches.

Each row is written in a transaction of its own, before the thing that it is about can happen. So
every start of a handler counts, also one whose job's transaction is lost.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    DateTime,
    Executable,
    MetaData,
    Table,
    Text,
    create_engine,
    func,
    insert,
    update,
)

from sa_jobs import JobContext

VARIABLE = "SA_JOBS_CHAOS_LEDGER_URL"
"""The environment variable that names the ledger's database to worker processes."""

metadata = MetaData()


def _at() -> Column[object]:
    return Column(
        "at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()
    )


starts = Table(
    "starts",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    Column("attempt", BigInteger, nullable=False),
    Column("claim_no", BigInteger, nullable=False),
    Column("pid", BigInteger, nullable=False),
    _at(),
)
transactions = Table(
    "transactions",
    metadata,
    Column("token", Text, primary_key=True),
    # committed, rolled back, or unknown: also while there is none yet.
    Column("outcome", Text, nullable=False, server_default="unknown"),
    # What the transaction was told of its jobs.
    Column("job_ids", ARRAY(BigInteger), nullable=False, server_default="{}"),
    _at(),
)
requests = Table(
    "requests",
    metadata,
    Column("job_id", BigInteger, nullable=False),
    # cancel or retry.
    Column("what", Text, nullable=False),
    _at(),
)


class Ledger:
    """Writes to the tables; safe from any thread."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url, isolation_level="AUTOCOMMIT", max_overflow=50)

    def handler_starts(self, context: JobContext) -> None:
        """Note that the handler of a claim begins."""
        job = context.job
        self._write(
            insert(starts).values(
                job_id=job.id, attempt=job.attempts, claim_no=job.claim_no, pid=os.getpid()
            )
        )

    def transaction_begins(self, token: str) -> None:
        """Note that the transaction which will insert this order begins."""
        self._write(insert(transactions).values(token=token))

    def transaction_ends(self, token: str, outcome: str, job_ids: Sequence[int]) -> None:
        """Note what a transaction's end was, as far as its process was told."""
        self._write(
            update(transactions)
            .where(transactions.c.token == token)
            .values(outcome=outcome, job_ids=list(job_ids))
        )

    def request(self, job_id: int, what: str) -> None:
        """Note that somebody is about to cancel or retry a job."""
        self._write(insert(requests).values(job_id=job_id, what=what))

    def _write(self, statement: Executable) -> None:
        with self._engine.connect() as connection:
            connection.execute(statement)
