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
from tests.support.commands import ROOT, environment, sa_jobs
from tests.support.looking import status, unfinished
from tests.support.waiting import wait_until
from tests.support.workers import WorkerProcess

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
    "arguments", [["status"], ["enqueue", "send"], ["list"], ["db", "upgrade"], ["worker", "x:y"]]
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
    command = f"'{sys.executable}' -m sa_jobs list --limit 2000 | head -1"
    ended = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env=environment(database_url),
        capture_output=True,
        text=True,
        check=False,
    )

    assert ended.stdout.lstrip().startswith("id ")
    assert ended.stderr == ""


# --- the worker's process -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "code", "says"),
    [
        ("shop", 2, "'shop' must be MODULE:ATTR"),
        ("shop:jobs", 2, "there is no module 'shop' in "),
        ("app:job", 2, "app has no 'job' (did you mean jobs?)"),
        ("app:number", 2, "app:number is an int, not a Jobs"),
        ("app:jobs", 1, "the registry has no handlers"),
        ("needs:jobs", 1, "needs imports the module 'not_there', which is not installed"),
    ],
)
def test_an_application_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, target: str, code: int, says: str
) -> None:
    (tmp_path / "app.py").write_text("from sa_jobs import Jobs\njobs = Jobs()\nnumber = 1\n")
    (tmp_path / "needs.py").write_text("import not_there\n")

    ended = sa_jobs("worker", target, url="postgresql://127.0.0.1:1/app", directory=tmp_path)

    assert (ended.code, ended.out) == (code, "")
    assert says in ended.one_line()


def test_settings_that_cannot_work_are_one_line(database_url: str) -> None:
    ended = sa_jobs(
        "worker", "tests.acceptance.app:jobs", "--lease=10", "--heartbeat=9", url=database_url
    )

    assert ended.code != 0
    assert "heartbeat (9 s) must be at most a third of lease (10 s)" in ended.one_line()


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
