"""What the migrations refuse: before anything is changed, in one line, with what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from alembic.util import CommandError
from sqlalchemy import Connection, Engine, MetaData, NullPool, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.schema import BLANK_SCHEMA

import sa_jobs.alembic
from sa_jobs import attach, migrations
from sa_jobs.errors import MigrationError, StepNotFoundError
from tests.migrations.schema import Host, create_all, execute, marker, objects, pg_dump

MakeHost = Callable[..., Host]

STEPS = [step.revision for step in migrations.revisions()]
FIRST, HEAD = STEPS[0], STEPS[-1]


def refused(work: Callable[[], Any], match: str, kind: type[Exception] = MigrationError) -> None:
    """Hold that an error of ours says so, in one line."""
    with pytest.raises(kind, match=match) as caught:
        work()
    assert "\n" not in str(caught.value)


# --- Autocommit -----------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["engine", "block"])
def test_a_revision_in_autocommit_changes_nothing(
    way: str, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host()
    host.add_steps()
    if way == "engine":
        host.edit_env(
            ('prefix="sqlalchemy.",', 'prefix="sqlalchemy.", isolation_level="AUTOCOMMIT",')
        )
    else:
        (file,) = host.directory.glob("versions/*.py")
        file.write_text(
            file.read_text().replace(
                "    sa_jobs.migrations.",
                "    with op.get_context().autocommit_block():\n        sa_jobs.migrations.",
            )
        )
    refused(host.upgrade, "in autocommit", CommandError)
    assert objects(empty_database) == set()

    create_all(empty_database)
    execute(
        empty_database,
        "CREATE TABLE IF NOT EXISTS alembic_version (version_num varchar(32))",
        "INSERT INTO alembic_version VALUES ('host_1')",
    )
    before = pg_dump(empty_database)
    with pytest.raises(MigrationError, match="in autocommit"):
        host.downgrade("-1")
    assert pg_dump(empty_database) == before
    assert marker(empty_database) == [HEAD]


# --- What is there already ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("CREATE TABLE sa_jobs_workers (own int)", "sa_jobs_workers"),
        ("CREATE TABLE sa_jobs_step (own int)", "sa_jobs_step"),
        ("CREATE TABLE sa_jobs_archive (own int)", "sa_jobs_archive"),
        ("CREATE VIEW sa_jobs_queues AS SELECT 1 AS own", "sa_jobs_queues"),
        ("CREATE TYPE sa_jobs_schedules AS (own int)", "sa_jobs_schedules"),
        (
            "CREATE FUNCTION sa_jobs_notify() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN END'",
            "sa_jobs_notify",
        ),
        ("CREATE TABLE own (id int CONSTRAINT sa_jobs_ready_idx PRIMARY KEY)", "sa_jobs_ready_idx"),
        ("CREATE TABLE own (id int CONSTRAINT sa_jobs_pkey PRIMARY KEY)", "sa_jobs_pkey"),
        ("CREATE SEQUENCE sa_jobs_finished_idx", "sa_jobs_finished_idx"),
    ],
)
def test_what_has_one_of_our_names_is_named_and_left_alone(
    statement: str, named: str, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    execute(empty_database, statement)
    before = objects(empty_database)

    with empty_engine.begin() as connection:
        refused(lambda: migrations.apply(connection), f"{named}.*another name=")
        assert connection.scalar(text("SELECT 1")) == 1
        migrations.apply(connection, name="other")
        migrations.revert(connection, "base", name="other")
        transaction = connection.get_transaction()
        assert transaction is not None
        transaction.rollback()
    host = make_host()
    host.add_steps()
    refused(host.upgrade, named)
    assert objects(empty_database) == before


def test_tables_that_create_all_made_beside_older_ones_are_named(
    make_host: MakeHost, empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    migrations.apply(empty_engine, STEPS[1])
    create_all(empty_database)
    host = make_host()
    host.add_steps()
    refused(host.upgrade, r"sa_jobs_0003 .*sa_jobs_archive.*create_all\(\).* drop it")
    with empty_engine.begin() as connection:
        refused(lambda: migrations.apply(connection), "sa_jobs_archive")
        assert migrations.current(connection) == STEPS[1]

    # What the text says helps.
    execute(empty_database, "DROP TABLE sa_jobs_archive")
    host.upgrade()
    create_all(another_database)
    assert pg_dump(empty_database) == pg_dump(another_database)


@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
def test_other_drivers_name_it_too(driver: str, empty_database: str) -> None:
    execute(empty_database, "CREATE TABLE sa_jobs_workers (own int)")
    engine = create_engine(empty_database.replace("+psycopg:", f"+{driver}:"), poolclass=NullPool)
    with engine.begin() as connection:
        refused(lambda: migrations.apply(connection), '"sa_jobs_workers" already exists; ')
        assert connection.scalar(text("SELECT 1")) == 1


def test_what_somebody_dropped_by_hand_is_named(empty_engine: Engine, empty_database: str) -> None:
    create_all(empty_database)
    execute(empty_database, "DROP TABLE sa_jobs_archive")
    with empty_engine.begin() as connection:
        refused(lambda: migrations.revert(connection, "base"), "sa_jobs_archive.* by hand")
        assert migrations.current(connection) == HEAD


# --- What hangs on the tables ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        (
            "CREATE TABLE own (job_id bigint CONSTRAINT own_fk REFERENCES sa_jobs (id))",
            "own_fk on table own",
        ),
        ("CREATE VIEW own AS SELECT schedule FROM sa_jobs", "view own"),
    ],
)
def test_what_depends_on_the_tables_stops_the_way_back(
    statement: str, named: str, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    host = make_host()
    host.add_steps()
    host.upgrade()
    execute(empty_database, statement)
    before = pg_dump(empty_database)

    refused(host.downgrade, f"{named} .*in your own revision")
    with empty_engine.begin() as connection:
        refused(lambda: migrations.revert(connection, "base"), named)
        assert connection.scalar(text("SELECT 1")) == 1

    assert pg_dump(empty_database) == before
    assert marker(empty_database) == [HEAD]


def test_below_the_chain_the_way_back_says_how_to_get_there(
    make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    host = make_host()
    host.add_steps(FIRST)
    host.add_steps(HEAD, FIRST)
    host.upgrade()
    migrations.revert(empty_engine, "base")
    refused(host.downgrade, f"`sa-jobs db upgrade --schema public --to {FIRST}`")
    migrations.apply(empty_engine, FIRST, schema="public")
    host.downgrade()
    assert objects(empty_database) == set()


# --- Privileges -----------------------------------------------------------------------------------


@pytest.fixture
def role(empty_database: str) -> Iterator[str]:
    """A role that owns nothing, and may do nothing but connect."""
    name = f"sa_jobs_role_{uuid4().hex}"
    execute(empty_database, f"CREATE ROLE {name}", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        yield name
    finally:
        execute(empty_database, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_a_role_that_may_not_do_something_is_told_what_to_ask_for(
    role: str, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    def as_role(work: Callable[[Connection], Any], match: str) -> None:
        with empty_engine.begin() as connection:
            connection.exec_driver_sql(f"SET LOCAL ROLE {role}")
            refused(lambda: work(connection), match)
            assert connection.scalar(text("SELECT 1")) == 1

    execute(empty_database, "CREATE SCHEMA queue")
    as_role(
        lambda c: migrations.apply(c, schema="queue"),
        f'GRANT CREATE, USAGE ON SCHEMA "queue" TO "{role}"',
    )
    as_role(migrations.apply, "may not create tables in the schema|no schema on the connection's")

    migrations.apply(empty_engine, FIRST, schema="queue")
    for look in (migrations.check, migrations.current):
        as_role(lambda c: look(c, schema="queue"), f'GRANT USAGE ON SCHEMA "queue" TO "{role}"')  # noqa: B023
    host = make_host()
    metadata = MetaData()
    attach(metadata, schema="queue")
    host.target(metadata)
    start = "        context.configure(\n            connection=connection"
    host.edit_env((start, f'        connection.exec_driver_sql("SET ROLE {role}")\n{start}'))
    execute(empty_database, "CREATE TABLE alembic_version (version_num varchar(32))")
    execute(empty_database, f"GRANT ALL ON alembic_version TO {role}")
    refused(host.autogenerate, f'GRANT USAGE ON SCHEMA "queue" TO "{role}"')

    execute(empty_database, f"GRANT USAGE ON SCHEMA queue TO {role}")
    as_role(lambda c: migrations.check(c, schema="queue"), 'GRANT SELECT ON "queue"."sa_jobs_step"')
    execute(empty_database, f"GRANT SELECT ON ALL TABLES IN SCHEMA queue TO {role}")
    as_role(lambda c: migrations.apply(c, schema="queue"), "as the owner of the tables.*GRANT")
    as_role(lambda c: migrations.revert(c, "base", schema="queue"), "as the owner of the tables")


# --- The marker -----------------------------------------------------------------------------------


def test_an_empty_marker_says_how_to_get_out(empty_engine: Engine, empty_database: str) -> None:
    create_all(empty_database)
    execute(empty_database, "DELETE FROM sa_jobs_step")
    with empty_engine.connect() as connection:
        status = migrations.check(connection)
    assert not status.usable
    assert status.command is not None
    assert "no tables" not in status.command
    insert = re.search(r"`(INSERT .*?)`", status.command)
    assert insert is not None
    refused(lambda: migrations.apply(empty_engine), re.escape(insert[1]))
    execute(empty_database, insert[1])
    assert migrations.apply(empty_engine) == ()


def test_tables_that_somebody_else_made_without_a_trigger_say_so(
    empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "DELETE FROM sa_jobs_step", "DROP FUNCTION sa_jobs_notify() CASCADE")
    with pytest.raises(MigrationError, match="generated on SQLite") as caught:
        migrations.apply(empty_engine)
    drop = re.search(r"`(DROP .*?)`", str(caught.value))
    assert drop is not None
    execute(empty_database, drop[1])
    assert migrations.apply(empty_engine) == migrations.revisions()


@pytest.mark.parametrize("min_client", ["garbage", ""])
def test_a_marker_without_a_version_is_not_usable(
    min_client: str, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    execute(
        empty_database,
        f"UPDATE sa_jobs_step SET revision = 'sa_jobs_9999', min_client = '{min_client}'",
    )
    with empty_engine.connect() as connection:
        status = migrations.check(connection)
    assert not status.usable
    assert status.command is not None
    assert f"{min_client!r} as the oldest release" in status.command


# --- Wrong arguments ------------------------------------------------------------------------------

NAMES: list[tuple[dict[str, Any], str]] = [
    ({"name": None}, "^name=None must be a plain identifier"),
    ({"name": 5}, "^name=5 must be"),
    ({"name": "n" * 40}, "at most 39 characters"),
    ({"name": "due"}, "^name='due' cannot be"),
    ({"schema": 5}, "^schema=5 must be"),
    ({"schema": "pg_x"}, "^schema='pg_x' is a schema of PostgreSQL's own"),
    ({"schema": BLANK_SCHEMA}, "^schema=BLANK_SCHEMA is for attach"),
]


@pytest.mark.parametrize(("names", "match"), NAMES, ids=lambda value: str(value)[:30])
def test_names_that_attach_refuses_are_refused_everywhere(
    names: dict[str, Any], match: str, make_host: MakeHost, empty_engine: Engine
) -> None:
    with empty_engine.begin() as connection:
        works: list[Callable[..., Any]] = [
            lambda **options: migrations.apply(connection, **options),
            lambda **options: migrations.revert(connection, "base", **options),
            lambda **options: migrations.build_indexes(empty_engine, **options),
            lambda **options: migrations.check(connection, **options),
            lambda **options: migrations.current(connection, **options),
            migrations.script,
        ]
        for work in works:
            refused(lambda: work(**names), match)  # noqa: B023
    if BLANK_SCHEMA in names.values():
        return
    host = make_host()
    arguments = ", ".join(f"{key}={value!r}" for key, value in names.items())
    host.add_revision(f"sa_jobs.migrations.upgrade({HEAD!r}, {arguments})")
    refused(host.upgrade, match)
    host.add_revision("pass")
    host._last = None
    other = host.add_revision(f"sa_jobs.migrations.downgrade(None, from_={HEAD!r}, {arguments})")
    refused(lambda: host.upgrade(other), match)


OPTIONS: list[dict[str, Any]] = [
    {"wait_seconds": "5"},
    {"wait_seconds": None},
    {"wait_seconds": -1},
    {"wait_seconds": float("nan")},
    {"concurrently": 0},
    {"concurrently": 1},
    {"concurrently": []},
    {"lock_timeout": "0"},
    {"lock_timeout": "0 s"},
    {"lock_timeout": "99999999999999s"},
    {"lock_attempts": "5"},
    {"lock_attempts": True},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_options_that_cannot_be_are_named(option: dict[str, Any], empty_engine: Engine) -> None:
    ((name, value),) = option.items()
    refused(lambda: migrations.apply(empty_engine, **option), f"^{name}={re.escape(repr(value))} ")


def test_steps_that_cannot_be_are_named(make_host: MakeHost, empty_engine: Engine) -> None:
    wrong: Any = 3
    none: Any = None
    for work in (
        lambda: migrations.apply(empty_engine, wrong),
        lambda: migrations.revert(empty_engine, wrong),
        lambda: migrations.build_indexes(empty_engine, wrong),
        lambda: migrations.script(wrong),
        lambda: migrations.script(from_=wrong),
    ):
        refused(work, "^3 is no step of sa-jobs: it has sa_jobs_0001", StepNotFoundError)
    for back in (none, "base"):
        for work in (
            lambda: migrations.apply(empty_engine, back),  # noqa: B023
            lambda: migrations.build_indexes(empty_engine, back),  # noqa: B023
        ):
            refused(work, f"^to={back!r} means no tables, which is the way back")
    host = make_host()
    host.add_revision("sa_jobs.migrations.upgrade(None, from_=None)")
    refused(host.upgrade, "^to=None means no tables")
    host._last = None
    other = host.add_revision("sa_jobs.migrations.downgrade(None, from_=None)")
    refused(lambda: host.upgrade(other), "^from_=None: say the step")


def test_what_is_no_connection_is_named(empty_database: str, empty_engine: Engine) -> None:
    pytest.importorskip("greenlet")
    from sqlalchemy.ext.asyncio import create_async_engine

    wrong: list[tuple[Any, str]] = [
        (empty_database, "not the str given: `with create_engine"),
        (None, "not None: "),
        (create_async_engine(empty_database), r"AsyncEngine given: .*connection\.run_sync\("),
        (Session(empty_engine), r"Session given: .*\(session\.connection\(\)\)"),
    ]
    for value, match in wrong:
        refused(lambda: migrations.apply(value), match)  # noqa: B023
        refused(lambda: migrations.revert(value, "base"), match)  # noqa: B023
        refused(lambda: migrations.check(value), match)  # noqa: B023
        refused(lambda: migrations.current(value), match)  # noqa: B023
        refused(lambda: migrations.build_indexes(value), r"^build_indexes\(\) takes an Engine")  # noqa: B023
    engine: Any = empty_engine
    refused(lambda: migrations.check(engine), r"^check\(\) takes a Connection, not the Engine")
    with empty_engine.connect() as connection:
        bind: Any = connection
        refused(lambda: migrations.build_indexes(bind), "takes an Engine, to leave")


def test_filters_name_what_they_do_not_take() -> None:
    wrong: Any
    for filter_ in (sa_jobs.alembic.include_name, sa_jobs.alembic.include_object):
        for wrong, match in [
            ("sa_jobs", r"not 'sa_jobs': .*attach\(MetaData\(\)"),
            (lambda *_: True, "as also="),
            (None, "not None"),
        ]:
            refused(lambda: filter_(wrong), match)  # noqa: B023
            refused(lambda: filter_(wrong), match, CommandError)  # noqa: B023
        refused(lambda: filter_(also="own"), "^also='own' must be a function")  # type: ignore[arg-type]  # noqa: B023
