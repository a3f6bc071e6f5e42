"""In which schema the migrations work, where it is not named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from alembic.util import CommandError
from sqlalchemy import Engine, NullPool, create_engine, select, text

from sa_jobs import Jobs, migrations
from sa_jobs.errors import MigrationError
from sa_jobs.migrations import Step
from sa_jobs.models import DEFAULT_TABLES, metadata
from tests.migrations.schema import (
    Host,
    Place,
    create_all,
    execute,
    marker,
    objects,
    pg_dump,
    run_psql,
)
from tests.support.running import run_all

MakeHost = Callable[..., Host]

HEAD = migrations.revisions()[-1].revision
TENANT = Place("tenant")


def of_schema(url: str, schema: str) -> set[str]:
    return {name for name in objects(url) if f" {schema}." in name}


def jobs_in(url: str, schema: str) -> int:
    with create_engine(url, poolclass=NullPool).connect() as connection:
        return connection.scalar(text(f"SELECT count(*) FROM {schema}.sa_jobs")) or 0


@pytest.fixture
def tenant(empty_database: str) -> str:
    """The URL of a session that creates in the schema `tenant`; a queue with a job is in public."""
    create_all(empty_database)
    execute(
        empty_database,
        "CREATE SCHEMA tenant",
        "INSERT INTO sa_jobs (queue, handler) VALUES ('q', 'h')",
    )
    separator = "&" if "?" in empty_database else "?"
    return f"{empty_database}{separator}options=-csearch_path%3Dtenant,public"


def test_the_search_path_decides_where_no_schema_is_given(
    second_step: Step, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    with empty_engine.begin() as connection:
        migrations.apply(connection, schema="queue")
        for path, found in [
            ("public", HEAD),
            ("queue, public", second_step.revision),
            ("public, queue", HEAD),
            ("absent, queue", second_step.revision),
            ("pg_catalog", None),
            ("''", None),
        ]:
            connection.exec_driver_sql(f"SET LOCAL search_path TO {path}")
            assert migrations.current(connection) == found
            assert migrations.current(connection, schema="public") == HEAD
            assert migrations.current(connection, schema="queue") == second_step.revision


def test_a_decoy_earlier_on_the_search_path_is_not_touched(
    second_step: Step, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    execute(
        empty_database,
        "CREATE SCHEMA decoy",
        "CREATE TABLE decoy.sa_jobs (id bigint)",
        "CREATE TABLE decoy.sa_jobs_failures (id bigint)",
    )
    with empty_engine.begin() as connection:
        connection.exec_driver_sql("SET LOCAL search_path TO decoy, public")
        for work in (migrations.apply, lambda c: migrations.revert(c, "base")):
            with pytest.raises(MigrationError, match=r'in the schema "public", and not in "decoy"'):
                work(connection)
        assert migrations.apply(connection, schema="public") == (second_step,)
        assert migrations.revert(connection, "base", schema="public")

    assert {name for name in objects(empty_database) if "relation" in name} == {
        "relation r decoy.sa_jobs",
        "relation r decoy.sa_jobs_failures",
    }


# --- A queue farther down the search path is somebody else's --------------------------------------


def test_a_host_goes_up_and_down_in_the_first_schema_of_its_path(
    tenant: str, make_host: MakeHost, empty_database: str
) -> None:
    others = of_schema(empty_database, "public")
    host = make_host(tenant)
    host.target(metadata)
    assert "from_=None, schema=None" in host.autogenerate()

    host.upgrade()
    host.check()
    assert marker(empty_database, TENANT) == [HEAD]
    assert jobs_in(empty_database, "tenant") == 0
    host.downgrade()

    assert not of_schema(empty_database, "tenant")
    assert of_schema(empty_database, "public") == others
    assert jobs_in(empty_database, "public") == 1


def test_going_back_does_not_reach_for_tables_elsewhere_on_the_path(
    tenant: str, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host(tenant)
    host.add_steps()
    host.upgrade()
    execute(empty_database, "DROP SCHEMA tenant CASCADE", "CREATE SCHEMA tenant")
    execute(empty_database, "CREATE TABLE tenant.alembic_version (version_num varchar(32))")
    execute(empty_database, "INSERT INTO tenant.alembic_version VALUES ('host_1')")

    with pytest.raises(MigrationError, match=r'in the schema "public", and not in "tenant"') as e:
        host.downgrade()

    assert isinstance(e.value, CommandError)
    assert "\n" not in str(e.value)
    assert jobs_in(empty_database, "public") == 1


def test_a_later_revision_names_the_schema_whose_tables_it_misses(
    tenant: str, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host(tenant)
    host.add_steps(HEAD, from_="sa_jobs_0002")
    with pytest.raises(MigrationError, match=r"tables of tenant\.sa_jobs .* absent"):
        host.upgrade()


def test_outside_a_revision_the_choice_is_asked_for(tenant: str, empty_database: str) -> None:
    engine = create_engine(tenant, poolclass=NullPool)
    works: list[Callable[..., object]] = [
        migrations.apply,
        migrations.build_indexes,
        lambda bind, **options: migrations.revert(bind, "base", **options),
    ]
    for work in works:
        with pytest.raises(MigrationError, match=r"schema='public' or schema='tenant' \(--schema"):
            work(engine)
    assert not of_schema(empty_database, "tenant")

    assert migrations.apply(engine, schema="tenant") == migrations.revisions()
    # Now they are where the path says.
    assert migrations.apply(engine) == ()
    migrations.revert(engine, "base")
    assert not of_schema(empty_database, "tenant")
    assert jobs_in(empty_database, "public") == 1


def test_a_script_stops_where_the_tables_are_elsewhere(
    tenant: str, make_host: MakeHost, empty_database: str
) -> None:
    before = pg_dump(empty_database)
    for script in (
        migrations.script("base", from_=HEAD),
        migrations.script(HEAD, from_="sa_jobs_0001"),
    ):
        with pytest.raises(Exception, match="non-zero exit status"):
            run_psql(tenant, script)
    assert pg_dump(empty_database) == before

    run_psql(tenant, migrations.script())
    run_psql(tenant, migrations.script("base", from_=HEAD))
    assert pg_dump(empty_database) == before


# --- A schema_translate_map -----------------------------------------------------------------------


def test_a_map_of_env_py_says_where_the_tables_are(
    make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    host = make_host()
    configure = "        context.configure(\n            connection=connection"
    given = "schema_translate_map={None: 'tenant', 'queue': 'other'}"
    option = f"        connection = connection.execution_options({given})\n"
    host.edit_env((configure, option + configure + ', version_table_schema="tenant"'))
    # Alembic makes its version table before our tables.
    execute(empty_database, "CREATE SCHEMA tenant")
    host.add_steps()
    host.add_revision(
        f"sa_jobs.migrations.upgrade({HEAD!r}, from_=None, schema='queue')",
        f"sa_jobs.migrations.downgrade(None, from_={HEAD!r}, schema='queue')",
    )
    host.upgrade()

    assert not of_schema(empty_database, "public")
    for schema in ("tenant", "other"):
        assert marker(empty_database, Place(schema)) == [HEAD]
        create_all(another_database, Place(schema))
    assert pg_dump(empty_database) == pg_dump(another_database)
    host.downgrade()
    assert objects(empty_database) == set()


def test_workers_and_create_all_agree_with_the_map(
    empty_engine: Engine, empty_database: str, another_database: str
) -> None:
    engine = empty_engine.execution_options(schema_translate_map={None: "tenant"})
    with engine.connect() as connection:
        assert not migrations.check(connection).usable
    migrations.apply(engine)
    with engine.connect() as connection:
        assert migrations.check(connection).usable
    with empty_engine.connect() as connection:
        assert migrations.current(connection) is None
        assert migrations.current(connection, schema="tenant") == HEAD
    jobs = Jobs()
    ran = []

    @jobs.handler("work")
    def work(number: int) -> None:
        ran.append(number)

    with engine.begin() as connection:
        jobs.enqueue(connection, "work", {"number": 1})
    run_all(engine, jobs)
    assert ran == [1]

    other = create_engine(another_database, poolclass=NullPool)
    mapped = other.execution_options(schema_translate_map={None: "tenant"})
    # The queue in public is another one, and stays as it is.
    metadata.create_all(other)
    whole = pg_dump(another_database)
    with other.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA tenant")
    metadata.create_all(mapped)
    with mapped.connect() as connection:
        assert connection.scalar(select(DEFAULT_TABLES.step.c.revision)) == HEAD
        assert migrations.check(connection).usable
    metadata.drop_all(other)
    assert pg_dump(another_database) == pg_dump(empty_database)
    metadata.create_all(other)
    metadata.drop_all(mapped)
    execute(another_database, "DROP SCHEMA tenant")
    assert pg_dump(another_database) == whole


def test_a_map_to_no_plain_name_is_named(empty_engine: Engine) -> None:
    engine = empty_engine.execution_options(schema_translate_map={None: 'a"b'})
    with pytest.raises(MigrationError, match=r"schema_translate_map for None: schema="):
        migrations.apply(engine)


def test_a_default_schema_may_be_given_by_the_map(empty_engine: Engine) -> None:
    engine = empty_engine.execution_options(schema_translate_map={"queue": None})

    migrations.apply(engine, schema="queue")
    with empty_engine.connect() as connection:
        assert migrations.current(connection) == HEAD
