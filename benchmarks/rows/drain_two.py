"""Drain no-op jobs with two worker processes; the target is a peer's, see `peers`."""

from __future__ import annotations

from benchmarks.figures import Result
from benchmarks.rows import drain
from benchmarks.server import Server

Options = drain.Options
QUICK = drain.QUICK


def measure(server: Server, options: Options) -> Result:
    return drain.with_workers(server, options, 2, None)
