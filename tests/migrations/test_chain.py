"""What the steps promise: nothing left behind, nothing half done, nothing done twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from alembic import command
from sqlalchemy import Connection, Engine, NullPool, create_engine, event, text
from sqlalchemy.exc import ProgrammingError

from sa_jobs import Jobs, migrations
from sa_jobs.errors import MigrationError, SchemaVersionError, StepNotFoundError
from sa_jobs.migrations import SchemaStatus, Step
from tests.migrations.schema import (
    CUSTOM,
    DEFAULT,
    Host,
    Place,
    checkout_config,
    create_all,
    execute,
    marker,
    objects,
    pg_dump,
    schemas,
)
from tests.support.running import run_all

MakeHost = Callable[..., Host]

HEAD = migrations.revisions()[-1].revision
both_places = pytest.mark.parametrize(
    "place", [pytest.param(DEFAULT, id="default"), pytest.param(CUSTOM, id="schema-and-name")]
)


# --- There and back -------------------------------------------------------------------------------


@both_places
def test_revert_leaves_nothing_but_the_schema(
    place: Place, empty_engine: Engine, empty_database: str
) -> None:
    with empty_engine.begin() as connection:
        applied = migrations.apply(connection, **place.options)
    assert applied == migrations.revisions()
    assert objects(empty_database)

    with empty_engine.begin() as connection:
        undone = migrations.revert(connection, "base", **place.options)

    assert undone == applied[::-1]
    assert objects(empty_database) == set()
    assert schemas(empty_database) == {"public", place.schema or "public"}


@both_places
def test_a_host_goes_up_and_down_and_up(
    place: Place, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host(place=place)
    host.add_revision("op.execute('CREATE TABLE own (id int)')", "op.execute('DROP TABLE own')")
    own = host.add_steps()
    host.upgrade()
    up = pg_dump(empty_database)

    host.downgrade("-1")
    assert {name for name in objects(empty_database) if place.name in name} == set()
    host.upgrade()
    assert pg_dump(empty_database) == up
    host.downgrade("base")

    assert own == "host_2"
    assert objects(empty_database) == set()


def test_the_chain_in_a_host_environment_works_on_the_default_tables(
    make_host: MakeHost, empty_database: str
) -> None:
    """With our versions directory in `version_locations`, Alembic runs the step files itself."""
    config = make_host().config()
    directory = checkout_config(None).get_main_option("version_locations")
    assert directory is not None
    config.set_main_option("version_locations", directory)

    command.upgrade(config, "sa_jobs@head")
    assert marker(empty_database) == [HEAD]
    command.downgrade(config, "base")

    assert objects(empty_database) == set()


def test_a_program_may_run_the_chain_on_a_connection_of_its_own(
    empty_engine: Engine, empty_database: str
) -> None:
    config = checkout_config(None, CUSTOM)
    with empty_engine.connect() as connection:
        config.attributes["sa_jobs"]["connection"] = connection
        transaction = connection.begin()
        command.upgrade(config, "head")
        assert migrations.current(connection, **CUSTOM.options) == HEAD
        # The transaction is the program's.
        transaction.rollback()
    assert objects(empty_database) == set()


def test_a_table_of_the_host_that_refers_to_ours_stops_the_way_back(
    empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "CREATE TABLE own (job_id bigint REFERENCES sa_jobs (id))")
    before = objects(empty_database)

    with pytest.raises(Exception, match="own"), empty_engine.begin() as connection:
        migrations.revert(connection, "base")

    assert objects(empty_database) == before


# --- All or nothing -------------------------------------------------------------------------------


def count_statements(engine: Engine, work: Callable[[Connection], Any]) -> int:
    """Return how many statements the work runs; it is rolled back."""
    count = 0

    def counted(*_: Any) -> None:
        nonlocal count
        count += 1

    event.listen(engine, "before_cursor_execute", counted)
    with engine.connect() as connection:
        work(connection)
    event.remove(engine, "before_cursor_execute", counted)
    return count


class InjectedError(Exception):
    """Raised by a test in the midst of a migration."""


def fail_at(engine: Engine, number: int) -> Callable[..., None]:
    """Let the statement of that number fail, once it has run."""
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            raise InjectedError

    event.listen(engine, "after_cursor_execute", fail)
    return fail


def test_a_failure_at_any_statement_leaves_nothing_and_the_next_run_completes(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    create_all(another_database, CUSTOM)
    total = count_statements(empty_engine, lambda c: migrations.apply(c, **CUSTOM.options))
    assert total > 15

    for number in range(1, total + 1):
        listener = fail_at(empty_engine, number)
        with pytest.raises(InjectedError), empty_engine.begin() as connection:
            migrations.apply(connection, **CUSTOM.options)
        event.remove(empty_engine, "after_cursor_execute", listener)
        assert objects(empty_database) == set()
        assert schemas(empty_database) == {"public"}

    with empty_engine.begin() as connection:
        migrations.apply(connection, **CUSTOM.options)
    assert pg_dump(empty_database) == pg_dump(another_database)


def test_a_failure_on_the_way_back_leaves_everything(
    empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    before = pg_dump(empty_database)
    total = count_statements(empty_engine, lambda c: migrations.revert(c, "base"))

    for number in range(1, total + 1):
        listener = fail_at(empty_engine, number)
        with pytest.raises(InjectedError), empty_engine.begin() as connection:
            migrations.revert(connection, "base")
        event.remove(empty_engine, "after_cursor_execute", listener)
        assert pg_dump(empty_database) == before
        assert marker(empty_database) == [HEAD]


def test_a_later_host_revision_that_fails_takes_our_tables_back_too(
    make_host: MakeHost, empty_database: str
) -> None:
    host = make_host()
    host.add_steps()
    host.add_revision("op.execute('SELECT 1 FROM absent')")

    with pytest.raises(ProgrammingError, match="absent"):
        host.upgrade()

    assert objects(empty_database) == set()


# --- Nothing twice --------------------------------------------------------------------------------


@both_places
def test_on_a_create_all_database_every_way_up_changes_nothing(
    place: Place, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database, place)
    before = pg_dump(empty_database)
    host = make_host(place=place)
    host.add_steps()

    with empty_engine.begin() as connection:
        assert migrations.apply(connection, **place.options) == ()
    host.upgrade()
    command.upgrade(checkout_config(empty_database, place), "head")

    assert pg_dump(empty_database) == before
    assert marker(empty_database, place) == [HEAD]


def test_each_way_up_may_be_undone_by_another(
    make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    host = make_host()
    host.add_steps()
    host.upgrade()
    command.upgrade(checkout_config(empty_database), "head")
    with empty_engine.begin() as connection:
        migrations.revert(connection, "base")
    assert objects(empty_database) == set()

    # The others still believe that the tables are there, and find nothing to do.
    command.downgrade(checkout_config(empty_database), "base")
    host.downgrade()


def test_two_queues_in_one_database_go_their_own_ways(
    empty_engine: Engine, empty_database: str
) -> None:
    for place in (DEFAULT, CUSTOM, Place("queue")):
        with empty_engine.begin() as connection:
            migrations.apply(connection, **place.options)

    with empty_engine.begin() as connection:
        migrations.revert(connection, "base", **CUSTOM.options)
        assert migrations.current(connection, **CUSTOM.options) is None
        assert migrations.current(connection) == HEAD
        assert migrations.current(connection, schema="queue") == HEAD


# --- Several steps --------------------------------------------------------------------------------


def columns(url: str, table: str = "sa_jobs") -> set[str]:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return set(
            connection.scalars(
                text("SELECT column_name FROM information_schema.columns WHERE table_name = :t"),
                {"t": table},
            )
        )


def test_a_host_takes_one_step_at_a_time(
    second_step: Step, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host()
    host.add_steps(HEAD)
    host.upgrade()
    assert marker(empty_database) == [HEAD]
    assert "added" not in columns(empty_database)

    host.add_steps(second_step.revision, HEAD)
    host.upgrade()
    assert marker(empty_database) == [second_step.revision]
    assert "added" in columns(empty_database)

    host.downgrade("-1")
    assert marker(empty_database) == [HEAD]
    assert "added" not in columns(empty_database)


def test_offline_the_steps_between_are_written(second_step: Step, make_host: MakeHost) -> None:
    host = make_host()
    first = host.add_steps(HEAD)
    second = host.add_steps(second_step.revision, HEAD)

    whole = host.upgrade_script()
    rest = host.upgrade_script(f"{first}:{second}")
    back = host.downgrade_script(f"{second}:{first}")

    assert whole.count("CREATE TABLE") == 8
    assert whole.count("ADD COLUMN added") == 1
    assert "CREATE TABLE" not in rest
    assert "ADD COLUMN added" in rest
    assert f"SET revision = '{HEAD}'" in back
    assert "DROP TABLE" not in back


def test_apply_runs_only_what_is_missing(
    second_step: Step, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    with empty_engine.begin() as connection:
        assert migrations.apply(connection, HEAD) == ()
        assert migrations.apply(connection) == (second_step,)
        assert migrations.apply(connection) == ()
        # An older step than the tables have is there already; it is no way back.
        assert migrations.apply(connection, HEAD) == ()
        assert migrations.current(connection) == second_step.revision
        assert migrations.revert(connection, HEAD) == (second_step,)
        assert migrations.current(connection) == HEAD
        assert migrations.revert(connection, HEAD) == ()


def test_there_is_no_way_back_to_a_step_that_the_tables_lack(
    second_step: Step, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    with (
        pytest.raises(MigrationError, match=f"not at {second_step.revision} or later"),
        empty_engine.begin() as connection,
    ):
        migrations.revert(connection, second_step.revision)


def test_going_back_undoes_newer_steps_than_the_host_knows(
    second_step: Step, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    host = make_host()
    host.add_steps(HEAD)
    host.upgrade()
    with empty_engine.begin() as connection:
        migrations.apply(connection)

    host.downgrade()

    assert objects(empty_database) == set()


def test_tables_that_are_behind_the_host_are_refused(
    second_step: Step, make_host: MakeHost, empty_engine: Engine
) -> None:
    host = make_host()
    host.add_steps(second_step.revision, HEAD)

    with pytest.raises(MigrationError, match=f"at {HEAD} or later, and they are absent"):
        host.upgrade()


def test_a_step_file_alone_is_refused_out_of_order(
    second_step: Step, make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    module = "sa_jobs.migrations._steps"
    host = make_host()
    host.add_revision(f"import {module} as s; s._modules()[-1].upgrade()")
    with pytest.raises(MigrationError, match=f"{second_step.revision} needs {HEAD}"):
        host.upgrade()

    create_all(empty_database)
    host.upgrade()
    assert marker(empty_database) == [second_step.revision]
    host.add_revision(f"import {module} as s; s._modules()[-2].downgrade()")
    with pytest.raises(MigrationError, match=f"cannot be undone before {second_step.revision}"):
        host.upgrade()


# --- Errors ---------------------------------------------------------------------------------------


def test_a_step_of_a_newer_package_is_named(make_host: MakeHost) -> None:
    host = make_host()
    host.add_steps("sa_jobs_9999")
    with pytest.raises(
        StepNotFoundError, match=r"'sa_jobs_9999' needs a newer sa-jobs .*pip install"
    ):
        host.upgrade()


def test_tables_newer_than_the_package_are_left_alone(
    empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "UPDATE sa_jobs_step SET revision = 'sa_jobs_9999'")
    for work in (migrations.apply, lambda c: migrations.revert(c, "base")):
        with (
            pytest.raises(SchemaVersionError, match=r"at sa_jobs_9999, which sa-jobs .* does not"),
            empty_engine.begin() as connection,
        ):
            work(connection)


def test_a_table_of_the_same_name_is_left_alone(empty_engine: Engine, empty_database: str) -> None:
    execute(empty_database, "CREATE TABLE sa_jobs (own int)")
    with (
        pytest.raises(MigrationError, match=r'there is a table "public"\."sa_jobs" already'),
        empty_engine.begin() as connection,
    ):
        migrations.apply(connection)


def test_an_empty_marker_is_named(empty_engine: Engine, empty_database: str) -> None:
    create_all(empty_database)
    execute(empty_database, "DELETE FROM sa_jobs_step")
    with (
        pytest.raises(MigrationError, match=r'"public"\."sa_jobs_step" is empty'),
        empty_engine.begin() as connection,
    ):
        migrations.apply(connection)


def test_a_missing_schema_is_named(empty_engine: Engine, empty_database: str) -> None:
    with (
        pytest.raises(MigrationError, match='no schema "queue"'),
        empty_engine.begin() as connection,
    ):
        migrations.apply(connection, schema="queue", create_schema=False)

    execute(empty_database, "CREATE SCHEMA queue")
    with empty_engine.begin() as connection:
        assert migrations.apply(connection, schema="queue", create_schema=False)


def test_a_role_that_may_not_create_the_schema_is_told_what_to_ask_for(
    empty_engine: Engine, empty_database: str
) -> None:
    role = f"sa_jobs_role_{empty_engine.url.database}"[:63]
    execute(empty_database, f'CREATE ROLE "{role}"')
    try:
        with empty_engine.begin() as connection:
            connection.exec_driver_sql(f'SET LOCAL ROLE "{role}"')
            with pytest.raises(MigrationError, match='CREATE SCHEMA "queue" AUTHORIZATION'):
                migrations.apply(connection, schema="queue")

        # Where the schema is there, the role needs no privilege on the database.
        execute(empty_database, f'CREATE SCHEMA queue AUTHORIZATION "{role}"')
        with empty_engine.begin() as connection:
            connection.exec_driver_sql(f'SET LOCAL ROLE "{role}"')
            migrations.apply(connection, schema="queue")
            migrations.revert(connection, "base", schema="queue")
    finally:
        execute(empty_database, "DROP SCHEMA IF EXISTS queue", f'DROP ROLE "{role}"')


def test_a_search_path_without_a_schema_is_named(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL search_path TO absent")
        with pytest.raises(MigrationError, match="no schema on the connection's search_path"):
            migrations.apply(connection)


@pytest.mark.parametrize("option", ["name", "schema"])
@pytest.mark.parametrize("value", ["", "1st", "a-b", 'a"b', "a.b", "é", "a" * 64, "a b", "x\n"])
def test_a_name_that_is_no_identifier_is_refused(
    option: str, value: str, empty_engine: Engine
) -> None:
    functions: list[Callable[..., Any]] = [migrations.apply, migrations.current, migrations.check]
    for function in functions:
        with (
            pytest.raises(MigrationError, match=f"^{option}="),
            empty_engine.begin() as connection,
        ):
            function(connection, **{option: value})


def test_outside_a_revision_upgrade_names_the_other_way(make_host: MakeHost) -> None:
    def check() -> None:
        with pytest.raises(MigrationError, match=r"inside an Alembic revision.*apply"):
            migrations.upgrade()
        with pytest.raises(MigrationError, match="inside an Alembic revision"):
            migrations.downgrade(None, from_=HEAD)

    check()
    host = make_host()
    host.add_revision("pass")
    host.upgrade()
    check()
    host.add_revision("op.execute('SELECT 1 FROM absent')")
    with pytest.raises(ProgrammingError):
        host.upgrade()
    check()


def test_autocommit_is_refused(empty_engine: Engine, empty_database: str) -> None:
    engine = empty_engine.execution_options(isolation_level="AUTOCOMMIT")
    with pytest.raises(MigrationError, match="autocommit"), engine.begin() as connection:
        migrations.apply(connection)
    assert objects(empty_database) == set()


def test_sqlite_is_told_what_to_do_instead() -> None:
    with (
        pytest.raises(MigrationError, match=r"not on sqlite.*create_all\(\)"),
        create_engine("sqlite://").begin() as connection,
    ):
        migrations.apply(connection)


# --- Looking --------------------------------------------------------------------------------------


def test_current_and_check_without_tables(empty_engine: Engine) -> None:
    with empty_engine.begin() as connection:
        assert migrations.current(connection) is None
        assert migrations.current(connection, schema="absent") is None
        assert migrations.check(connection) == SchemaStatus(
            None,
            HEAD,
            usable=False,
            command="There are no tables of sa_jobs here: run `sa-jobs db upgrade`; where your own "
            "Alembic chain makes the tables, run `alembic revision --autogenerate`, unless it has "
            "the revision already, and `alembic upgrade head` (Flask-Migrate: `flask db migrate` "
            "and `flask db upgrade`).",
        )
        status = migrations.check(connection, schema="queue", name="q")
        assert status.command is not None
        assert "`sa-jobs db upgrade --schema queue --name q`" in status.command
        # The connection is as usable as before.
        assert connection.scalar(text("SELECT 1")) == 1


def test_check_when_all_is_well(empty_engine: Engine, empty_database: str) -> None:
    create_all(empty_database)
    with empty_engine.begin() as connection:
        assert migrations.check(connection) == SchemaStatus(HEAD, HEAD, usable=True, command=None)


def test_check_of_older_and_newer_tables(
    second_step: Step, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    with empty_engine.begin() as connection:
        older = migrations.check(connection)
        assert (older.current, older.latest) == (HEAD, second_step.revision)
        assert older.usable
        assert older.command is not None
        assert "run `sa-jobs db upgrade`" in older.command

        connection.exec_driver_sql("UPDATE sa_jobs_step SET revision = 'sa_jobs_9999'")
        newer = migrations.check(connection)
        assert newer == SchemaStatus("sa_jobs_9999", second_step.revision, True, None)

        connection.exec_driver_sql("UPDATE sa_jobs_step SET min_client = '9.0'")
        newer = migrations.check(connection)
        assert not newer.usable
        assert newer.command is not None
        assert "for sa-jobs 9.0 or newer" in newer.command
        assert "run `pip install --upgrade sa-jobs`" in newer.command


@pytest.mark.parametrize("step", [step.revision for step in migrations.revisions()])
def test_a_worker_runs_on_every_step_that_is_called_usable(
    step: str, empty_engine: Engine, empty_database: str
) -> None:
    migrations.apply(empty_engine, step)
    with empty_engine.connect() as connection:
        usable = migrations.check(connection).usable
    jobs = Jobs()
    ran = []

    @jobs.handler("work")
    def work(number: int) -> None:
        ran.append(number)

    with empty_engine.begin() as connection:
        jobs.enqueue(connection, "work", {"number": 1})
    if usable:
        run_all(empty_engine, jobs)
        assert ran == [1]
    else:
        with pytest.raises(SchemaVersionError, match="sa-jobs db upgrade"):
            run_all(empty_engine, jobs)
