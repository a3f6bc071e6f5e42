"""Rows that are in the table before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, func, literal_column

from benchmarks.server import Database

_FINISHED = """\
INSERT INTO sa_jobs (
    queue, handler, payload, status, attempts, claim_no, locked_by,
    run_at, created_at, claimed_at, updated_at, finished_at
)
SELECT 'default', 'noop', jsonb_build_object('i', i), 'done', 1, 1, 'host:1:00000000',
    ended, ended, ended, ended, ended
FROM generate_series(1, %s) AS i, LATERAL (SELECT now() - i * interval '1 ms') AS at (ended)"""


def finished(database: Database, rows: int) -> None:
    """Add finished jobs; no operation of the package does that without running them."""
    if rows:
        database.execute(_FINISHED, [rows])


def scheduled(database: Database, rows: int) -> None:
    """Add jobs for tomorrow, spread over four priorities."""

    def options(number: ColumnElement[int]) -> Sequence[ColumnElement[Any]]:
        tomorrow = func.now() + literal_column("interval '1 day'")
        return [
            (number % 4).label("sa_jobs_priority"),
            (tomorrow + number * literal_column("interval '1 ms'")).label("sa_jobs_run_at"),
        ]

    database.fill(rows, options=options)
