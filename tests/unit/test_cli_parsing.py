"""What the commands make of what is typed, loaded, logged and shown; no database."""

from __future__ import annotations

import datetime as dt
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import psycopg
import pytest
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    OperationalError,
    ProgrammingError,
    StatementError,
)

from sa_jobs import WorkerError
from sa_jobs.cli import main, worker_main
from sa_jobs.cli.loading import load_target
from sa_jobs.cli.logs import LineFormatter
from sa_jobs.cli.output import escaped, escaped_lines, shown, shown_age
from sa_jobs.cli.run import explain
from sa_jobs.worker.interruptions import STOP_SIGNALS

Written = pytest.CaptureFixture[str]

# --- usage --------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """A worker's start takes them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SA_JOBS_DATABASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)


def one_line(written: Written) -> str:
    out, error = written.readouterr()
    assert out == ""
    assert error.count("\n") == 1, error
    return error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lst"], "No such command 'lst'"),
        (["list", "--limt", "3"], "No such option"),
        (["list", "--limit", "0"], "0 is not in the range"),
        (["list", "--status", "scheduled"], "'scheduled' is not one of"),
        (["show"], "Missing argument 'ID'"),
        (["show", "x"], "'x' is not a valid integer"),
        (["show", str(2**63)], "is not in the range"),
        (["retry"], "Missing argument 'ID...'"),
        (["enqueue", "h", "--payload", "{"], "'--payload': not JSON: Expecting property name"),
        (["enqueue", "h", "--payload", "[1]"], "'--payload': it must be a JSON object"),
        (["enqueue", "h", "--payload", "[" * 100_000], "'--payload': not JSON"),
        (["enqueue", "h", "--run-at", "tomorrow"], "'tomorrow' is not a time like 2030-"),
        (["enqueue", "h", "--run-at", "2030-01-01T00:00"], "has no offset"),
        (["enqueue", "h", "--delay", "nan"], "nan is not a number of seconds"),
        (["enqueue", "h", "--delay", "-1"], "-1.0 is not a number of seconds"),
        (["enqueue", "h", "--priority", "40000"], "40000 is not in the range"),
        (["enqueue", "h", "--max-attempts", "0"], "0 is not in the range"),
        (["enqueue", "h", "--delay", "1", "--run-at", "2030-01-01T00:00Z"], "not both"),
        (["worker", "app:jobs", "--lease", "inf"], "inf is not a number of seconds"),
        (["worker", "app:jobs", "--concurrency", "0"], "0 is not in the range"),
        (["worker", "app:jobs", "--processes", "0"], "0 is not in the range"),
        (["worker", "app:jobs", "--max-jobs", "0"], "0 is not in the range"),
        (["worker", "app:jobs", "--max-memory", "1GB"], "'1GB' is not a valid integer"),
        (["list"], "no database is named: give a URL, or set SA_JOBS_DATABASE_URL"),
        (["list", "--database-url", "mysql://h/d"], "sa-jobs needs PostgreSQL"),
        (["worker", "tests.acceptance.app:jobs"], "no database is named"),
        (["worker", "app:jobs", "--database-url", "mysql://h/d"], "sa-jobs needs PostgreSQL"),
        (
            ["list", "--database-url", "postgresql://h/d", "--schema", "a-b"],
            "schema='a-b' must be a plain identifier",
        ),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(
    arguments: list[str], says: str, capsys: Written
) -> None:
    assert main(arguments) == 2

    error = one_line(capsys)
    assert error.startswith("sa-jobs")
    assert says in error


def test_a_payload_that_is_not_json_is_not_repeated(capsys: Written) -> None:
    assert main(["enqueue", "h", "--payload", '{"token": "hunter2"']) == 2

    assert "hunter2" not in one_line(capsys)


def test_without_arguments_there_is_help(capsys: Written) -> None:
    assert main([]) == 0
    assert "Commands:" in capsys.readouterr().out
    assert worker_main([]) == 0
    assert "MODULE:ATTR" in capsys.readouterr().out


def test_every_command_has_help(capsys: Written) -> None:
    for command in ("demo", "enqueue", "status", "list", "show", "retry", "cancel", "worker", "db"):
        assert main([command, "--help"]) == 0
        assert f"Usage: sa-jobs {command}" in capsys.readouterr().out


def test_a_worker_that_has_lost_its_supervisor_does_not_take_its_place(
    monkeypatch: pytest.MonkeyPatch, capsys: Written
) -> None:
    """Or the processes would multiply without end."""
    monkeypatch.setenv("SA_JOBS_LIFELINE", "999999")
    arguments = ["app:jobs", "--processes", "4", "--database-url", "postgresql://h/d"]
    assert worker_main(arguments) == 1

    assert "SA_JOBS_LIFELINE is '999999', which is no socket" in one_line(capsys)


def test_a_worker_loads_neither_rich_nor_alembic_nor_flask() -> None:
    script = (
        "import sys, sa_jobs.cli\n"
        "assert 'alembic' not in sys.modules\n"
        # It attaches, and so tells Alembic's autogenerate of its tables.
        "import sa_jobs.demo.shop\n"
        "heavy = {'rich', 'flask', 'werkzeug', 'sqlalchemy.ext.asyncio'}\n"
        "sys.exit(' '.join(heavy & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )

    assert (ended.returncode, ended.stderr) == (0, "")


# --- MODULE:ATTR --------------------------------------------------------------------------------

APP = """
from types import SimpleNamespace
from sa_jobs import Jobs

jobs = Jobs()
number = 1
app = SimpleNamespace(extensions={"sa_jobs": SimpleNamespace(jobs=jobs)})
other_app = SimpleNamespace(extensions={})
container = SimpleNamespace(jobs=jobs)

def make_jobs(): return jobs
def make_app(debug=False): return app
def make_nothing(): return None
def make_it_of(name): return jobs
def fail(): raise ValueError("no setting X")
"""

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write_module(name: str, source: str) -> None:
        (tmp_path / f"{name}.py").write_text(source)

    write_module("cli_app", APP)
    yield write_module
    for name in set(sys.modules) - before:
        if name.startswith("cli_"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "attribute",
    ["jobs", "app", "container.jobs", "make_jobs", "make_jobs()", "make_app", "make_app()"],
)
def test_a_reference_may_name_a_registry_an_app_or_a_factory(write: Write, attribute: str) -> None:
    found = load_target(f"cli_app:{attribute}")

    assert found is sys.modules["cli_app"].jobs


@pytest.mark.parametrize(
    ("reference", "says"),
    [
        ("cli_app", "'cli_app' must be MODULE:ATTR, for example"),
        ("cli_app:", "must be MODULE:ATTR"),
        (":jobs", "must be MODULE:ATTR"),
        ("..:jobs", "must be MODULE:ATTR"),
        ("cli_app.:jobs", "must be MODULE:ATTR"),
        ("./cli_app:jobs", "must be MODULE:ATTR"),
        ("cli\0app:jobs", "must be MODULE:ATTR"),
        ("cli_app:jobs.", "must be MODULE:ATTR"),
        ("cli_app:.jobs", "must be MODULE:ATTR"),
        ("\udcff:jobs", "there is no module"),
        ("cli_ap:jobs", "there is no module 'cli_ap' in "),
        ("cli_app.sub:jobs", "there is no module 'cli_app.sub' in "),
        ("cli_app:job", "cli_app has no 'job' (did you mean jobs"),
        ("cli_app:queue", "cli_app has no 'queue' (did you mean jobs?)"),
        ("cli_app:container.job", "cli_app.container has no 'job' (did you mean jobs?)"),
        ("cli_app:number", "cli_app:number is an int, not a Jobs, or an application that"),
        ("cli_app:other_app", "cli_app:other_app is a SimpleNamespace, not a Jobs"),
        ("cli_app:make_nothing", "cli_app:make_nothing is a function, not a Jobs"),
        ("cli_app:Jobs", "cli_app:Jobs is the class Jobs, not a Jobs"),
        ("cli_app:make_it_of", "cannot be called without arguments (missing a required"),
    ],
)
def test_a_reference_that_leads_nowhere_says_where_it_ended(
    write: Write, reference: str, says: str
) -> None:
    with pytest.raises(click.UsageError) as raised:
        load_target(reference)

    assert says in raised.value.message


def test_a_module_that_lacks_another_one_names_that(write: Write) -> None:
    write("cli_lacking", "import cli_not_there")

    with pytest.raises(WorkerError, match="cli_lacking imports the module 'cli_not_there', which"):
        load_target("cli_lacking:jobs")


def test_an_error_of_the_applications_own_code_is_shown_where_it_happened(
    write: Write, capsys: Written
) -> None:
    write("cli_broken", "def start():\n    raise KeyError('SETTING')\nstart()\n")

    with pytest.raises(WorkerError, match="importing cli_broken failed: KeyError: 'SETTING'"):
        load_target("cli_broken:jobs")

    shown_trace = capsys.readouterr().err
    assert "cli_broken.py" in shown_trace
    assert "loading.py" not in shown_trace
    with pytest.raises(WorkerError, match="calling cli_app:fail failed: ValueError: no setting X"):
        load_target("cli_app:fail")


def test_an_application_that_ends_the_process_is_a_failure(write: Write) -> None:
    write("cli_leaves", "import sys\nsys.exit(0)\n")

    with pytest.raises(WorkerError, match="importing cli_leaves failed: SystemExit: 0"):
        load_target("cli_leaves:jobs")


TAKEN = r"""
import psycopg
from sqlalchemy.exc import IntegrityError

reason = psycopg.IntegrityError("taken\nDETAIL:  Key (pin)=(hunter2) exists.")
raise IntegrityError("INSERT", {"pin": "hunter2"}, reason)
"""


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("class Bad(Exception):\n    def __str__(self): return 1/0\nraise Bad\n", "Bad: its text"),
        (
            TAKEN,
            "taken",
        ),
    ],
)
def test_an_applications_error_is_shown_whatever_its_text_without_data(
    write: Write, capsys: Written, source: str, says: str
) -> None:
    write("cli_odd", source)

    with pytest.raises(WorkerError, match=says) as raised:
        load_target("cli_odd:jobs")
    assert "(hunter2)" not in str(raised.value)
    assert "'pin'" not in str(raised.value)


def test_a_handler_that_cannot_be_one_is_one_line(write: Write, capsys: Written) -> None:
    write("cli_wrong", "from sa_jobs import Jobs\n@Jobs().handler('h')\ndef h(*names): ...\n")

    with pytest.raises(WorkerError, match="importing cli_wrong failed: handler 'h'"):
        load_target("cli_wrong:jobs")

    assert capsys.readouterr().err == ""


# --- what is shown ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("plain text ~", "plain text ~"),
        ("Grüße, 日本語, עברית", "Grüße, 日本語, עברית"),
        ("family: 👨\u200d👩\u200d👧", "family: 👨\u200d👩\u200d👧"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\rb\nc\td", "a\\rb\\nc\\td"),
        ("\x9b31m\x7f\x00", "\\x9b31m\\x7f\\x00"),
        ("abc\u202edef\u2066", "abc\\u202edef\\u2066"),
        ("\u200f\u061c\u2028\u2029\ufeff", "\\u200f\\u061c\\u2028\\u2029\\ufeff"),
        ("\ud800", "\\ud800"),
        ("[bold]\\[red]", "[bold]\\[red]"),
    ],
)
def test_what_could_act_on_a_terminal_is_spelled_out(text: str, seen: str) -> None:
    assert escaped(text) == seen


def test_a_text_of_several_lines_keeps_them() -> None:
    assert escaped_lines("a\n\tb\r\n\x1b[2J") == ["a", "    b\\r", "\\x1b[2J"]


@pytest.mark.parametrize(
    ("seconds", "seen"),
    [
        (None, "-"),
        (-1, "0 s"),
        (59.9, "59 s"),
        (61, "1 min 1 s"),
        (3_600, "1 h 0 min"),
        (90_000, "1 d 1 h"),
        (864_000, "10 d 0 h"),
    ],
)
def test_an_age_is_shown_in_its_two_largest_units(seconds: float | None, seen: str) -> None:
    assert shown_age(seconds) == seen


def test_a_time_is_shown_with_its_offset() -> None:
    moment = dt.datetime(2030, 1, 31, 12, tzinfo=dt.timezone.utc)

    assert dt.datetime.fromisoformat(shown(moment)) == moment
    assert shown(dt.datetime.max.replace(tzinfo=dt.timezone.utc)).startswith("9999-12-31")
    assert shown(None) == "-"


# --- database errors ----------------------------------------------------------------------------


def failure(kind: type[DBAPIError], original: Exception) -> str:
    return explain(kind("SELECT 'hunter2'", {"token": "hunter2"}, original))


@pytest.mark.parametrize(
    ("original", "says"),
    [
        (
            psycopg.OperationalError(
                'connection failed: connection to server at "h", port 1 failed: Connection refused'
                "\n\tIs the server running on that host and accepting TCP/IP connections?"
            ),
            (
                'cannot reach the database (connection to server at "h", port 1 failed: Connection '
                "refused): check that the server runs, and the URL in --database-url, "
                "SA_JOBS_DATABASE_URL or DATABASE_URL"
            ),
        ),
        (
            psycopg.OperationalError("failed to resolve host 'half-of-pw@h': Name not known"),
            "cannot reach the database (failed to resolve host '***@h': Name not known): check",
        ),
        (
            psycopg.errors.InsufficientPrivilege("permission denied for table sa_jobs"),
            "permission denied for table sa_jobs: let the owner grant",
        ),
        (psycopg.errors.UndefinedTable("no table"), "no table: run `sa-jobs db check`"),
        (psycopg.errors.ReadOnlySqlTransaction("read only"), "name the primary server"),
        (psycopg.errors.QueryCanceled("canceling"), "canceling: try again later"),
        (psycopg.errors.DivisionByZero("division"), "refused the command: division (SQLSTATE 2201"),
        (
            psycopg.errors.CheckViolation("no\nDETAIL:  Failing row contains (hunter2)."),
            "the database refused the command: no (SQLSTATE 23514)",
        ),
        (
            psycopg.errors.BadCopyFileFormat("no\nCONTEXT:  COPY t, line 1: 'hunter2'"),
            "the database refused the command: no (SQLSTATE 22P04)",
        ),
    ],
)
def test_a_database_error_is_one_line_that_says_what_to_do(original: Exception, says: str) -> None:
    line = failure(OperationalError, original)

    assert says in line
    assert "\n" not in line
    assert "hunter2" not in line
    assert "SELECT" not in line


def test_what_the_driver_cannot_do_is_not_called_a_lost_database() -> None:
    line = failure(DataError, psycopg.DataError("timestamp too large (after year 10K): 'infinity'"))

    assert line == (
        "the database driver cannot do this: timestamp too large (after year 10K): 'infinity'"
    )


def test_an_error_of_sqlalchemys_own_is_shown_without_the_statement() -> None:
    error = StatementError("bad value", "SELECT 'hunter2'", {"a": "hunter2"}, ValueError("bad"))

    assert explain(error) == "bad"


def test_an_error_without_a_text_is_still_a_line() -> None:
    assert "no reason was given" in failure(ProgrammingError, psycopg.ProgrammingError(""))


# --- the worker's log ---------------------------------------------------------------------------


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("sa_jobs.worker", logging.INFO, __file__, 1, message, (), None)
    made.__dict__.update(fields)
    return made


def test_a_log_line_has_time_level_logger_message_and_the_jobs_fields() -> None:
    line = LineFormatter().format(
        record("done", job_attempt=2, job_id=7, job_queue="a b", job_handler="send", payload="x")
    )

    moment, rest = line.split(" ", 1)
    assert dt.datetime.fromisoformat(moment).utcoffset() is not None
    assert rest == (
        'INFO sa_jobs.worker done job_id=7 job_handler=send job_queue="a b" job_attempt=2'
    )


def test_a_log_record_stays_one_line_and_harmless() -> None:
    line = LineFormatter().format(record("a\nINFO fake\x1b[2J", job_queue="q\nx=1"))

    assert line.endswith('a\\nINFO fake\\x1b[2J job_queue="q\\nx=1"')


def test_a_log_record_has_no_data_of_a_database_error() -> None:
    original = psycopg.IntegrityError("taken\nDETAIL:  Key (pin)=(hunter2) already exists.")
    error = IntegrityError("INSERT", {"pin": "hunter2"}, original)
    made = logging.LogRecord("app", logging.ERROR, __file__, 1, "failed: %s", (error,), None)
    made.exc_info = (type(error), error, None)

    text = LineFormatter().format(made)

    assert text.count("taken") == 2
    assert "hunter2" not in text


def test_a_traceback_follows_its_line_indented() -> None:
    try:
        raise ValueError("bad\x1b value")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()

    first, *trace = LineFormatter().format(made).split("\n")

    assert first.endswith("INFO sa_jobs.worker failed")
    assert all(line.startswith("    ") for line in trace)
    assert trace[-1] == "    ValueError: bad\\x1b value"
