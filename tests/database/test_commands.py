"""The operator's commands against a database, run in this process."""

from __future__ import annotations

import datetime as dt
import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine, func, insert, make_url, text
from sqlalchemy.exc import NotSupportedError

from sa_jobs.cli import main
from sa_jobs.cli.jobs import MAX_READ_BYTES
from sa_jobs.models import DEFAULT_TABLES
from tests.support.commands import Ended
from tests.support.jobs import add, all_jobs, change, job
from tests.support.waiting import wait_until

MINUTE = dt.timedelta(minutes=1)

Cli = Callable[..., Ended]


@pytest.fixture
def cli(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Cli:
    """Run `sa-jobs` on the test's database: a new one with tables, or `url`."""

    def run(*arguments: str, url: str | None = None) -> Ended:
        database = url or request.getfixturevalue("database_url")
        monkeypatch.setenv("SA_JOBS_DATABASE_URL", database)
        code = main(list(arguments))
        return Ended(code, *capsys.readouterr())

    return run


def printed(ended: Ended) -> Any:
    """Return the JSON document that a command printed."""
    assert (ended.code, ended.error) == (0, "")
    assert ended.out.isascii()
    return json.loads(ended.out)


# --- enqueue ------------------------------------------------------------------------------------


def test_enqueue_adds_a_job_and_prints_its_id(cli: Cli, connection: Connection) -> None:
    ended = cli(
        "enqueue",
        "send",
        "--payload",
        '{"é": [1, 2.5, null, 12345678901234567890]}',
        "--queue=mail",
        "--priority=-3",
        "--run-at=2030-01-31T09:00:00+01:00",
        "--idempotency-key=k",
        "--unique-key=u",
        "--tenant=t",
        "--max-attempts=7",
    )

    (added,) = all_jobs(connection)
    assert ended == Ended(0, f"{added.id}\n", "")
    assert (added.handler, added.queue, added.priority) == ("send", "mail", -3)
    assert added.payload == {"é": [1, 2.5, None, 12345678901234567890]}
    assert added.run_at == dt.datetime(2030, 1, 31, 8, tzinfo=dt.timezone.utc)
    assert (added.idempotency_key, added.unique_key, added.tenant) == ("k", "u", "t")
    assert added.max_attempts == 7


def test_enqueue_has_the_librarys_defaults(cli: Cli, connection: Connection) -> None:
    assert cli("enqueue", "send").code == 0

    (added,) = all_jobs(connection)
    assert (added.queue, added.priority, added.max_attempts) == ("default", 0, 20)
    assert added.payload == {}
    assert added.run_at == added.created_at


def test_enqueue_takes_a_delay_and_a_payload_from_standard_input(
    cli: Cli, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}')))

    assert cli("enqueue", "send", "--payload", "-", "--delay", "90.5").code == 0

    (added,) = all_jobs(connection)
    assert added.payload == {"a": 1}
    assert added.run_at - added.created_at == dt.timedelta(seconds=90.5)


def test_a_key_that_is_taken_prints_the_existing_id_and_says_so(cli: Cli) -> None:
    first = cli("enqueue", "send", "--idempotency-key", "k")
    second = cli("enqueue", "send", "--idempotency-key", "k")

    assert (second.code, second.out) == (0, first.out)
    assert second.one_line() == "nothing was added: this job has the key already"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["send", "--payload", '{"a": NaN}'], "payload['a'] is nan"),
        (["send", "--payload", r'{"a": "\u0000"}'], "payload['a'] contains a NUL"),
        (["send", "--payload", r'{"a": "\ud800"}'], "payload['a'] contains a lone surrogate"),
        (["send", "--payload", '{"a": 1, "a": 2}'], "an object has the key 'a' twice"),
        (["send", "--payload", '{"a": [{"b": {}, "b": {}}]}'], "an object has the key 'b' twice"),
        (["send", "--payload", r'{"a": 1, "\u0061": 1}'], "an object has the key 'a' twice"),
        ([""], "handler must not be empty"),
        (["\udcff"], "handler contains a lone surrogate"),
        (["a\x1b]0;x\x07"], "handler must not contain control characters"),
        (["send", "--queue", "q" * 201], "queue"),
        (["send", "--idempotency-key", ""], "idempotency_key must not be empty"),
    ],
)
def test_what_the_queue_cannot_hold_is_one_line_and_code_2(
    cli: Cli, connection: Connection, arguments: list[str], says: str
) -> None:
    ended = cli("enqueue", *arguments)

    assert (ended.code, ended.out) == (2, "")
    assert says in ended.one_line()
    assert "\x1b" not in ended.error
    assert all_jobs(connection) == []


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (b"\xff", "standard input is not UTF-8 (byte 1)"),
        (b'{"a": "\xe9"}', "standard input is not UTF-8 (byte 8)"),
        (b"", "not JSON"),
        (b'{"a": 1, "a": 2}', "an object has the key 'a' twice"),
        (b" " * (MAX_READ_BYTES + 1), "standard input holds more than 16000000 bytes"),
        (None, "standard input is closed"),
    ],
    ids=["binary", "latin1", "nothing", "twice", "endless", "closed"],
)
def test_a_standard_input_that_is_no_payload_is_one_line_and_code_2(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, given: bytes | None, says: str
) -> None:
    stream = None if given is None else io.TextIOWrapper(io.BytesIO(given), "ascii")
    monkeypatch.setattr(sys, "stdin", stream)

    ended = cli("enqueue", "send", "--payload", "-")

    assert (ended.code, ended.out) == (2, "")
    assert says in ended.one_line()


def test_a_payload_from_standard_input_is_utf8_whatever_the_locale(
    cli: Cli, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = '\ufeff{"é": "🚀"}'.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), "ascii"))

    assert cli("enqueue", "send", "--payload", "-").code == 0
    (added,) = all_jobs(connection)
    assert added.payload == {"é": "🚀"}


CHECK = "ALTER TABLE sa_jobs ADD CHECK (payload->>'pin' IS NULL)"
TRIGGER = """
    CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        RAISE EXCEPTION 'not today' USING DETAIL = NEW.payload, HINT = NEW.payload;
    END $$;
    CREATE TRIGGER guard BEFORE INSERT ON sa_jobs FOR EACH ROW EXECUTE FUNCTION guard()
"""
CAST = """
    CREATE FUNCTION guard() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        NEW.tenant := ('[' || (NEW.payload->>'pin'))::json; RETURN NEW;
    END $$;
    CREATE TRIGGER guard BEFORE INSERT ON sa_jobs FOR EACH ROW EXECUTE FUNCTION guard()
"""


@pytest.mark.parametrize(
    ("guard", "says"),
    [
        (CHECK, "violates check constraint"),
        (TRIGGER, "not today (SQLSTATE P0001)"),
        (CAST, "invalid input syntax for type json (SQLSTATE 22P02)"),
    ],
)
def test_a_refusal_of_the_database_shows_nothing_of_the_row(
    cli: Cli, empty_database: str, guard: str, says: str
) -> None:
    cli("db", "upgrade", url=empty_database)
    engine = create_engine(empty_database, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(guard))

    ended = cli("enqueue", "send", "--payload", '{"pin": "hunter2-XYZ"}', url=empty_database)

    assert (ended.code, ended.out) == (1, "")
    assert says in ended.one_line()
    assert "hunter2" not in ended.error
    assert cli("list", url=empty_database).out == "no jobs\n"


# --- list and show ------------------------------------------------------------------------------


def test_list_shows_a_line_for_each_job(cli: Cli, connection: Connection) -> None:
    assert cli("list") == Ended(0, "no jobs\n", "")
    first = add(connection, "send", queue="mail", attempts=3, last_error="Trace\nValueError: no")
    add(connection, "other", status="done")

    lines = cli("list").out.splitlines()

    assert lines[0].split() == [
        "id",
        "status",
        "queue",
        "handler",
        "attempts",
        "run",
        "at",
        "error",
    ]
    assert [line.split()[3] for line in lines[1:]] == ["other", "send"]
    assert f"{first}" in lines[2]
    assert "3/20" in lines[2]
    assert lines[2].endswith("ValueError: no")
    assert lines == [line.rstrip() for line in lines]
    assert len(cli("list", "--status", "done").out.splitlines()) == 2
    assert len(cli("list", "--queue", "mail", "--handler", "send").out.splitlines()) == 2
    assert cli("list", "--queue", "mail", "--handler", "other").out == "no jobs\n"


def test_list_prints_json_with_times_in_utc(cli: Cli, connection: Connection) -> None:
    job_id = add(connection, "sénd", tenant="\x7f\x1b", payload={"a": "hunter2"})

    (row,) = printed(cli("list", "--json"))

    assert (row["id"], row["handler"], row["tenant"]) == (job_id, "sénd", "\x7f\x1b")
    assert dt.datetime.fromisoformat(row["run_at"]).utcoffset() == dt.timedelta()
    assert "payload" not in row


def test_stored_text_cannot_act_on_the_terminal(cli: Cli, connection: Connection) -> None:
    evil = "\x1b]0;owned\x07\r\u202eevil[bold]"
    job_id = add(connection, evil, queue=evil, last_error=f"first\n{evil}", idempotency_key=evil)
    fail(connection, job_id, f"Traceback\n  {evil}")

    for arguments in (["list"], ["status"], ["show", str(job_id)]):
        ended = cli(*arguments)
        assert ended.code == 0
        assert not set("\x1b\x07\r\u202e") & set(ended.out)
        assert "\\x1b]0;owned\\x07\\r\\u202eevil[bold]" in ended.out
    row = printed(cli("show", str(job_id), "--json"))
    assert row["handler"] == evil


def fail(connection: Connection, job_id: int, error: str) -> None:
    connection.execute(
        insert(DEFAULT_TABLES.failures).values(
            job_id=job_id,
            queue="default",
            handler="send",
            attempt=1,
            claim_no=1,
            worker="host:1",
            error=error,
        )
    )
    connection.commit()


def test_show_has_the_history_and_hides_the_contents_unless_asked(
    cli: Cli, connection: Connection
) -> None:
    job_id = add(
        connection,
        payload={"token": "hunter2"},
        result={"answer": "hunter2"},
        meta={"progress": "hunter2"},
        status="done",
    )
    fail(connection, job_id, "Traceback\n  line\nValueError: bad")

    plain = cli("show", str(job_id))
    assert plain.code == 0
    assert "hunter2" not in plain.out
    assert "attempt 1 failed at " in plain.out
    assert plain.out.endswith(" on host:1\n    Traceback\n      line\n    ValueError: bad\n")
    assert "hunter2" not in cli("show", str(job_id), "--json").out

    assert cli("show", str(job_id), "--payload").out.count("hunter2") == 3
    whole = printed(cli("show", str(job_id), "--payload", "--json"))
    assert whole["payload"] == {"token": "hunter2"}
    assert whole["result"] == {"answer": "hunter2"}
    assert whole["failures"][0]["error"] == "Traceback\n  line\nValueError: bad"


def test_a_list_of_what_no_row_can_be_called_is_wrong_usage(cli: Cli) -> None:
    ended = cli("list", "--queue", "\udcff")

    assert (ended.code, ended.out) == (2, "")
    assert "queue contains a lone surrogate" in ended.one_line()


def test_show_of_no_job_fails(cli: Cli) -> None:
    ended = cli("show", "7")

    assert (ended.code, ended.out) == (1, "")
    assert ended.one_line() == "sa-jobs: there is no job 7"


@pytest.mark.parametrize("moment", ["infinity", "-infinity", "4000-01-01 BC", "20000-01-01"])
def test_times_that_no_datetime_can_hold_are_shown(
    cli: Cli, connection: Connection, moment: str
) -> None:
    written: Any = text(f"'{moment}'")
    job_id = add(connection, run_at=written, created_at=written)
    fail(connection, job_id, "ValueError: bad")
    connection.execute(text(f"UPDATE sa_jobs_failures SET failed_at = '{moment}'"))
    connection.commit()

    year = "0001-01-0" if moment in ("-infinity", "4000-01-01 BC") else "9999-12-3"
    for arguments in (["list"], ["show", str(job_id)]):
        ended = cli(*arguments)
        assert (ended.code, ended.error) == (0, "")
        assert year in ended.out
    assert f"attempt 1 failed at {year}" in cli("show", str(job_id)).out
    (listed,) = printed(cli("list", "--json"))
    assert listed["run_at"].startswith(year)
    assert printed(cli("show", str(job_id), "--json"))["created_at"] == listed["created_at"]
    assert printed(cli("status", "--json"))["queues"][0]["queue"] == "default"
    assert cli("status").code == 0


def test_contents_are_printed_as_they_are_stored(cli: Cli, connection: Connection) -> None:
    digits, depth = "1" + "0" * 5_000, "[" * 3_000 + "]" * 3_000
    job_id = add(connection)
    connection.execute(
        text(
            "UPDATE sa_jobs SET payload = CAST(:payload AS jsonb),"
            " result = CAST(:result AS jsonb), meta = CAST(:meta AS jsonb)"
        ),
        {
            "payload": f'{{"n": {digits}, "x": 0.12345678901234567890123, "y": 1.5e400}}',
            "result": depth,
            "meta": '{"é🚀": "\u202e\\u001b\x7f\\""}',
        },
    )
    connection.commit()

    plain = cli("show", str(job_id), "--payload")
    assert (plain.code, plain.error) == (0, "")
    ended = cli("show", str(job_id), "--payload", "--json")
    assert (ended.code, ended.error) == (0, "")
    assert ended.out.isascii()
    assert "\x7f" not in ended.out
    for text_ in (plain.out, ended.out):
        assert f'"n": {digits}, "x": 0.12345678901234567890123, "y": 15000' in text_
        assert depth in text_
    assert '"meta": {"\\u00e9\\ud83d\\ude80": "\\u202e\\u001b\\u007f\\""}' in ended.out


# --- retry and cancel ---------------------------------------------------------------------------


def test_retry_says_what_came_of_each_job(cli: Cli, connection: Connection) -> None:
    dead = add(connection, status="dead", attempts=20)
    cancelled = add(connection, status="cancelled")
    done = add(connection, status="done")
    twin = add(connection, status="dead", unique_key="u")
    add(connection, unique_key="u")
    gone = 2**62

    ended = cli("retry", *map(str, (dead, done, twin, gone, cancelled)))

    assert ended == Ended(
        1,
        f"{dead}: ready again\n"
        f"{done}: not retried: only a dead or cancelled job can be\n"
        f"{twin}: not retried: another job with its unique key waits or runs\n"
        f"{gone}: there is no such job\n"
        f"{cancelled}: ready again\n",
        "",
    )
    assert (job(connection, dead).status, job(connection, dead).attempts) == ("ready", 0)
    assert job(connection, cancelled).status == "ready"
    change(connection, dead, status="dead")
    assert cli("retry", str(dead)).code == 0


def test_cancel_says_what_came_of_each_job(cli: Cli, connection: Connection) -> None:
    ready = add(connection)
    running = add(
        connection, status="running", locked_by="worker-1", leased_until=func.now() + MINUTE
    )
    done = add(connection, status="done")

    ended = cli("cancel", str(ready), str(running))
    assert ended == Ended(
        0,
        f"{ready}: cancelled\n"
        f"{running}: is running; its handler is told to stop with the next heartbeat\n",
        "",
    )
    assert job(connection, ready).status == "cancelled"
    assert job(connection, running).cancel_requested_at is not None
    assert cli("cancel", str(done), str(2**62)) == Ended(
        1,
        f"{done}: not cancelled: it has ended already\n{2**62}: there is no such job\n",
        "",
    )


# --- status -------------------------------------------------------------------------------------


def add_worker(connection: Connection, **values: Any) -> None:
    row = {
        "id": "host:7",
        "host": "host",
        "pid": 7,
        "version": "0",
        "queues": ["default"],
        "handlers": ["send"],
        "concurrency": 8,
        "running": 3,
        "heartbeat_at": func.now() - dt.timedelta(seconds=2),
        "alive_until": func.now() + MINUTE,
    }
    connection.execute(insert(DEFAULT_TABLES.workers).values({**row, **values}))
    connection.commit()


def test_status_shows_queues_workers_and_jobs_that_nobody_takes(
    cli: Cli, connection: Connection
) -> None:
    add(connection, "send", run_at=func.now() - MINUTE)
    for _ in range(3):
        add(connection, "unknown", run_at=func.now())
    add(connection, "send", run_at=func.now() + MINUTE)
    add(connection, status="dead")
    add(connection, status="running", locked_by="gone", leased_until=func.now() - MINUTE)
    add_worker(connection)

    lines = cli("status").out.splitlines()

    assert lines[0].split() == ["queue", "ready", "scheduled", "running", "oldest", "ready"]
    assert lines[1].split() == ["default", "4", "1", "1", "1", "min", "0", "s"]
    assert lines[3] == "dead jobs: 1, expired leases: 1"
    assert lines[5].split() == ["worker", "pid", "queues", "running", "last", "heartbeat"]
    assert lines[6].split() == ["host", "7", "default", "3", "of", "8", "2", "s", "ago"]
    assert lines[8:] == ["warning: 3 ready jobs, no live worker for handler unknown"]


def test_status_without_anything_says_so(cli: Cli) -> None:
    assert cli("status") == Ended(
        0,
        "no ready or running jobs\n\ndead jobs: 0, expired leases: 0\n\nno live workers\n",
        "",
    )


def test_status_warns_of_lost_jobs_that_no_worker_can_take_back(
    cli: Cli, connection: Connection
) -> None:
    add(connection, status="running", locked_by="gone", leased_until=func.now() - MINUTE)

    assert "warning: 1 running job of lost workers, and no live worker to take them back" in (
        cli("status").out
    )


def test_status_prints_json(cli: Cli, connection: Connection) -> None:
    add(connection, "unknown")
    add_worker(connection)

    found = printed(cli("status", "--json"))

    assert found["queues"][0]["ready"] == {"value": 1, "capped": False}
    assert found["dead"] == {"value": 0, "capped": False}
    assert found["workers"][0]["handlers"] == ["send"]
    assert found["warnings"] == ["1 ready job, no live worker for handler unknown"]


# --- the tables ---------------------------------------------------------------------------------


def test_without_tables_every_command_says_what_to_run(cli: Cli, empty_database: str) -> None:
    for arguments in (
        ["status"],
        ["list"],
        ["show", "1"],
        ["enqueue", "send"],
        ["retry", "1"],
        ["cancel", "1"],
        ["db", "check"],
    ):
        ended = cli(*arguments, url=empty_database)
        assert (ended.code, ended.out) == (1, "")
        assert "sa-jobs db upgrade" in ended.one_line()


def test_db_upgrade_creates_the_tables_and_the_other_commands_find_them(
    cli: Cli, empty_database: str
) -> None:
    place = ("--schema", "ours", "--name", "q")
    assert cli("db", "current", *place, url=empty_database) == Ended(0, "none\n", "")

    first = cli("db", "upgrade", *place, url=empty_database)
    assert (first.code, first.error) == (0, "")
    assert first.out.startswith("sa_jobs_0001  Create the ")
    assert "nothing to do" in cli("db", "upgrade", *place, url=empty_database).out

    assert cli("db", "current", *place, url=empty_database).out.startswith("sa_jobs_")
    assert "newest step" in cli("db", "check", *place, url=empty_database).out
    assert cli("enqueue", "send", *place, url=empty_database).out == "1\n"
    assert "send" in cli("list", *place, url=empty_database).out
    assert "no live worker for handler send" in cli("status", *place, url=empty_database).out
    assert cli("cancel", "1", *place, url=empty_database).out == "1: cancelled\n"
    assert cli("list", url=empty_database).code == 1


def test_tables_of_a_newer_release_are_refused(cli: Cli, connection: Connection) -> None:
    connection.execute(
        text("UPDATE sa_jobs_step SET revision = 'sa_jobs_9999', min_client = '99.0.0'")
    )
    connection.commit()

    ended = cli("list")

    assert ended.code == 1
    assert "for sa-jobs 99.0.0 or newer" in ended.one_line()


def test_reading_commands_work_on_a_server_that_only_reads(
    cli: Cli, connection: Connection, database_url: str
) -> None:
    add(connection)
    standby = make_url(database_url).update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    url = standby.render_as_string(hide_password=False)

    for arguments in (["status"], ["list"], ["show", "1"], ["db", "check"]):
        assert cli(*arguments, url=url).code == 0
    refused = cli("enqueue", "send", url=url)
    assert refused.code == 1
    assert "name the primary server" in refused.one_line()


@pytest.fixture
def other_database(server_url: str) -> Iterator[Callable[[str], str]]:
    """Create a database with options of CREATE DATABASE, and return its URL."""
    admin = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    names: list[str] = []

    def create(options: str) -> str:
        name = f"sa_jobs_test_{uuid4().hex}"
        with admin.connect() as connection:
            try:
                connection.execute(
                    text(f"CREATE DATABASE {name} TEMPLATE template0 LOCALE 'C' {options}")
                )
            except NotSupportedError as error:
                pytest.skip(str(error.orig))
        names.append(name)
        return make_url(server_url).set(database=name).render_as_string(hide_password=False)

    yield create
    with admin.connect() as connection:
        for name in names:
            connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.mark.parametrize(
    ("options", "holds_all"),
    [
        ("ENCODING 'LATIN1'", False),
        ("ENCODING 'SQL_ASCII'", True),
        ("ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'en'", True),
    ],
    ids=["LATIN1", "SQL_ASCII", "ICU"],
)
def test_a_database_of_any_encoding_will_do(
    cli: Cli, other_database: Callable[[str], str], options: str, holds_all: bool
) -> None:
    url = other_database(options)
    assert cli("db", "upgrade", url=url).code == 0

    assert cli("enqueue", "é", "--queue", "Ä", "--payload", '{"ü": "ß"}', url=url).out == "1\n"
    for arguments in (["list"], ["status"], ["show", "1"]):
        ended = cli(*arguments, url=url)
        assert (ended.code, ended.error) == (0, "")
        assert "Ä" in ended.out
    assert '{"ü": "ß"}' in cli("show", "1", "--payload", url=url).out
    assert printed(cli("show", "1", "--payload", "--json", url=url))["payload"] == {"ü": "ß"}

    for arguments in (["enqueue", "🚀"], ["enqueue", "h", "--payload", '{"a": "🚀 hunter2"}']):
        ended = cli(*arguments, url=url)
        if holds_all:
            assert (ended.code, ended.error) == (0, "")
        else:
            assert (ended.code, ended.out) == (1, "")
            assert "this database's encoding does not have the character" in ended.one_line()
            assert "hunter2" not in ended.error
    named = f"{url}{'&' if '?' in url else '?'}client_encoding=latin1"
    ended = cli("enqueue", "🚀", url=named)
    assert ended.code == 1
    assert "can't encode character" in ended.one_line()


def test_text_in_another_encoding_than_the_databases_is_one_line(
    cli: Cli, other_database: Callable[[str], str]
) -> None:
    url = other_database("ENCODING 'SQL_ASCII'")
    cli("db", "upgrade", url=url)
    engine = create_engine(url, poolclass=NullPool, connect_args={"client_encoding": "latin1"})
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO sa_jobs (queue, handler) VALUES ('\xe9', 'send')"))

    ended = cli("list", url=url)
    assert ended.code == 1
    assert "name it in the URL, as ?client_encoding=latin1" in ended.one_line()
    named = f"{url}{'&' if '?' in url else '?'}client_encoding=latin1"
    assert "é" in cli("list", url=named).out


@pytest.mark.parametrize("style", ["SQL, DMY", "German", "Postgres, MDY"])
def test_a_database_may_write_dates_in_any_style(
    cli: Cli, connection: Connection, database_url: str, style: str
) -> None:
    add(connection)
    styled = make_url(database_url).update_query_dict(
        {"options": f"-c datestyle={style.replace(' ', '')}"}
    )
    url = styled.render_as_string(hide_password=False)

    for arguments in (["list"], ["show", "1"], ["status"], ["enqueue", "send", "--delay", "1"]):
        ended = cli(*arguments, url=url)
        assert (ended.code, ended.error) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["db", "upgrade", "--schema", 'a"b'], "must be a plain identifier"),
        (["db", "upgrade", "--schema", "Üml"], "must be a plain identifier"),
        (["db", "current", "--name", "a b"], "must be a plain identifier"),
        (["db", "check", "--schema", ""], "must be a plain identifier"),
        (["db", "check", "--name", "x" * 60], "is too long"),
        (["db", "upgrade", "--to", "nonsense"], "'nonsense' is not a step of sa-jobs"),
        (["db", "upgrade", "--to", ""], "'' is not a step of sa-jobs"),
        (["show", "1", "--schema", "\x1b[31m"], "schema='\\x1b[31m' must be a plain identifier"),
    ],
)
def test_names_that_cannot_be_are_wrong_usage(
    cli: Cli, empty_database: str, arguments: list[str], says: str
) -> None:
    ended = cli(*arguments, url=empty_database)

    assert (ended.code, ended.out) == (2, "")
    assert says in ended.one_line()
    assert cli("db", "current", url=empty_database).out == "none\n"


@pytest.fixture
def weak_url(server_url: str, database_url: str) -> Iterator[str]:
    """The URL of the database for a role that may connect, and nothing else."""
    role = f"sa_jobs_weak_{uuid4().hex[:12]}"
    admin = create_engine(server_url, poolclass=NullPool, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'pw-ABC'"))
    try:
        url = make_url(database_url).set(username=role, password="pw-ABC")
        yield url.render_as_string(hide_password=False)
    finally:
        with admin.connect() as connection:
            connection.execute(text(f"DROP ROLE {role}"))


def test_a_missing_permission_is_one_line_that_names_the_table(
    cli: Cli, weak_url: str, engine: Engine
) -> None:
    with engine.begin() as connection:
        role = make_url(weak_url).username
        connection.execute(text(f"GRANT SELECT ON sa_jobs_step TO {role}"))

    try:
        for arguments in (["list"], ["enqueue", "send"], ["status"]):
            ended = cli(*arguments, url=weak_url)
            assert (ended.code, ended.out) == (1, "")
            assert "permission denied for table sa_jobs" in ended.one_line()
            assert "pw-ABC" not in ended.error
    finally:
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))


def test_a_database_that_does_not_exist_is_one_line_without_the_password(
    cli: Cli, database_url: str
) -> None:
    url = make_url(database_url).set(database="no_such_database")
    url = url.set(password=url.password or "pw-ABC")

    ended = cli("list", url=url.render_as_string(hide_password=False))

    assert ended.code == 1
    assert 'database "no_such_database" does not exist' in ended.one_line()
    assert f":{url.password}@" not in ended.error


def test_no_command_leaves_a_connection_behind(cli: Cli, connection: Connection) -> None:
    add(connection)
    for arguments in (["status"], ["list"], ["show", "1"], ["cancel", "1"], ["db", "check"]):
        cli(*arguments)

    def all_are_gone() -> bool:
        others = connection.scalar(
            text(
                "SELECT count(*) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'sa-jobs'"
            )
        )
        connection.commit()
        return bool(others == 0)

    # The server ends a session a moment after its client has closed it.
    wait_until(all_are_gone, "no connection is left", seconds=5)
