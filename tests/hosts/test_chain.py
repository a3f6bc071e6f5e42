"""What a host may do with its chain besides: scripts, tests of its own, several deploys at once."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.engine import make_url

from sa_jobs.migrations._lock import LOCK_KEY
from tests.hosts.application import FLASK, PLAIN, FlaskLayout, Host, Layout
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import NEXT_STEP, THIS_STEP, Environments, steps
from tests.hosts.test_layouts import KINDS, MAIL
from tests.migrations.schema import execute, libpq, marker, objects, pg_dump
from tests.support.commands import Ended
from tests.support.postgres import create_database, drop_database, embedded_bin, system_bin

pytestmark = pytest.mark.hosts

BOTH = pytest.mark.parametrize("layout", [PLAIN, FLASK], ids=["plain", "flask"])

# More rows than an index is built on while writers wait.
MANY_ROWS = (
    "INSERT INTO sa_jobs (queue, handler) SELECT 'mail', 'send' FROM generate_series(1, 10001)"
)


def adopted(host: Host) -> Host:
    """Let the host have the revision of the tables, without running it."""
    host.adopt()
    host.migrate("add job queue")
    return host


def psql(url: str, script: str) -> None:
    """Run a script as an operator does."""
    program = next(
        directory / "psql"
        for directory in (system_bin(), embedded_bin())
        if directory is not None and (directory / "psql").exists()
    )
    ended = subprocess.run(
        [program, "--no-psqlrc", "--quiet", "-v", "ON_ERROR_STOP=1", libpq(url)],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""


@BOTH
def test_scripts_do_the_same_in_psql(
    layout: Layout,
    make_host: MakeHost,
    environments: Environments,
    empty_database: str,
    another_database: str,
) -> None:
    host = adopted(make_host(layout))
    host.upgrade()
    host = host.in_environment(environments.get("next"))
    host.migrate("upgrade job queue")
    host.upgrade()

    script = standard_output(host, "upgrade", "base:head", "--sql")
    assert "%%" not in script
    psql(another_database, script)
    assert pg_dump(another_database) == pg_dump(empty_database)

    psql(another_database, standard_output(host, "downgrade", "head:base", "--sql"))
    assert objects(another_database) == set()


def test_every_way_to_the_newest_step_makes_the_same(
    make_host: MakeHost, server_url: str, empty_database: str
) -> None:
    host = make_host()
    host.adopt()
    host.python(CREATE_ALL)
    whole = pg_dump(empty_database)

    for step in steps():
        for path in host.revisions:
            path.unlink()
        url = create_database(server_url, f"{make_url(empty_database).database}_{step}")
        try:
            host.edit("alembic.ini", (host.url, url))
            host.url = url
            host.command("sa-jobs", "migrations", "new", "--to", step)
            host.upgrade()
            assert marker(url) == [step]
            source = host.migrate("the rest")
            assert ("sa_jobs.migrations.upgrade(" in source) is (step != THIS_STEP)
            host.upgrade()
            assert pg_dump(url) == whole
        finally:
            drop_database(server_url, str(make_url(url).database))


CREATE_ALL = """
    import os
    import models
    from sqlalchemy import create_engine
    models.Base.metadata.create_all(create_engine(os.environ["SHOP_DATABASE_URL"]))
"""


def standard_output(host: Host, *arguments: str) -> str:
    """Return what a command writes on standard output alone."""
    ended = host.run(*arguments)
    assert ended.code == 0, ended.error
    return ended.out


# What pytest-alembic asks its users for.
CONNECTION = (
    "    connectable = engine_from_config(",
    "    connectable = config.attributes.get('connection') or engine_from_config(",
)

PYTEST_ALEMBIC = """\
import os

import pytest
from pytest_alembic.tests import *
from sqlalchemy import create_engine, text


@pytest.fixture
def alembic_engine():
    engine = create_engine(os.environ["SHOP_DATABASE_URL"])
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    return engine
"""


def test_pytest_alembic_passes(make_host: MakeHost, environments: Environments) -> None:
    host = adopted(make_host(Layout(env=(CONNECTION,))))
    host.upgrade()
    host = host.in_environment(environments.get("next"))
    (host.directory / "test_migrations.py").write_text(PYTEST_ALEMBIC)
    (host.directory / "pytest.ini").write_text("[pytest]\npytest_alembic_enabled = false\n")

    # As `alembic check`, it says so where the package has a step more than the chain.
    ended = run_pytest(host)
    assert "1 failed, 3 passed" in ended.out, ended.out
    assert "sa_jobs" in ended.out

    host.migrate("upgrade job queue")
    ended = run_pytest(host)
    assert "4 passed" in ended.out, ended.out
    assert ended.code == 0


def run_pytest(host: Host) -> Ended:
    """Run the host's tests."""
    options = ("-q", "-p", "no:cacheprovider")
    return host.environment.run(
        "-m", "pytest", *options, directory=host.directory, variables=host.variables
    )


def test_a_later_revision_that_fails_leaves_nothing(
    make_host: MakeHost, empty_database: str
) -> None:
    host = adopted(make_host())
    host.ok("revision", "-m", "fails")
    (failing,) = [path for path in host.revisions if path.stem.endswith("_fails")]
    source = failing.read_text()
    failing.write_text(source.replace("    pass\n", "    op.execute('SELECT 1 / 0')\n", 1))

    ended = host.run("upgrade", "head")

    assert ended.code == 1
    assert "division by zero" in ended.error
    assert objects(empty_database) == set()
    assert versions(empty_database) == []

    failing.write_text(source)
    host.upgrade()
    assert marker(empty_database) == [THIS_STEP]
    host.check()


def versions(url: str) -> list[str]:
    """Return the rows of Alembic's version table; none where there is no such table."""
    with psycopg.connect(libpq(url)) as connection:
        try:
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall()
        except psycopg.errors.UndefinedTable:
            return []
        return [version for (version,) in rows]


@pytest.mark.parametrize("new", [False, True], ids=["existing-chain", "new-database"])
def test_six_deploys_at_once(
    new: bool, make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    host = make_host()
    host.migrate("invoices")
    host.upgrade()
    adopted(host)
    url = another_database if new else empty_database
    host.edit("alembic.ini", (empty_database, url))

    # All of them are in a transaction of theirs before one gets the lock of our migrations.
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        connection.execute("SELECT pg_advisory_lock(%s)", [LOCK_KEY])
        processes = [host.start("upgrade", "head") for _ in range(6)]
        wait_for_transactions(connection, 6)
    errors = [process.communicate(timeout=120)[1] for process in processes]

    codes = [process.returncode for process in processes]
    assert codes.count(0) == 1, errors
    for code, error in zip(codes, errors, strict=True):
        if code and new:
            # All of them were about to make Alembic's own table: that is before our turn.
            assert "CREATE TABLE alembic_version" in error
            assert "already exists" in error
            assert "sa_jobs" not in error
        elif code:
            assert "Online migration expected to match one row" in error.splitlines()[-1]
            assert "Traceback" not in error
    assert marker(url) == [THIS_STEP]
    made = pg_dump(url)
    host.upgrade()
    assert pg_dump(url) == made
    host.check()


def wait_for_transactions(connection: psycopg.Connection[tuple[int]], count: int) -> None:
    """Wait until that many other sessions of the database are in a transaction that can write."""
    for _ in range(3000):
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND (backend_xid IS NOT NULL OR query LIKE '%pg_try_advisory_xact_lock%')"
        ).fetchone()
        if row is not None and row[0] >= count:
            return
        time.sleep(0.02)
    raise AssertionError(f"there were never {count} migrations at once")


@BOTH
def test_what_cannot_be_done_is_said_in_one_line(
    layout: Layout, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host(layout)
    adopted(host)
    (revision,) = host.revisions
    source = revision.read_text()

    execute(empty_database, "CREATE TABLE sa_jobs (own int)")
    before = objects(empty_database)
    refusal = refused(host)
    assert 'there is a table "public"."sa_jobs" already' in refusal
    assert "choose another name= or schema=" in refusal
    assert objects(empty_database) == before
    execute(empty_database, "DROP TABLE sa_jobs")

    rewrite(revision, source.replace(THIS_STEP, "sa_jobs_9999"))
    refusal = refused(host)
    assert "the step 'sa_jobs_9999' needs a newer sa-jobs" in refusal
    assert "run `pip install --upgrade sa-jobs`" in refusal

    # A role that may make tables, and no schema.
    role = f"{make_url(empty_database).database}_role"
    execute(
        empty_database,
        "DROP TABLE IF EXISTS alembic_version",
        f'CREATE ROLE "{role}" LOGIN',
        f'GRANT USAGE, CREATE ON SCHEMA public TO "{role}"',
    )
    try:
        url = make_url(empty_database).set(username=role).render_as_string(hide_password=False)
        if layout is PLAIN:
            host.edit("alembic.ini", (empty_database, url))
        host.variables["SHOP_DATABASE_URL"] = url
        rewrite(revision, source.replace("schema=None", "schema='queue'"))
        refusal = refused(host)
        assert f'the role "{role}" may not create the schema "queue"' in refusal
        assert f'let its owner run: CREATE SCHEMA "queue" AUTHORIZATION "{role}"' in refusal
        assert objects(empty_database) == set()
        execute(empty_database, f'CREATE SCHEMA "queue" AUTHORIZATION "{role}"')
        host.upgrade()
    finally:
        execute(empty_database, f'DROP OWNED BY "{role}"', f'DROP ROLE "{role}"')


def rewrite(file: Path, source: str) -> None:
    """Give a module another source; within a second, Python would take the old one's code."""
    file.write_text(source)
    shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)


def refused(host: Host) -> str:
    """Upgrade the host, which must fail, and return the one line that says why."""
    ended = host.run("upgrade", *(() if isinstance(host.layout, FlaskLayout) else ("head",)))
    assert ended.code == (1 if isinstance(host.layout, FlaskLayout) else 255)
    assert "Traceback" not in ended.out + ended.error
    *log, last = ended.error.splitlines()
    assert all(line.startswith("INFO ") for line in log), ended.error
    return last


def test_two_queues_go_one_by_one(make_host: MakeHost, empty_database: str) -> None:
    host = make_host(KINDS["include-schemas"].layout)
    adopted(host)
    host.upgrade()
    first = pg_dump(empty_database)
    host.edit(host.layout.models, (host.layout.attach, KINDS["two-queues"].layout.attach))
    source = host.migrate("add mail queue")
    assert source.count("sa_jobs.migrations.upgrade(") == 1
    host.upgrade()
    host.check()
    assert marker(empty_database) == marker(empty_database, MAIL) == [THIS_STEP]

    host.ok("downgrade", "-1")
    execute(empty_database, "DROP SCHEMA queue")
    assert pg_dump(empty_database) == first


# --- Large tables ---------------------------------------------------------------------------------


def with_many_jobs(host: Host, environments: Environments) -> Host:
    """Return the host with many jobs, after the package was upgraded, its revision not yet run."""
    adopted(host)
    host.upgrade()
    execute(host.url, MANY_ROWS)
    host = host.in_environment(environments.get("next"))
    host.migrate("upgrade job queue")
    return host


@pytest.mark.parametrize("kind", ["engine-begin", "advisory-lock"])
def test_a_large_table_in_a_transaction_that_is_not_alembics(
    kind: str, make_host: MakeHost, environments: Environments, empty_database: str
) -> None:
    host = with_many_jobs(make_host(KINDS[kind].layout), environments)

    refusal = refused(host)
    assert "must be built CONCURRENTLY" in refusal
    assert "sa-jobs db build-indexes" in refusal
    assert marker(empty_database) == [THIS_STEP]

    # The first of the ways out that it names.
    host.command("sa-jobs", "db", "build-indexes", "--database-url", empty_database)
    host.upgrade()
    host.check()


@pytest.mark.slow
def test_a_migration_that_is_killed_anywhere_is_completed_by_the_next(
    make_host: MakeHost, environments: Environments
) -> None:
    host = with_many_jobs(make_host(), environments)
    (host.directory / "killing.py").write_text(KILLING)

    at, completed = host.python(KILLED_UPGRADE).split()[-2:]

    assert int(at) > 15
    assert completed == NEXT_STEP


@pytest.mark.slow
def test_a_first_install_that_is_killed_anywhere_is_completed_by_the_next(
    make_host: MakeHost,
) -> None:
    host = adopted(make_host())
    (host.directory / "killing.py").write_text(KILLING)

    total, completed = host.python(KILLED_INSTALL).split()[-2:]

    assert int(total) > 30
    assert completed == THIS_STEP


# Each run is a process of its own, forked from one that has everything imported. Before its n-th
# statement or commit, it is killed, or its session in the server is.
KILLING = """\
import os
import signal
import sys
import traceback

import psycopg
import sa_jobs.migrations
from alembic.config import main
from sqlalchemy import Engine, event

URL = os.environ["SHOP_DATABASE_URL"].replace("+psycopg", "")


def kill(connection):
    os.kill(os.getpid(), signal.SIGKILL)


def terminate(connection):
    pid = connection.connection.dbapi_connection.info.backend_pid
    ask("SELECT pg_terminate_backend(%s)", pid)


def run(*arguments, end=kill, before=0):
    pid = os.fork()
    if pid:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        expected = {kill: -signal.SIGKILL, terminate: 1}[end] if before else 0
        assert status in (0, expected), (before, status, open("log").read())
        return status == 0
    count = 0

    def reached(connection, *_):
        nonlocal count
        count += 1
        if count == before:
            end(connection)

    event.listen(Engine, "before_cursor_execute", reached)
    event.listen(Engine, "commit", reached)
    os.dup2(os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    try:
        main([*arguments])
        with open("count", "w") as file:
            file.write(str(count))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ask(query, *values):
    with psycopg.connect(URL, autocommit=True) as connection:
        return connection.execute(query, values or None).fetchone()
"""

# Before its n-th statement, for every n; then another one completes, and is undone.
KILLED_UPGRADE = """
    import sa_jobs.migrations
    from killing import ask, run

    def state():
        return ask(
            "SELECT (SELECT count(*) FROM pg_index WHERE NOT indisvalid),"
            " to_regclass('sa_jobs_extra_idx') IS NOT NULL, (SELECT revision FROM sa_jobs_step)"
        )

    before, latest = sa_jobs.migrations.revisions()[-2:]
    n = 1
    while not run("upgrade", "head", before=n):
        assert state()[2] in (before.revision, latest.revision)
        run("upgrade", "head")
        assert state() == (0, True, latest.revision), (n, state())
        run("downgrade", "-1")
        assert state() == (0, False, before.revision), (n, state())
        n += 1
    print(n, state()[2])
"""

# All is one transaction, so that some points stand for the others.
KILLED_INSTALL = """
    import psycopg
    from killing import URL, ask, kill, run, terminate

    def state():
        (tables,) = ask(
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace"
            " AND relname NOT LIKE 'alembic_version%'"
        )
        return tables, ask("SELECT count(*) FROM pg_proc WHERE proname = 'sa_jobs_notify'")[0]

    def start_anew():
        with psycopg.connect(URL) as connection:
            connection.execute("DROP SCHEMA public CASCADE")
            connection.execute("CREATE SCHEMA public")

    run("upgrade", "head")
    total, whole = int(open("count").read()), state()
    for end in (kill, terminate):
        for n in {1, 2, 3, total // 4, total // 2, total - 1, total}:
            start_anew()
            assert not run("upgrade", "head", end=end, before=n)
            assert state() == (0, 0), (end, n, state())
            run("upgrade", "head")
            assert state() == whole, (end, n, state())
    print(total, *ask("SELECT revision FROM sa_jobs_step"))
"""
