"""`sa-jobs status`: what to watch, at one look."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import click
from sqlalchemy import Connection

from sa_jobs import stats
from sa_jobs.cli.database import Place, place_options
from sa_jobs.cli.output import escaped, print_json, print_line, print_table, shown_age
from sa_jobs.models import Tables


@dataclass(frozen=True)
class _Status:
    queues: list[stats.QueueDepth]
    dead: stats.Count
    expired_leases: stats.Count
    workers: list[stats.LiveWorker]
    warnings: list[str]


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@place_options
def status(place: Place, as_json: bool) -> None:
    """Show queues, workers, and jobs that nobody takes.

    Counting stops at 10000 of a kind, which is shown as 10000+.
    """
    with place.reading() as connection:
        found = _look(connection, place.tables)
    if as_json:
        print_json(dataclasses.asdict(found))
    else:
        _print(found)


def _look(connection: Connection, tables: Tables) -> _Status:
    workers = stats.live_workers(connection, tables=tables)
    missing = stats.unserved(stats.due_jobs(connection, tables=tables), workers)
    expired = stats.expired_leases(connection, tables=tables)
    warnings = [str(entry) for entry in missing]
    if expired.value and not workers:
        noun = "job" if expired == stats.Count(1) else "jobs"
        warnings.append(
            f"{expired} running {noun} of lost workers, and no live worker to take them back"
        )
    return _Status(
        queues=stats.queue_depths(connection, tables=tables),
        dead=stats.dead_jobs(connection, tables=tables),
        expired_leases=expired,
        workers=workers,
        warnings=warnings,
    )


def _print(found: _Status) -> None:
    numbers = ("ready", "scheduled", "running", "oldest ready")
    if found.queues:
        print_table(
            ("queue", *numbers),
            (
                (
                    depth.queue,
                    depth.ready,
                    depth.scheduled,
                    depth.running,
                    shown_age(depth.oldest_ready_seconds),
                )
                for depth in found.queues
            ),
            right=numbers,
        )
    else:
        print_line("no ready or running jobs")
    if len(found.queues) >= stats.MAX_QUEUES:
        print_line(f"(only the first {stats.MAX_QUEUES} queues are shown)")
    print_line()
    print_line(f"dead jobs: {found.dead}, expired leases: {found.expired_leases}")
    print_line()
    if found.workers:
        print_table(
            ("worker", "pid", "queues", "running", "last heartbeat"),
            (
                (
                    live.host,
                    live.pid,
                    ", ".join(live.queues),
                    f"{live.running} of {live.concurrency}",
                    f"{shown_age(live.heartbeat_age_seconds)} ago",
                )
                for live in found.workers
            ),
            right=("pid", "running", "last heartbeat"),
        )
    else:
        print_line("no live workers")
    if found.warnings:
        print_line()
    for warning in found.warnings:
        print_line(f"warning: {escaped(warning)}")
