"""The server's time for claims, from pg_stat_statements (settings: TIMED_STATEMENTS)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.server import Database

# Whatever else a statement does, only a claim sets that column. Planning counts.
_CLAIMS = (
    "SELECT coalesce(sum(calls), 0)::bigint, coalesce(sum(rows), 0)::bigint,"
    " coalesce(sum(total_plan_time + total_exec_time), 0)::float8,"
    " coalesce(sum(shared_blks_hit + shared_blks_read), 0)::bigint"
    " FROM pg_stat_statements JOIN pg_database ON pg_database.oid = dbid"
    " WHERE datname = current_database() AND query ~ 'claimed_at *='"
)


@dataclass(frozen=True)
class Seen:
    """What all claims so far came to: calls, jobs claimed, milliseconds, pages."""

    calls: int
    jobs: int
    milliseconds: float
    pages: int


class ClaimTimes:
    """Watches the claims in a database, from now on."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute("SELECT pg_stat_statements_reset()")
        self._seen = [Seen(0, 0, 0.0, 0)]

    def look(self) -> None:
        """Note what the claims have come to."""
        self._seen.append(self.total())

    def total(self) -> Seen:
        """Return what all claims came to."""
        return Seen(*self._database.row(_CLAIMS))

    def curve(self) -> list[tuple[float, float]]:
        """Return the milliseconds per claim between two looks, by the jobs claimed so far."""
        return [
            (end.jobs, (end.milliseconds - start.milliseconds) / (end.calls - start.calls))
            for start, end in zip(self._seen, self._seen[1:], strict=False)
            # Not the empty claims before and after.
            if end.jobs > start.jobs and end.calls > start.calls
        ]
