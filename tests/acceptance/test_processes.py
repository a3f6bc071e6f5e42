"""`--processes`: worker processes that are kept running, replaced, and ended together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

from sa_jobs import stats
from sa_jobs.worker import EXIT_HANDED_BACK, EXIT_OK, EXIT_RECYCLED
from tests.acceptance.app import jobs, starts
from tests.support.commands import sa_jobs
from tests.support.looking import failures, job, starts_of, status, unfinished
from tests.support.waiting import wait_until
from tests.support.workers import MODULE, WorkerProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

TWO = ("--processes", "2")
CONSOLE_SCRIPT = (str(Path(sys.executable).with_name("sa-jobs-worker")),)

# An application in the current directory, which tells who has imported it.
SHOP = """
import os
from pathlib import Path
from sa_jobs import Jobs

with Path("imported").open("a") as file:
    print(os.getpid(), file=file)
if Path("broken").exists():
    raise RuntimeError("the configuration is broken")

jobs = Jobs()

@jobs.handler("hello")
def hello() -> None:
    pass
"""


def add(engine: Engine, handler: str, **payload: object) -> int:
    with Session(engine) as session, session.begin():
        return jobs.enqueue(session, handler, payload).id


def add_many(engine: Engine, handler: str, number: int, **payload: object) -> list[int]:
    with Session(engine) as session, session.begin():
        return [added.id for added in jobs.enqueue_many(session, handler, [payload] * number)]


def pids_of_starts(engine: Engine) -> Counter[int]:
    with engine.connect() as connection:
        return Counter(connection.execute(select(starts.c.pid)).scalars())


def deaths(worker: WorkerProcess) -> list[str]:
    return [line for line in worker.log.splitlines() if "another one starts in" in line]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A directory with the application shop:jobs."""
    (tmp_path / "shop.py").write_text(SHOP)
    return tmp_path


# --- what runs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("program", [MODULE, CONSOLE_SCRIPT], ids=["module", "console script"])
def test_each_process_is_a_worker_of_its_own(
    database_url: str, engine: Engine, shop: Path, program: tuple[str, ...]
) -> None:
    with WorkerProcess(
        database_url, *TWO, app="shop:jobs", program=program, directory=shop
    ) as worker:
        worker.wait_until_ready(2)

        def seen() -> list[stats.LiveWorker]:
            with engine.connect() as connection:
                return stats.live_workers(connection)

        wait_until(lambda: len(seen()) == 2, "two workers are seen")
        assert {live.pid for live in seen()} == set(worker.children)
        assert len({live.id for live in seen()}) == 2
        # The supervisor itself has neither the application nor a connection.
        imported = (shop / "imported").read_text().split()
        assert sorted(map(int, imported)) == sorted(worker.children)
        assert psutil.Process(worker.pid).net_connections("inet") == []
        assert worker.stop() == EXIT_OK
        # And every line says whose it is.
        said = [re.search(r" pid=(\d+)$", line) for line in worker.log.splitlines()]

    assert {found and found[1] for found in said} == {str(worker.pid), *imported}


# A program that has used its engine, and runs the command by a call.
PROGRAM = """
import sys
from sqlalchemy import create_engine, text
from sa_jobs.cli import worker_main
from sa_jobs.urls import database_url

connection = create_engine(database_url(None)).connect()
backend = text("SELECT pg_backend_pid()")
before = connection.scalar(backend)
connection.commit()
code = worker_main(sys.argv[1:])
assert connection.scalar(backend) == before
sys.exit(code)
"""


def test_a_connection_of_the_parent_is_shared_with_no_process(
    app_database: str, engine: Engine
) -> None:
    program = (sys.executable, "-c", PROGRAM)
    with WorkerProcess(
        app_database, "--processes", "4", "--concurrency", "4", program=program
    ) as worker:
        worker.wait_until_ready(4)
        ids = add_many(engine, "quick", 500)
        wait_until(lambda: pids_of_starts(engine), "they work")
        os.kill(worker.children[0], signal.SIGTERM)
        wait_until(lambda: unfinished(engine) == 0, "every job ends", seconds=60)
        worker.wait_until_ready(5)
        pids = [worker.pid, *worker.children]
        ports = [
            connection.laddr.port
            for pid in pids
            for connection in psutil.Process(pid).net_connections("inet")
        ]
        # The parent's one, and in each child those of the four loops, at least.
        assert len(ports) == len(set(ports)) >= 17
        assert worker.stop() == EXIT_OK
        assert "ERROR" not in worker.log
        assert "Traceback" not in worker.log

    assert {(status(engine, id), job(engine, id).attempts) for id in ids[::20]} == {("done", 1)}
    assert sum(pids_of_starts(engine).values()) == 500


# --- processes that die -------------------------------------------------------------------------


def test_a_process_that_is_killed_costs_one_attempt_of_the_job_it_held(
    app_database: str, engine: Engine
) -> None:
    killed = add(engine, "is_killed")
    others = add_many(engine, "quick", 20)
    with WorkerProcess(app_database, *TWO, "--concurrency", "1") as worker:
        wait_until(lambda: unfinished(engine) == 0, "every job ends")
        assert worker.stop() == EXIT_OK
        [death] = deaths(worker)

    [start] = starts_of(engine, killed)
    assert f"process {start.pid} was killed by SIGKILL (unless somebody sent it" in death
    assert (status(engine, killed), len(failures(engine, killed))) == ("dead", 1)
    assert {(status(engine, other), job(engine, other).attempts) for other in others} == {
        ("done", 1)
    }


@pytest.mark.parametrize(
    ("app", "database", "code", "says"),
    [
        ("shop:nothing", True, 2, "shop has no 'nothing'"),
        ("shop:jobs --max-memory 1", True, 2, "before its first job"),
        ("shop:jobs", False, 1, "`sa-jobs db upgrade`"),
        ("broken:jobs", True, 1, "importing broken failed"),
        ("killed:jobs", True, 1, "was killed by SIGKILL"),
    ],
)
def test_what_no_process_can_start_with_is_said_once_and_ends_it_all(
    database_url: str,
    server_url: str,
    shop: Path,
    app: str,
    database: bool,
    code: int,
    says: str,
) -> None:
    (shop / "broken.py").write_text("raise RuntimeError('not like this')")
    (shop / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    ended = sa_jobs(
        "worker",
        *app.split(),
        "--processes=3",
        url=database_url if database else server_url,
        directory=shop,
    )

    assert (ended.code, ended.out) == (code, "")
    assert ended.error.count(says) == 1
    assert ended.error.count("before it served, and no other one serves") == 1
    assert ended.error.count(" started ") == 1
    assert "another one starts" not in ended.error


def test_a_start_that_fails_is_tried_again_while_another_process_serves(
    database_url: str, shop: Path
) -> None:
    with WorkerProcess(database_url, *TWO, app="shop:jobs", directory=shop) as worker:
        worker.wait_until_ready(2)
        (shop / "broken").touch()
        victim, survivor = worker.children
        os.kill(victim, signal.SIGKILL)
        wait_until(lambda: len(deaths(worker)) == 2, "the next one fails")
        assert "ended with exit code 1 before it served; another one starts" in deaths(worker)[1]
        (shop / "broken").unlink()
        worker.wait_until_ready(3)
        assert survivor in worker.children
        assert worker.stop() == EXIT_OK


def test_when_no_process_can_go_on_or_start_again_it_all_ends(
    database_url: str, engine: Engine, shop: Path
) -> None:
    with WorkerProcess(database_url, *TWO, app="shop:jobs", directory=shop) as worker:
        worker.wait_until_ready(2)
        with engine.begin() as connection:
            connection.execute(text("DROP TABLE sa_jobs CASCADE"))
        assert worker.wait(60) == 1
        assert "before it served, and no other one serves" in worker.log


# Stands for a worker that is stopped again and again; its fourth life is longer.
MORTAL = "printf x >>lives; if [ $(wc -c <lives) = 4 ]; then sleep 4; fi"


def test_the_back_off_grows_until_a_process_has_lived_for_a_while(tmp_path: Path) -> None:
    script = """
        import logging, sys
        from sa_jobs.supervisor import Supervisor

        logging.basicConfig(level="INFO")
        sys.exit(Supervisor(["sh", "-c", sys.argv[1]], 1, grace=1.0, settled=3.0).run())
    """
    log = tmp_path / "log"

    def delays() -> list[float]:
        found = re.findall(r"exit code 0; another one starts in ([\d.]+) s", log.read_text())
        return [float(seconds) for seconds in found]

    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(script), MORTAL], cwd=tmp_path, stderr=file
        )
    try:
        wait_until(lambda: len(delays()) == 4, "it ends four times")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == EXIT_OK
    finally:
        process.kill()
        process.wait()
    first, second, third, after_a_while = delays()
    assert 0.2 <= first <= 0.8
    assert 0.5 <= second <= 1.5
    assert 1.0 <= third <= 3.0
    assert 0.2 <= after_a_while <= 0.8


# The first life serves and dies; the second neither serves nor hears a signal; the third fails.
DEAF = """
import os, sys, time
with open("lives", "a") as file:
    file.write("x")
life = os.path.getsize("lives")
if life == 1:
    os.write(int(os.environ["SA_JOBS_LIFELINE"]), b"s")
    while os.path.getsize("lives") < 2:
        time.sleep(0.01)
elif life == 2:
    while True:
        time.sleep(60)
sys.exit(1)
"""


def test_a_failed_start_ends_it_all_even_if_another_process_hears_nothing(tmp_path: Path) -> None:
    script = """
        import logging, sys
        from sa_jobs.supervisor import Supervisor

        logging.basicConfig(level="INFO")
        sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]], 2, grace=0.0).run())
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), DEAF],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert ended.returncode == 1
    assert "before it served, and no other one serves: the supervisor ends" in ended.stderr
    assert ended.stderr.count("does not end, and is killed") == 1


# It says that it may drain for 30 seconds, and that it serves, and takes three.
SLOW = """
import os, signal, sys, time

def drain(number, frame):
    time.sleep(3)
    sys.exit(0)

signal.signal(signal.SIGTERM, drain)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
os.write(int(os.environ["SA_JOBS_LIFELINE"]), b"g30\\ns")
print("serves", flush=True)
while True:
    time.sleep(60)
"""


def test_a_process_may_drain_for_as_long_as_it_says_itself(tmp_path: Path) -> None:
    """The supervisor knows the command line, and not what the application's settings say."""
    script = """
        import sys
        from sa_jobs.supervisor import Supervisor, supervisor

        supervisor.LAST_SECONDS = 0.5
        sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]], 1, grace=0.0).run())
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), SLOW],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serves\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == EXIT_OK
        finally:
            process.kill()


# An application that takes its memory when the worker is idle.
GROWING = """
import threading, time

def grow() -> None:
    time.sleep(2)
    globals()["held"] = b"x" * (300 << 20)

threading.Thread(target=grow, daemon=True).start()
"""


def test_a_limit_of_memory_that_no_idle_process_keeps_ends_it_all(
    database_url: str, shop: Path
) -> None:
    with (shop / "shop.py").open("a") as file:
        file.write(GROWING)
    options = (*TWO, "--max-memory", "250")
    with WorkerProcess(database_url, *options, app="shop:jobs", directory=shop) as worker:
        assert worker.wait(60) == 2
        assert "before its first job: give it more" in worker.log
        assert "has done enough" not in worker.log


# --- processes that have done enough ------------------------------------------------------------


def test_after_its_jobs_a_process_is_replaced_and_no_job_is_cut_short(
    app_database: str, engine: Engine
) -> None:
    long = add(engine, "sleep", seconds=3.0)
    others = add_many(engine, "quick", 20)
    most = 0
    with WorkerProcess(app_database, *TWO, "--max-jobs", "5", "--grace", "1") as worker:

        def all_ended() -> bool:
            nonlocal most
            most = max(most, len(worker.children))
            return unfinished(engine) == 0

        wait_until(all_ended, "every job ends", seconds=60)
        wait_until(lambda: worker.log.count("has done enough") >= 4, "four were replaced")
        assert worker.stop() == EXIT_OK
        assert deaths(worker) == []

    assert most == 2
    assert max(pids_of_starts(engine).values()) == 5
    for job_id in (long, *others):
        assert (status(engine, job_id), job(engine, job_id).claim_no) == ("done", 1)


def test_one_process_ends_after_its_jobs_with_a_code_of_its_own(
    app_database: str, engine: Engine
) -> None:
    add_many(engine, "quick", 4)
    with WorkerProcess(app_database, "--max-jobs", "3") as worker:
        assert worker.wait() == EXIT_RECYCLED

    assert unfinished(engine) == 1
    assert sum(pids_of_starts(engine).values()) == 3


def test_one_process_ends_when_it_holds_too_much_memory(app_database: str, engine: Engine) -> None:
    with WorkerProcess(app_database, "--max-memory", "300") as worker:
        small = add(engine, "keeps_memory", mib=20)
        wait_until(lambda: status(engine, small) == "done", "the small one is done")
        large = add(engine, "keeps_memory", mib=300)
        assert worker.wait() == EXIT_RECYCLED
        assert "MiB of 300" in worker.log

    assert (status(engine, large), job(engine, large).attempts) == ("done", 1)


def test_a_signal_bounds_the_end_of_a_process_that_has_done_enough(
    app_database: str, engine: Engine
) -> None:
    job_id = add(engine, "sleep", seconds=60.0)
    with WorkerProcess(app_database, "--max-jobs", "1", "--grace", "1") as worker:
        wait_until(lambda: starts_of(engine, job_id), "the job starts")
        wait_until(lambda: "the worker ends when these have" in worker.log, "it takes no more")
        assert worker.stop() == EXIT_HANDED_BACK

    assert (status(engine, job_id), job(engine, job_id).attempts) == ("ready", 0)


# --- signals ------------------------------------------------------------------------------------


def to_the_supervisor(worker: WorkerProcess, number: signal.Signals) -> None:
    worker.send(number)


def to_all(worker: WorkerProcess, number: signal.Signals) -> None:
    os.killpg(worker.pid, number)


def give_each_a_job(worker: WorkerProcess, engine: Engine, end: Path) -> list[int]:
    """Let two processes of one slot run a job each, until the file `end` is there."""
    worker.wait_until_ready(2)
    ids = add_many(engine, "until", 2, path=str(end))
    wait_until(lambda: len(pids_of_starts(engine)) == 2, "both processes run a job")
    return ids


@pytest.mark.parametrize(
    ("send", "number"),
    [(to_the_supervisor, signal.SIGTERM), (to_all, signal.SIGINT)],
    ids=["to the supervisor", "of a terminal"],
)
def test_the_first_signal_drains_every_process(
    app_database: str,
    engine: Engine,
    tmp_path: Path,
    send: Callable[[WorkerProcess, signal.Signals], None],
    number: signal.Signals,
) -> None:
    with WorkerProcess(app_database, *TWO, "--concurrency", "1", in_session=True) as worker:
        ids = give_each_a_job(worker, engine, tmp_path / "end")
        send(worker, number)
        wait_until(lambda: worker.log.count("stopping: 1 jobs") == 2, "both drain")
        later = add(engine, "quick")
        (tmp_path / "end").touch()
        assert worker.wait() == EXIT_OK
        assert "Traceback" not in worker.log

    assert [(status(engine, id), job(engine, id).claim_no) for id in ids] == [("done", 1)] * 2
    assert status(engine, later) == "ready"


@pytest.mark.parametrize("send", [to_the_supervisor, to_all], ids=["to the supervisor", "to all"])
def test_five_signals_at_once_end_at_once_and_hand_back(
    app_database: str,
    engine: Engine,
    tmp_path: Path,
    send: Callable[[WorkerProcess, signal.Signals], None],
) -> None:
    with WorkerProcess(app_database, *TWO, "--concurrency", "1", in_session=True) as worker:
        ids = give_each_a_job(worker, engine, tmp_path / "never")
        for _ in range(5):
            send(worker, signal.SIGTERM)
            time.sleep(0.02)
        assert worker.wait() == EXIT_HANDED_BACK
        assert "and is killed" not in worker.log
        assert "Traceback" not in worker.log
        assert "Exception ignored" not in worker.log

    assert [(status(engine, id), job(engine, id).attempts) for id in ids] == [("ready", 0)] * 2


def test_the_exit_code_is_the_worst_of_the_processes(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    """One is killed while it drains, one hands its job back."""
    options = (*TWO, "--concurrency", "1", "--grace", "2")
    with WorkerProcess(app_database, *options) as worker:
        give_each_a_job(worker, engine, tmp_path / "never")
        worker.send(signal.SIGTERM)
        os.kill(worker.children[0], signal.SIGKILL)
        assert worker.wait() == 1
        assert f"ended with exit code {EXIT_HANDED_BACK}" in worker.log


def test_signals_while_processes_start_end_them_in_peace(database_url: str, shop: Path) -> None:
    """While Python itself starts, while our modules load, while the application's do."""
    (shop / "shop.py").write_text(f"import time\ntime.sleep(60)\n{SHOP}")
    for send, pause in ((to_all, 0.0), (to_the_supervisor, 0.1), (to_all, 0.3), (to_all, 0.8)):
        with WorkerProcess(
            database_url, *TWO, app="shop:jobs", directory=shop, in_session=True
        ) as worker:
            wait_until(partial(has_begun, worker), "the first one starts")
            time.sleep(pause)
            for _ in range(5):
                send(worker, signal.SIGINT)
            assert worker.wait() == EXIT_OK, worker.log
            assert "and is killed" not in worker.log
            assert "Traceback" not in worker.log
            assert "Exception ignored" not in worker.log


def has_begun(worker: WorkerProcess) -> bool:
    return " started " in worker.log


@pytest.mark.parametrize("stops", [1, 2])
def test_a_process_that_cannot_hear_is_killed_in_the_end(app_database: str, stops: int) -> None:
    """After one signal when the time to drain is over, too."""
    with WorkerProcess(app_database, *TWO, "--grace", "1" if stops == 1 else "300") as worker:
        worker.wait_until_ready(2)
        frozen = worker.children[0]
        os.kill(frozen, signal.SIGSTOP)
        worker.send(signal.SIGTERM)
        wait_until(lambda: worker.children == [frozen], "the other one ends")
        for _ in range(stops - 1):
            worker.send(signal.SIGTERM)
        assert worker.wait() == 1
        assert f"process {frozen} does not end, and is killed" in worker.log


def test_without_their_supervisor_the_processes_drain(
    app_database: str, engine: Engine, tmp_path: Path
) -> None:
    with WorkerProcess(app_database, *TWO, "--concurrency", "1") as worker:
        ids = give_each_a_job(worker, engine, tmp_path / "end")
        children = worker.children
        worker.send(signal.SIGKILL)
        worker.wait()
        wait_until(
            lambda: worker.log.count("the supervisor is gone: the worker drains") == 2, "both drain"
        )
        (tmp_path / "end").touch()
        wait_until(lambda: all(map(is_gone, children)), "the processes end")

    assert [(status(engine, id), job(engine, id).claim_no) for id in ids] == [("done", 1)] * 2


def in_container() -> tuple[str, ...]:
    """Return what runs a command as the first process of a process namespace."""
    command = ("unshare", "--pid", "--fork", "--mount-proc")
    try:
        possible = subprocess.run([*command, "true"], check=False, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if possible.returncode:
        pytest.skip("this user may make no process namespace")
    return command


def test_as_the_first_process_of_a_container_it_ends_and_reaps(
    app_database: str, engine: Engine
) -> None:
    program = (*in_container(), *MODULE)
    with WorkerProcess(app_database, *TWO, program=program) as outside:
        outside.wait_until_ready(2)
        [first] = psutil.Process(outside.pid).children()
        assert len(first.children()) == 2
        add(engine, "leaves_a_process", seconds=1.0)
        wait_until(lambda: len(first.children()) == 3, "it adopts what was left behind")
        wait_until(lambda: len(first.children()) == 2, "and reaps it")
        first.send_signal(signal.SIGTERM)
        assert outside.wait() == EXIT_OK
        assert "Traceback" not in outside.log
