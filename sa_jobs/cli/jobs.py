"""`sa-jobs enqueue`, `list`, `show`, `retry`, `cancel`: single jobs."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import sys
from collections.abc import Callable
from typing import Any

import click
from sqlalchemy import Connection

from sa_jobs import lookup
from sa_jobs.cli.database import Place, place_options
from sa_jobs.cli.invocation import was_given
from sa_jobs.cli.output import (
    JsonText,
    escaped,
    escaped_lines,
    print_json,
    print_line,
    print_table,
    report,
    say,
    shown,
)
from sa_jobs.cli.worker import check_seconds
from sa_jobs.enqueue import cancel as cancel_job
from sa_jobs.enqueue import enqueue as enqueue_job
from sa_jobs.enqueue import retry as retry_job
from sa_jobs.errors import SaJobsError
from sa_jobs.job_options import DEFAULT_MAX_ATTEMPTS, DEFAULT_QUEUE
from sa_jobs.limits import MAX_ATTEMPTS, MAX_PAYLOAD_BYTES, MAX_PRIORITY, MIN_PRIORITY
from sa_jobs.models import STATES, Tables

ID = click.IntRange(-(2**63), 2**63 - 1)
# JSON may be written with space and escapes: more than this is no payload, whatever it is.
MAX_READ_BYTES = 16 * MAX_PAYLOAD_BYTES


def _read_payload(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> dict[str, Any] | None:
    if value is None:
        return None
    text = _read_standard_input(ctx, param) if value == "-" else value
    try:
        payload = json.loads(text, object_pairs_hook=_object)
    except _TwiceError as error:
        raise click.BadParameter(str(error), ctx, param) from None
    except (ValueError, RecursionError) as error:
        # The text itself is not repeated: it may hold what belongs in no log.
        raise click.BadParameter(f"not JSON: {error}", ctx, param) from None
    if not isinstance(payload, dict):
        raise click.BadParameter(
            "it must be a JSON object, whose keys are the handler's parameters", ctx, param
        )
    return payload


class _TwiceError(Exception):
    """A JSON object has a key twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python would keep the last one and say nothing.
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _TwiceError(f"an object has the key {key[:40]!r} twice")
        found[key] = value
    return found


def _read_standard_input(ctx: click.Context, param: click.Parameter) -> str:
    """Return the text of standard input, which is UTF-8 as all JSON, whatever the locale."""
    if sys.stdin is None:
        raise click.BadParameter("standard input is closed", ctx, param)
    try:
        data = sys.stdin.buffer.read(MAX_READ_BYTES + 1)
        if len(data) > MAX_READ_BYTES:
            raise click.BadParameter(
                f"standard input holds more than {MAX_READ_BYTES} bytes", ctx, param
            )
        return data.decode("utf-8-sig")
    except OSError as error:
        raise click.BadParameter(
            f"cannot read standard input ({error.strerror or error})", ctx, param
        ) from None
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"standard input is not UTF-8 (byte {error.start + 1})", ctx, param
        ) from None


def _read_time(ctx: click.Context, param: click.Parameter, value: str | None) -> dt.datetime | None:
    if value is None:
        return None
    text = value[:-1] + "+00:00" if value.endswith(("Z", "z")) else value
    try:
        moment = dt.datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(
            f"{value!r} is not a time like 2030-01-31T09:00:00+01:00", ctx, param
        ) from None
    if moment.utcoffset() is None:
        raise click.BadParameter(
            f"{value!r} has no offset; add +01:00, for example, or Z", ctx, param
        )
    return moment


@click.command()
@click.argument("handler")
@click.option(
    "--payload",
    callback=_read_payload,
    metavar="JSON",
    help="The handler's arguments as a JSON object; - reads it from standard input.",
)
@click.option("--queue", default=DEFAULT_QUEUE, show_default=True)
@click.option(
    "--priority",
    type=click.IntRange(MIN_PRIORITY, MAX_PRIORITY),
    default=0,
    show_default=True,
    help="Higher runs first.",
)
@click.option(
    "--delay", type=float, callback=check_seconds, metavar="SECONDS", help="Run it that much later."
)
@click.option(
    "--run-at", callback=_read_time, metavar="TIME", help="Run it then: ISO 8601 with offset."
)
@click.option("--idempotency-key", metavar="KEY", help="Add no second job with this key.")
@click.option("--unique-key", metavar="KEY", help="Add no second job that waits or runs.")
@click.option("--tenant")
@click.option(
    "--max-attempts",
    type=click.IntRange(1, MAX_ATTEMPTS),
    default=DEFAULT_MAX_ATTEMPTS,
    show_default=True,
)
@place_options
def enqueue(
    place: Place,
    handler: str,
    payload: dict[str, Any] | None,
    run_at: dt.datetime | None,
    **options: Any,
) -> None:
    """Add a job for HANDLER and print its id.

    Only an application's own command, such as `flask jobs enqueue`, knows the handlers: there, the
    name and the payload's keys are checked against them, and the handler's queue, priority and
    attempts are the defaults. Where a key is taken, nothing is added and the existing job's id is
    printed.
    """
    if run_at is not None and options["delay"] is not None:
        raise click.UsageError("give --run-at or --delay, not both")
    tables, jobs = place.tables, place.jobs
    with place.writing() as connection, connection.begin():
        if jobs is None:
            added = enqueue_job(
                connection, handler, payload, run_at=run_at, tables=tables, **options
            )
        else:
            given = {name: value for name, value in options.items() if was_given(name)}
            added = jobs.enqueue(connection, handler, payload, run_at=run_at, **given)
    if not added.created:
        say("nothing was added: this job has the key already")
        report(str(added.id), meaning=f"it was job {added.id}")
    else:
        report(str(added.id), meaning=f"job {added.id} was added")


@click.command(name="list")
@click.option("--status", type=click.Choice(STATES))
@click.option("--queue")
@click.option("--handler")
@click.option("--limit", type=click.IntRange(min=1, max=10_000), default=20, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@place_options
def list_(place: Place, as_json: bool, **conditions: Any) -> None:
    """List jobs, the newest first.

    Ready jobs come in the order in which their queue runs them. Payloads are not shown.
    """
    tables = place.tables
    with place.reading() as connection:
        rows = lookup.list_jobs(connection, tables=tables, **conditions)
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
    elif not rows:
        print_line("no jobs")
    else:
        print_table(
            ("id", "status", "queue", "handler", "attempts", "run at", "error"),
            (
                (
                    row.id,
                    row.status,
                    row.queue,
                    row.handler,
                    f"{row.attempts}/{row.max_attempts}",
                    row.run_at,
                    row.error,
                )
                for row in rows
            ),
            right=("id", "attempts"),
        )


@click.command()
@click.argument("job_id", metavar="ID", type=ID)
@click.option("--payload", "with_contents", is_flag=True, help="Show payload, result and meta too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document.")
@place_options
def show(place: Place, job_id: int, with_contents: bool, as_json: bool) -> None:
    """Show one job and its failed attempts.

    The payload, the result and the handler's notes may hold personal data: they are shown only
    with --payload.
    """
    tables = place.tables
    with place.reading() as connection:
        job = lookup.find_job(connection, job_id, tables=tables)
        failures = lookup.failures_of(connection, job_id, tables=tables)
        contents = lookup.contents_of(connection, job_id, tables=tables) if with_contents else None
    if job is None:
        raise SaJobsError(f"there is no job {job_id}")
    if as_json:
        _show_json(job, failures, contents)
    else:
        _show(job, failures, contents)


def _show_json(
    job: lookup.JobRow, failures: list[lookup.FailureRow], contents: lookup.Contents | None
) -> None:
    document = dataclasses.asdict(job)
    if contents is not None:
        for name, text in dataclasses.asdict(contents).items():
            document[name] = None if text is None else JsonText(text)
    document["failures"] = [dataclasses.asdict(failure) for failure in failures]
    print_json(document)


def _show(
    job: lookup.JobRow, failures: list[lookup.FailureRow], contents: lookup.Contents | None
) -> None:
    fields = dataclasses.asdict(job)
    if contents is not None:
        fields |= dataclasses.asdict(contents)
    width = max(map(len, fields))
    for name, value in fields.items():
        if value is not None:
            print_line(f"{name.replace('_', ' '):{width}}  {shown(value)}")
    for failure in failures:
        print_line()
        worker = f" on {failure.worker}" if failure.worker else ""
        print_line(
            f"attempt {failure.attempt} failed at {shown(failure.failed_at)}{escaped(worker)}"
        )
        for line in escaped_lines(failure.error):
            print_line(f"    {line}")


@click.command()
@click.argument("job_ids", metavar="ID...", type=ID, nargs=-1, required=True)
@place_options
def retry(place: Place, job_ids: tuple[int, ...]) -> int:
    """Make dead or cancelled jobs ready again, with all their attempts."""
    return _each(place, job_ids, _retry)


@click.command()
@click.argument("job_ids", metavar="ID...", type=ID, nargs=-1, required=True)
@place_options
def cancel(place: Place, job_ids: tuple[int, ...]) -> int:
    """Cancel ready jobs, and ask running ones to stop."""
    return _each(place, job_ids, _cancel)


def _retry(connection: Connection, job_id: int, tables: Tables) -> tuple[bool, str]:
    came_of_it = retry_job(connection, job_id, tables=tables)
    return came_of_it == "ready", {
        "ready": "ready again",
        "refused": "not retried: only a dead or cancelled job can be",
        "duplicate": "not retried: another job with its unique key waits or runs",
        "missing": "there is no such job",
    }[came_of_it]


def _cancel(connection: Connection, job_id: int, tables: Tables) -> tuple[bool, str]:
    came_of_it = cancel_job(connection, job_id, tables=tables)
    return came_of_it in ("cancelled", "requested"), {
        "cancelled": "cancelled",
        "requested": "is running; its handler is told to stop with the next heartbeat",
        "final": "not cancelled: it has ended already",
        "missing": "there is no such job",
    }[came_of_it]


def _each(
    place: Place,
    job_ids: tuple[int, ...],
    action: Callable[[Connection, int, Tables], tuple[bool, str]],
) -> int:
    """Do the same with every job, each in a transaction of its own, and say what came of it."""
    tables = place.tables
    all_done = True
    with place.writing() as connection:
        for job_id in job_ids:
            with connection.begin():
                done, text = action(connection, job_id, tables)
            report(f"{job_id}: {text}", meaning=f"{job_id}: {text}; no job after it was looked at")
            all_done = all_done and done
    return 0 if all_done else 1
