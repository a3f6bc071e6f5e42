"""The commands as processes of their own: a day with the queue, and whatever may be missing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from sa_jobs import enqueue, enqueue_many
from tests.support.commands import ROOT, Ended, environment, in_shell, sa_jobs
from tests.support.looking import status, unfinished
from tests.support.waiting import wait_until
from tests.support.workers import APP, WorkerProcess

pytestmark = pytest.mark.acceptance

LOG_LINE = re.compile(
    r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d (DEBUG|INFO|WARNING|ERROR) [\w.]+ .+"
)


def test_jobs_go_through_the_queue_by_commands_alone(app_database: str, engine: Engine) -> None:
    def run(*arguments: str) -> str:
        ended = sa_jobs(*arguments, url=app_database)
        assert (ended.code, ended.error) == (0, "")
        return ended.out

    quick = run("enqueue", "quick").strip()
    failing = run("enqueue", "always_fails", "--max-attempts", "2").strip()
    waiting = run("enqueue", "wait_for_cancel").strip()
    later = run("enqueue", "quick", "--delay", "3600").strip()
    assert "warning: 1 ready job, no live worker for handler quick" in run("status")

    with WorkerProcess(app_database) as worker:
        wait_until(lambda: status(engine, int(quick)) == "done", "the quick one is done")
        wait_until(lambda: status(engine, int(failing)) == "dead", "the failing one is dead")
        wait_until(lambda: status(engine, int(waiting)) == "running", "the waiting one runs")
        seen = json.loads(run("status", "--json"))
        assert [live["pid"] for live in seen["workers"]] == [worker.pid]
        assert seen["dead"]["value"] == 1
        assert seen["warnings"] == []
        assert "told to stop with the next heartbeat" in run("cancel", waiting)
        wait_until(lambda: status(engine, int(waiting)) == "cancelled", "the handler stops")
        assert worker.stop() == 0

    history = run("show", failing)
    assert history.count("failed at ") == 2
    assert "ValueError: failure of attempt 2" in history
    assert '"quick"' in run("show", quick, "--payload")
    assert run("retry", failing) == f"{failing}: ready again\n"
    assert run("cancel", failing, later) == f"{failing}: cancelled\n{later}: cancelled\n"
    assert unfinished(engine) == 0
    assert "no live workers" in run("status")


def test_jobs_that_no_worker_knows_are_named_and_left_alone(
    app_database: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        enqueue_many(session, "not.there", [{}] * 3)
        enqueue_many(session, "quick", [{}] * 2, queue="defualt")

    with WorkerProcess(app_database) as worker:
        worker.wait_until_ready()
        wait_until(
            lambda: "last heartbeat" in sa_jobs("status", url=app_database).out, "it is seen alive"
        )
        seen = sa_jobs("status", url=app_database).out

    assert "warning: 3 ready jobs, no live worker for handler not.there" in seen
    assert "warning: 2 ready jobs, no live worker for queue defualt" in seen
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT sum(attempts + claim_no) FROM sa_jobs")) == 0


# --- what is missing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments", [["status"], ["enqueue", "send"], ["list"], ["db", "upgrade"], ["worker", APP]]
)
def test_without_a_database_a_command_says_how_to_name_one(arguments: list[str]) -> None:
    ended = sa_jobs(*arguments)

    assert (ended.code, ended.out) == (2, "")
    assert "set SA_JOBS_DATABASE_URL or DATABASE_URL" in ended.one_line()


@pytest.mark.parametrize("arguments", [["status"], ["enqueue", "send"], ["db", "upgrade"]])
def test_a_server_that_is_down_is_one_line_without_the_password(arguments: list[str]) -> None:
    ended = sa_jobs(*arguments, url="postgresql://app:pw-ABC@127.0.0.1:1/app")

    assert (ended.code, ended.out) == (1, "")
    line = ended.one_line()
    assert line.startswith("sa-jobs: cannot reach the database (")
    assert "Connection refused" in line
    assert "pw-ABC" not in line


def test_a_worker_without_tables_ends_with_one_line(empty_database: str) -> None:
    ended = sa_jobs("worker", "tests.acceptance.app:jobs", url=empty_database)

    assert (ended.code, ended.out) == (1, "")
    assert "`sa-jobs db upgrade`" in ended.one_line()


def test_the_url_of_the_application_will_do(database_url: str) -> None:
    url = database_url.replace("postgresql+psycopg://", "postgresql+psycopg2://")

    ended = sa_jobs("list", variables={"DATABASE_URL": url})

    assert (ended.code, ended.out, ended.error) == (0, "no jobs\n", "")


def test_a_reader_that_goes_away_is_no_error(database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO sa_jobs (queue, handler)"
                " SELECT 'default', repeat('x', 200) FROM generate_series(1, 2000)"
            )
        )
    ended = in_shell("sa_jobs list --limit 2000 | head -1", url=database_url)

    assert ended.out.lstrip().startswith("id ")
    assert ended.error == ""


# --- streams and surroundings -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("list >&-", 1, "cannot write to standard output (it is closed)"),
        ("list >/dev/full", 1, "cannot write to standard output (No space left on device)"),
        ("list --json >/dev/full", 1, "cannot write to standard output (No space left on device)"),
        ("list 1</dev/null", 1, "cannot write to standard output (Bad file descriptor)"),
        ("status >&- <&-", 1, "cannot write to standard output (it is closed)"),
        (
            "status --json >/dev/full",
            1,
            "cannot write to standard output (No space left on device)",
        ),
        ("db check >/dev/full", 1, "cannot write to standard output (No space left on device)"),
        ("demo >&-", 1, "cannot write to standard output (it is closed)"),
        ("--help >/dev/full", 1, "No space left on device"),
        ("enqueue h --payload - <&-", 2, "standard input is closed"),
        ("lst >&-", 2, "No such command 'lst'"),
    ],
)
def test_a_stream_that_cannot_be_used_is_one_line(
    database_url: str, line: str, code: int, says: str
) -> None:
    ended = in_shell(f"sa_jobs {line}", url=database_url)

    assert (ended.code, ended.out) == (code, "")
    assert says in ended.one_line()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("list <&- 2>&-", 0),
        ("list 2>/dev/full", 0),
        ("list >/dev/full 2>/dev/full", 1),
        ("status <&- >&- 2>&-", 1),
        ("lst 2>&-", 2),
        ("lst 2>/dev/full", 2),
        ("worker x:y <&- >&- 2>&-", 2),
    ],
)
def test_without_a_standard_error_the_exit_code_tells(
    database_url: str, line: str, code: int
) -> None:
    ended = in_shell(f"sa_jobs {line}", url=database_url)

    assert (ended.code, ended.error) == (code, "")


def test_nothing_is_changed_where_the_output_is_closed_and_told_where_it_fails(
    database_url: str, engine: Engine
) -> None:
    def jobs() -> int:
        with engine.connect() as connection:
            count: int = connection.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one()
            return count

    closed = in_shell("sa_jobs enqueue h >&-", url=database_url)
    assert (closed.code, jobs()) == (1, 0)

    full = in_shell("sa_jobs enqueue h >/dev/full", url=database_url)
    assert (full.code, jobs()) == (1, 1)
    assert full.one_line().endswith("(No space left on device): job 1 was added")

    again = in_shell("sa_jobs cancel 1 2 >/dev/full", url=database_url)
    assert again.code == 1
    assert again.one_line().endswith(": 1: cancelled; no job after it was looked at")


def test_a_worker_works_without_any_standard_stream(app_database: str, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        job_id = enqueue(session, "quick").id
    command = f"'{sys.executable}' -m sa_jobs worker tests.acceptance.app:jobs"
    worker = subprocess.Popen(
        ["sh", "-c", f"exec {command} <&- >&- 2>&-"],
        cwd=ROOT,
        env=environment(app_database),
    )
    try:
        wait_until(lambda: status(engine, job_id) == "done", "the job is done")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(20) == 0
    finally:
        worker.kill()
        worker.wait()


def test_a_current_directory_that_is_gone_is_one_line(database_url: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    line = f"mkdir '{gone}'; cd '{gone}'; rmdir '{gone}'; sa_jobs"

    ended = in_shell(f"{line} worker app_of_mine:jobs", url=database_url)
    assert (ended.code, ended.out) == (1, "")
    assert "the current directory cannot be looked at (No such file" in ended.one_line()
    # An installed application is found without one.
    ended = in_shell(f"{line} worker sa_jobs.errors:jobs", url=database_url)
    assert "sa_jobs.errors has no 'jobs'" in ended.one_line()
    assert in_shell(f"{line} list", url=database_url) == Ended(0, "no jobs\n", "")


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({"LC_ALL": "C"}, "é🚀"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}, "\\xe9\\U0001f680"),
        ({"PYTHONIOENCODING": "ascii:strict"}, "\\xe9\\U0001f680"),
        ({"PGCLIENTENCODING": "SQL_ASCII"}, "é🚀"),
    ],
)
def test_any_locale_and_encoding_will_do(
    database_url: str, engine: Engine, variables: dict[str, str], seen: str
) -> None:
    with Session(engine) as session, session.begin():
        enqueue(session, "é🚀", queue="é🚀\u202e")

    for arguments in (["list"], ["status"], ["show", "1"]):
        ended = sa_jobs(*arguments, url=database_url, variables=variables)
        assert (ended.code, ended.error) == (0, "")
        assert f"{seen}\\u202e" in ended.out
    line = "sa_jobs list --queue \"$(printf '\\377\\033')\""
    ended = in_shell(line, url=database_url, variables=variables)
    assert ended.code == 2
    assert "queue contains a lone surrogate" in ended.one_line()


# --- the worker's process -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("shop", 2, "'shop' must be MODULE:ATTR"),
        ("shop:jobs", 2, "there is no module 'shop' in "),
        ("app:job", 2, "app has no 'job' (did you mean jobs?)"),
        ("app:number", 2, "app:number is an int, not a Jobs"),
        ("..:x", 2, "'..:x' must be MODULE:ATTR"),
        (".app:jobs", 2, "'.app:jobs' must be MODULE:ATTR"),
        ("app:jobs.", 2, "'app:jobs.' must be MODULE:ATTR"),
        ("leaves:jobs", 1, "importing leaves failed: SystemExit: 0"),
        ("app:jobs", 1, "the registry has no handlers"),
        ("needs:jobs", 1, "needs imports the module 'not_there', which is not installed"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, target: str, code: int, says: str
) -> None:
    (tmp_path / "app.py").write_text("from sa_jobs import Jobs\njobs = Jobs()\nnumber = 1\n")
    (tmp_path / "needs.py").write_text("import not_there\n")
    (tmp_path / "leaves.py").write_text("raise SystemExit(0)\n")

    ended = sa_jobs("worker", target, url="postgresql://127.0.0.1:1/app", directory=tmp_path)

    assert (ended.code, ended.out) == (code, "")
    # Where the application's own code fails, its lines come first.
    assert says in (ended.error.splitlines()[-1] if target == "leaves:jobs" else ended.one_line())
    assert "Traceback" not in ended.error


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--lease=10", "--heartbeat=9"],
            "heartbeat (9 s) must be at most a third of lease (10 s)",
        ),
        (["--lease=0"], "lease must be from 1 to 86400 seconds, not 0.0"),
        (["--heartbeat=20"], "heartbeat (20 s) must be at most a third of lease (30 s)"),
        (["--poll=0"], "poll must be from 0.01"),
        (["--grace=1e9"], "grace must be from 0 to 86400 seconds"),
        (["--queue="], "queue must not be empty"),
        (["--concurrency=100001"], "100001 is not in the range 1<=x<=100000"),
    ],
)
def test_settings_that_cannot_work_are_wrong_usage(options: list[str], says: str) -> None:
    ended = sa_jobs("worker", "tests.acceptance.app:jobs", *options, url="postgresql://h:1/app")

    assert (ended.code, ended.out) == (2, "")
    assert says in ended.one_line()


def test_the_log_has_a_clean_line_for_each_record_and_never_a_payload(
    app_database: str, engine: Engine
) -> None:
    with Session(engine) as session, session.begin():
        for handler in ("sleep", "sleep_async", "not.there"):
            enqueue(session, handler, {"seconds": "hunter2-XYZ"}, max_attempts=2)
        for handler in ("always_fails", "snoozes_once"):
            enqueue(session, handler, max_attempts=2)
    with WorkerProcess(app_database, "--log-level", "debug") as worker:
        # All but the one that nobody knows.
        wait_until(lambda: unfinished(engine) == 1, "all have ended")
        assert worker.stop() == 0
        log = worker.log

    lines = log.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if not LOG_LINE.fullmatch(line)] == []
    about_jobs = [line for line in lines if " job_id=" in line]
    assert about_jobs
    for line in about_jobs:
        assert re.search(r" job_id=\d+ job_handler=\S+ job_queue=default job_attempt=\d+$", line)
    assert "hunter2" not in log


def test_a_signal_during_the_applications_import_ends_the_worker_in_peace(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "print('importing', flush=True)\nimport time\ntime.sleep(30)\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-m", "sa_jobs", "worker", "slow:jobs"],
            cwd=tmp_path,
            env=environment("postgresql://127.0.0.1:1/app", PYTHONPATH=str(ROOT)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        os.kill(process.pid, number)
        _, error = process.communicate(timeout=10)

        assert (process.returncode, error) == (0, "")
