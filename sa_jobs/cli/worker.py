"""`sa-jobs-worker`, also as `sa-jobs worker`."""

from __future__ import annotations

import atexit
import math
import random
import signal
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from typing import Any, TypeVar

import click
from sqlalchemy import URL

from sa_jobs import urls
from sa_jobs.cli.database import open_engine, url_option
from sa_jobs.cli.invocation import Application, Invocation, was_given
from sa_jobs.cli.loading import EndedEarly, load_target
from sa_jobs.cli.logs import configure_logging
from sa_jobs.handlers import Jobs
from sa_jobs.supervisor import Lifeline, Supervised, Supervisor
from sa_jobs.worker import Worker
from sa_jobs.worker.interruptions import STOP_SIGNALS
from sa_jobs.worker.options import MOST_SLOTS
from sa_jobs.worker.signals import run_to_the_end
from sa_jobs.worker.worker import (
    DEFAULT_ANSWER_SECONDS,
    DEFAULT_BATCH,
    DEFAULT_CONCURRENCY,
    DEFAULT_GRACE_SECONDS,
    DEFAULT_HEARTBEAT_SECONDS,
    DEFAULT_LEASE_SECONDS,
    DEFAULT_POLL_SECONDS,
    DEFAULT_SWEEP_SECONDS,
)

F = TypeVar("F", bound=Callable[..., Any])

MAX_PROCESSES = 1_000
LEVELS = ("debug", "info", "warning", "error")


def check_seconds(
    ctx: click.Context, param: click.Parameter, seconds: float | None
) -> float | None:
    """Return what an option says in seconds; what else it must be, the worker checks."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise click.BadParameter(f"{seconds} is not a number of seconds", ctx, param)
    return seconds


def _seconds_option(name: str, default: float, text: str) -> Callable[[F], F]:
    return click.option(
        f"--{name}",
        type=float,
        callback=check_seconds,
        default=default,
        show_default=True,
        help=text,
        metavar="SECONDS",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", metavar="MODULE:ATTR")
@click.option(
    "--queue",
    "queues",
    multiple=True,
    metavar="QUEUE",
    help="A queue to serve; may be given several times. Default: those of the handlers.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(1, MOST_SLOTS),
    default=DEFAULT_CONCURRENCY,
    show_default=True,
    help="How many jobs run at once.",
)
@click.option(
    "--processes",
    type=click.IntRange(1, MAX_PROCESSES),
    default=1,
    show_default=True,
    help="How many worker processes run, each with so many slots.",
)
@click.option(
    "--buffer",
    type=click.IntRange(0, MOST_SLOTS),
    default=0,
    show_default=True,
    help="How many jobs more are claimed ahead of a free slot.",
)
@click.option(
    "--batch",
    type=click.IntRange(1, MOST_SLOTS),
    default=DEFAULT_BATCH,
    show_default=True,
    help="How many jobs one statement claims or ends at most.",
)
@_seconds_option("lease", DEFAULT_LEASE_SECONDS, "How long a claim holds without a heartbeat.")
@_seconds_option("heartbeat", DEFAULT_HEARTBEAT_SECONDS, "How often the leases are renewed.")
@_seconds_option("poll", DEFAULT_POLL_SECONDS, "How often an idle worker looks for jobs.")
@_seconds_option("sweep", DEFAULT_SWEEP_SECONDS, "How often lapsed leases are looked for.")
@_seconds_option("grace", DEFAULT_GRACE_SECONDS, "How long a stop waits for running jobs.")
@_seconds_option("answer", DEFAULT_ANSWER_SECONDS, "How long the database may take to answer.")
@click.option("--no-listen", is_flag=True, help="Poll only: no enqueue wakes the worker.")
@click.option(
    "--listen-url",
    metavar="URL",
    help="The database without its connection pooler, for LISTEN alone. "
    "Default: SA_JOBS_LISTEN_URL, then the database.",
)
@click.option(
    "--max-jobs",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    help="After so many jobs a process ends, and is replaced.",
)
@click.option(
    "--max-memory",
    "max_memory_mib",
    type=click.IntRange(min=1),
    metavar="MIB",
    help="With more memory than this a process ends when its jobs have, and is replaced.",
)
@url_option
@click.option(
    "--log-level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="info",
    show_default=True,
    help="The least level that is logged, on standard error.",
)
@click.pass_obj
def worker(
    invocation: Invocation,
    /,
    processes: int,
    log_level: str,
    listen_url: str | None,
    target: str = "",
    database_url: str | None = None,
    **options: Any,
) -> int:
    """Run jobs until SIGTERM or Ctrl-C.

    MODULE:ATTR names a Jobs, or an application that carries one, or a function without arguments
    that returns either. MODULE is also looked for in the current directory. A Flask application
    with the extension has its own database and SA_JOBS_ settings.

    The first signal lets running jobs end, the second stops at once. Exit codes: 0 all ended,
    1 failure, 2 usage, 3 the grace period ended first and running jobs were handed back, 4 one
    process without a supervisor has reached --max-jobs or --max-memory.
    """
    if database_url is not None:
        urls.database_url(database_url)
    listening = urls.listen_url(listen_url)
    early_signals = _end_on_early_signals()
    lifeline = Lifeline.inherited()
    if processes > 1 and lifeline is None:
        configure_logging(log_level.upper(), with_pid=True)
        return Supervisor(invocation.command, processes, grace=options["grace"]).run()
    if lifeline is not None:
        lifeline.watch()
    source = invocation.application or load_target(target)
    if early_signals:
        # The application's own code has swallowed the exception.
        raise EndedEarly(0)
    configure_logging(log_level.upper(), with_pid=lifeline is not None)
    with ExitStack() as stack:
        if listening is not None:
            options["listen_engine"] = open_engine(listening)
        if isinstance(source, Jobs):
            made = _on_database(source, urls.database_url(database_url), options, lifeline, stack)
        elif database_url is None:
            made = _in_application(source, options, lifeline)
        else:
            raise click.UsageError(
                f"{target} has a database of its own: leave --database-url out, and set it there"
            )
        return run_to_the_end(made if lifeline is None else Supervised(made, lifeline))


def _on_database(
    jobs: Jobs, url: URL, options: dict[str, Any], lifeline: Lifeline | None, stack: ExitStack
) -> Worker:
    slots = options["concurrency"]
    # Handlers that take a session hold one connection each; those that timed out, one more.
    engine = open_engine(url, pool_size=slots, max_overflow=slots, pool_pre_ping=True)
    stack.callback(engine.dispose)
    return Worker(engine, jobs, **_arguments(options, options["max_jobs"], lifeline))


def _in_application(
    application: Application, options: dict[str, Any], lifeline: Lifeline | None
) -> Worker:
    given = {name: value for name, value in options.items() if was_given(name)}
    max_jobs = given.get("max_jobs", application.settings.get("max_jobs"))
    return application.worker(**_arguments(given, max_jobs, lifeline))


def _arguments(
    options: dict[str, Any], max_jobs: int | None, lifeline: Lifeline | None
) -> dict[str, Any]:
    """Return what the options are as arguments of a Worker."""
    arguments = dict(options)
    if "no_listen" in arguments:
        arguments["listen"] = not arguments.pop("no_listen")
    if "queues" in arguments:
        arguments["queues"] = arguments["queues"] or None
    if lifeline is not None:
        arguments |= {"max_jobs": _spread(max_jobs), "on_ready": lifeline.serves}
    return arguments


def _spread(max_jobs: int | None) -> int | None:
    """Return up to a tenth more, so that processes which began together do not end together."""
    return None if max_jobs is None else max_jobs + random.randint(0, max_jobs // 10)


def _end_on_early_signals() -> list[int]:
    """End at once on a signal that comes while the application is still imported.

    Without a handler, a process that is the first of its container would never see it. The list
    that is returned gets each signal that came. While Python itself ends, which takes the handlers
    away, signals are ignored, or they would change the exit code. This is asked for first, and so
    done last.
    """
    came: list[int] = []

    def end(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise EndedEarly(0)

    for number in STOP_SIGNALS:
        signal.signal(number, end)
    atexit.register(_ignore_signals)
    return came


def _ignore_signals() -> None:
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    except EndedEarly:
        # One more came meanwhile, and ends what is ending already.
        _ignore_signals()
