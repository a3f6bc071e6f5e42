"""Signals at awkward moments: the database is away, the process starts, or is not the worker's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session

from sa_jobs.worker import EXIT_FAILURE, EXIT_HANDED_BACK
from sa_jobs.worker.signals import LAST_SECONDS
from tests.acceptance.app import jobs
from tests.support.commands import ROOT, environment
from tests.support.looking import job, starts_of, status
from tests.support.postgres import Cluster
from tests.support.waiting import assert_within, wait_until
from tests.support.workers import APP, WorkerProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


class Program:
    """A command in a process of its own, whose output is kept; killed at the end of the block."""

    def __init__(self, command: list[str], url: str, log: Path, directory: Path = ROOT) -> None:
        self._log = log
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=directory,
                env=environment(url, PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            # Of a namespace, the first process and so all of them.
            for child in psutil.Process(self.process.pid).children():
                child.kill()
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        """Everything that was written so far."""
        return self._log.read_text()

    def wait_for(self, words: str) -> None:
        """Wait until something is written."""
        wait_until(lambda: words in self.log, f"{words!r} is written: {self.log}")

    def ends(self, seconds: float = 20.0) -> int:
        """Return the exit code, once the process has ended."""
        return self.process.wait(seconds)


# --- the database is away -----------------------------------------------------------------------


@contextmanager
def stopped(cluster: Cluster) -> Iterator[None]:
    cluster.stop("immediate")
    try:
        yield
    finally:
        cluster.start()


def test_with_the_database_down_a_worker_ends_soon_after_the_grace_period(
    cluster: Cluster, app_database: str, engine: Engine
) -> None:
    fresh = create_engine(engine.url, poolclass=NullPool)
    running = add(engine, "sleep", seconds=60.0)
    with WorkerProcess(app_database, "--grace", "3", lease=30.0) as busy:
        wait_until(lambda: starts_of(fresh, running), "the job starts")
        with WorkerProcess(app_database, "--grace", "3") as idle:
            idle.wait_until_ready()
            engine.dispose()
            with stopped(cluster):
                began = time.monotonic()
                idle.send(signal.SIGTERM)
                busy.send(signal.SIGTERM)
                assert idle.wait() == 0
                assert busy.wait() == EXIT_FAILURE
                assert_within(3 + 2, time.monotonic() - began)
            assert "Traceback" not in idle.log + busy.log
            # Nothing was written, and so nothing works.
            assert "claim: works again" not in busy.log
        assert "1 jobs could not be written; their leases run out" in busy.log

    assert (status(fresh, running), job(fresh, running).attempts) == ("running", 1)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_silent_database_does_not_keep_a_worker_that_is_stopped(
    cluster: Cluster, app_database: str, engine: Engine, signals: int
) -> None:
    """The backend that serves its claims is stopped, as in a network that drops every packet."""
    with WorkerProcess(app_database, "--grace", "1", lease=30.0) as worker:
        worker.wait_until_ready()
        backend = claim_backend(engine)
        os.kill(backend, signal.SIGSTOP)
        try:
            time.sleep(1)  # until it waits for an answer: it polls twice in a second
            began = time.monotonic()
            for _ in range(signals):
                worker.send(signal.SIGTERM)
                time.sleep(0.05)
            assert worker.wait() == EXIT_FAILURE
            assert_within(1 + LAST_SECONDS + 1, time.monotonic() - began)
            assert "Traceback" not in worker.log
        finally:
            os.kill(backend, signal.SIGCONT)


def claim_backend(engine: Engine) -> int:
    with engine.connect() as connection:
        pid: int = connection.execute(
            text(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'sa-jobs claim'"
            )
        ).scalar_one()
    return pid


# --- threads that handlers leave behind ---------------------------------------------------------


LEAVES_THREADS = """
    import asyncio
    import threading
    import time

    from sa_jobs import JobContext, Jobs
    from tests.acceptance.app import mark_start

    jobs = Jobs()

    @jobs.handler("waits_for_a_thread")
    async def waits_for_a_thread(ctx: JobContext) -> None:
        mark_start(ctx)
        await asyncio.to_thread(time.sleep, 60)

    @jobs.handler("stuck", timeout=0.3, max_attempts=1)
    def stuck(ctx: JobContext) -> None:
        mark_start(ctx)
        time.sleep(600)

    @jobs.handler("leaves_a_thread")
    def leaves_a_thread(ctx: JobContext) -> None:
        threading.Thread(target=time.sleep, args=(60,)).start()
        mark_start(ctx)
"""


@pytest.mark.parametrize(
    ("handler", "code"), [("waits_for_a_thread", EXIT_HANDED_BACK), ("leaves_a_thread", 0)]
)
def test_threads_that_handlers_have_started_do_not_keep_the_process(
    app_database: str, engine: Engine, tmp_path: Path, handler: str, code: int
) -> None:
    (tmp_path / "leaves.py").write_text(textwrap.dedent(LEAVES_THREADS))
    job_id = add_any(engine, handler)
    command = [*WORKER, "leaves:jobs", "--grace", "1"]
    with Program(command, app_database, tmp_path / "log", tmp_path) as program:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        began = time.monotonic()
        program.process.terminate()
        assert program.ends() == code
        assert_within(1 + LAST_SECONDS + 1, time.monotonic() - began)
        assert "Traceback" not in program.log


def test_a_worker_whose_handlers_are_stuck_says_so_and_ends_with_a_failure(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    """A time-out has replaced as many threads as it may; only a new process helps."""
    (tmp_path / "leaves.py").write_text(textwrap.dedent(LEAVES_THREADS))
    stuck = [add_any(engine, "stuck") for _ in range(2)]
    command = [*WORKER, "leaves:jobs", "--concurrency", "1"]
    with Program(command, app_database, tmp_path / "log", tmp_path) as program:
        assert program.ends() == EXIT_FAILURE
        assert "2 handlers were told to stop and still run" in program.log.splitlines()[-1]
        assert "Traceback" not in program.log

    assert [job(engine, job_id).last_error for job_id in stuck] == ["timed out after 0.3 s"] * 2


def add_any(engine: Engine, handler: str) -> int:
    from sa_jobs import enqueue

    with Session(engine) as session, session.begin():
        return enqueue(session, handler).id


# --- the start ----------------------------------------------------------------------------------

WORKER = [sys.executable, "-m", "sa_jobs", "worker"]
SCRIPT = str(Path(sys.executable).with_name("sa-jobs-worker"))


@pytest.mark.parametrize("milliseconds", [50, 200, 400, 700])
def test_a_signal_during_the_start_ends_the_process_and_costs_no_job_an_attempt(
    app_database: str, engine: Engine, tmp_path: Path, milliseconds: int
) -> None:
    """Until Python has imported the package, the system ends it; there is nothing to drain yet."""
    job_id = add(engine, "sleep", seconds=0.1)
    with Program([SCRIPT, APP], app_database, tmp_path / "log") as program:
        time.sleep(milliseconds / 1000)
        program.process.terminate()
        assert program.ends(10) in (0, -signal.SIGTERM)
        assert "Traceback" not in program.log

    ended = job(engine, job_id)
    assert (ended.status, ended.attempts) in (("ready", 0), ("done", 1))


SLOW_IMPORT = """
    import pathlib
    import time

    pathlib.Path("importing").touch()
    try:
        time.sleep(3)
    except {caught}:
        pass
    from tests.acceptance.app import jobs
"""


@pytest.mark.parametrize("caught", ["ImportError", "BaseException"])
def test_a_signal_during_a_slow_import_is_not_lost(
    app_database: str, engine: Engine, tmp_path: Path, caught: str
) -> None:
    """Even where the application's own code swallows what ends it."""
    job_id = add(engine, "quick")
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW_IMPORT).format(caught=caught))
    with Program([SCRIPT, "slow:jobs"], app_database, tmp_path / "log", tmp_path) as program:
        wait_until((tmp_path / "importing").exists, "it imports the application")
        program.process.terminate()
        assert program.ends(10) == 0
        assert program.log == ""

    assert status(engine, job_id) == "ready"


# --- the first process of a container -----------------------------------------------------------


@contextmanager
def first_process(url: str, log: Path, app: str, directory: Path) -> Iterator[tuple[Program, int]]:
    """Run the console script as process 1 of a namespace; give its process id out here too."""
    unshare = shutil.which("unshare")
    prefix = [str(unshare), "--pid", "--fork", "--mount-proc"]
    if unshare is None or subprocess.run([*prefix, "true"], check=False).returncode != 0:
        pytest.skip("this system lets us make no process namespace")
    with Program([*prefix, SCRIPT, app, "--grace", "5"], url, log, directory) as program:
        outer = psutil.Process(program.process.pid)
        (inner,) = wait_until(outer.children, "the script runs")
        yield program, inner.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_as_process_1_a_worker_drains(
    app_database: str, engine: Engine, tmp_path: Path, number: signal.Signals
) -> None:
    job_id = add(engine, "sleep", seconds=1.0)
    with first_process(app_database, tmp_path / "log", APP, ROOT) as (program, pid):
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        assert starts_of(engine, job_id)[0].pid == 1
        os.kill(pid, number)
        assert program.ends() == 0
        assert "Traceback" not in program.log

    assert status(engine, job_id) == "done"


def test_as_process_1_a_worker_is_stopped_while_it_imports_the_application(
    app_database: str, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(textwrap.dedent(SLOW_IMPORT).format(caught="ImportError"))
    with first_process(app_database, tmp_path / "log", "slow:jobs", tmp_path) as (program, pid):
        wait_until((tmp_path / "importing").exists, "it imports the application")
        os.kill(pid, signal.SIGTERM)
        assert program.ends(10) == 0


# --- inside another program ---------------------------------------------------------------------

HOST = """
    import os
    import signal
    import sys
    import threading
    import time

    from sqlalchemy import create_engine

    from sa_jobs import Worker
    from sa_jobs.worker.signals import run_with_signals
    from tests.acceptance.app import jobs

    engine = create_engine(os.environ["SA_JOBS_DATABASE_URL"])
    worker = Worker(engine, jobs, grace=20, poll=0.2, concurrency=2)

"""
IN_A_THREAD = """
    def on_signal(number, frame):
        print("the host's handler")
        worker.stop()

    signal.signal(signal.SIGTERM, on_signal)
    codes = []
    thread = threading.Thread(target=lambda: codes.append({run}))
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    assert signal.getsignal(signal.SIGTERM) is on_signal
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print("codes", codes)
"""
IN_THE_MAIN_THREAD = """
    def on_signal(number, frame):
        sys.exit(7)

    signal.signal(signal.SIGTERM, on_signal)
    try:
        worker.run()
    finally:
        assert signal.getsignal(signal.SIGTERM) is on_signal
        print("the host goes on with", sys.exc_info()[0].__name__)
"""
WITH_OUR_HANDLERS = """
    def on_signal(number, frame):
        raise AssertionError

    signal.signal(signal.SIGTERM, on_signal)
    print("code", run_with_signals(worker))
    assert signal.getsignal(signal.SIGTERM) is on_signal
    print("the host goes on")
"""


def script(*parts: str) -> list[str]:
    return [sys.executable, "-c", "".join(textwrap.dedent(part) for part in parts)]


@pytest.mark.parametrize("run", ["worker.run()", "run_with_signals(worker)"])
def test_in_a_thread_a_worker_leaves_the_signals_to_its_host(
    app_database: str, engine: Engine, tmp_path: Path, run: str
) -> None:
    job_id = add(engine, "sleep", seconds=1.0)
    command = script(HOST, IN_A_THREAD.format(run=run))
    with Program(command, app_database, tmp_path / "log") as program:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        program.process.terminate()
        assert program.ends() == 0
        assert program.log == "the host's handler\ncodes [0]\n"

    assert status(engine, job_id) == "done"


def test_run_with_signals_puts_the_handlers_of_its_host_back(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    job_id = add(engine, "sleep", seconds=1.0)
    with Program(script(HOST, WITH_OUR_HANDLERS), app_database, tmp_path / "log") as program:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        program.process.terminate()
        assert program.ends() == 0
        assert program.log == "code 0\nthe host goes on\n"

    assert status(engine, job_id) == "done"


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (signal.SIGINT, "KeyboardInterrupt", -signal.SIGINT),
        (signal.SIGTERM, "SystemExit", 7),
    ],
)
def test_what_a_signal_raises_in_the_main_thread_drains_and_is_raised_again(
    app_database: str, engine: Engine, tmp_path: Path, number: int, kind: str, code: int
) -> None:
    """As Ctrl-C by default, or by a handler of the host's."""
    job_id = add(engine, "sleep", seconds=2.0)
    with Program(script(HOST, IN_THE_MAIN_THREAD), app_database, tmp_path / "log") as program:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        program.process.send_signal(number)
        assert program.ends() == code
        assert f"the host goes on with {kind}\n" in program.log

    assert (status(engine, job_id), job(engine, job_id).attempts) == ("done", 1)


def test_a_second_ctrl_c_in_the_main_thread_hands_back_at_once(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    job_id = add(engine, "sleep", seconds=60.0)
    with Program(script(HOST, IN_THE_MAIN_THREAD), app_database, tmp_path / "log") as program:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        program.process.send_signal(signal.SIGINT)
        later = add(engine, "quick")
        time.sleep(0.5)
        began = time.monotonic()
        program.process.send_signal(signal.SIGINT)
        assert program.ends() == -signal.SIGINT
        assert_within(1, time.monotonic() - began)

    for waiting in (job_id, later):
        assert (status(engine, waiting), job(engine, waiting).attempts) == ("ready", 0)


INTERRUPTED_AGAIN_AND_AGAIN = """
    import random

    for number in range(10):
        worker = Worker(engine, jobs, grace=20, poll=0.2, lease=300, heartbeat=20)
        seconds = random.uniform(0.05, 0.3)
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            worker.run()
        except KeyboardInterrupt:
            continue
        sys.exit("it was not interrupted")
"""


def test_a_ctrl_c_at_any_instant_loses_no_job_and_runs_none_twice(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    with Session(engine) as session, session.begin():
        jobs.enqueue_many(session, "quick", [{}] * 3000)
    command = script(HOST, INTERRUPTED_AGAIN_AND_AGAIN)
    with Program(command, app_database, tmp_path / "log") as program:
        assert program.ends(60) == 0, program.log

    with engine.connect() as connection:
        ends = set(connection.execute(text("SELECT DISTINCT status, attempts FROM sa_jobs")))
        twice = connection.execute(
            text("SELECT count(*) - count(DISTINCT job_id) FROM starts")
        ).scalar()
    assert {tuple(end) for end in ends} <= {("done", 1), ("ready", 0)}
    assert twice == 0
