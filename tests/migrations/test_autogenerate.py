"""Autogenerate in a host's environment writes our revisions, and nothing else of ours."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import alembic
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata, produce_migrations
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import Script
from alembic.util import CommandError
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    Connection,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    NullPool,
    String,
    Table,
    create_engine,
)
from sqlalchemy.engine import make_url

import sa_jobs.alembic
from sa_jobs import attach, migrations
from sa_jobs.errors import NeedsOwnTransactionError
from sa_jobs.migrations import Step
from tests.migrations.schema import (
    CASED,
    CUSTOM,
    DEFAULT,
    NAMING_CONVENTION,
    Host,
    Place,
    create_all,
    execute,
    marker,
    objects,
    pg_dump,
)

MakeHost = Callable[..., Host]

ALEMBIC = tuple(int(number) for number in alembic.__version__.split("."))

HEAD = migrations.revisions()[-1].revision
PLACES = [
    pytest.param(DEFAULT, id="default"),
    pytest.param(CUSTOM, id="schema-and-name"),
    pytest.param(CASED, id="capitals"),
    pytest.param(Place("public"), id="default-schema-by-name"),
]


def body(source: str, function: str) -> list[str]:
    """Return the statements of a function in a revision."""
    found = re.search(rf"def {function}\(\)[^\n]*\n(.*?)(?=\ndef |\Z)", source, re.DOTALL)
    assert found is not None
    lines = (line.strip() for line in found[1].splitlines())
    return [line for line in lines if line and not line.startswith(("#", '"""'))]


def attached(place: Place = DEFAULT, **options: Any) -> MetaData:
    """Return metadata with our tables and one of the host's."""
    metadata = MetaData(**options)
    Table("own", metadata, Column("id", Integer, primary_key=True))
    attach(metadata, **place.options)
    return metadata


@pytest.fixture
def own_tables(empty_database: str) -> None:
    execute(empty_database, "CREATE TABLE own (id serial PRIMARY KEY)")


# --- The four steps of a newcomer -----------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_a_host_generates_upgrades_checks_and_goes_back(
    place: Place, make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    host = make_host()
    metadata = attached(place)
    host.target(metadata)

    source = host.autogenerate()
    host.upgrade()

    where = f"schema={place.schema!r}, name={place.name!r}"
    assert "import sa_jobs.migrations\n" in source
    assert body(source, "upgrade")[0] == (
        f"sa_jobs.migrations.upgrade({HEAD!r}, from_=None, {where})"
    )
    assert body(source, "downgrade")[-1] == (
        f"sa_jobs.migrations.downgrade(None, from_={HEAD!r}, {where})"
    )
    assert f"create_table('{place.name}" not in source
    assert "own" in source
    host.check()
    with create_engine(another_database, poolclass=NullPool).begin() as connection:
        metadata.create_all(connection)
    assert pg_dump(empty_database) == pg_dump(another_database)

    host.downgrade("base")
    assert objects(empty_database) == set()
    host.upgrade()
    host.check()


def test_the_next_model_of_the_host_comes_alone(make_host: MakeHost) -> None:
    host = make_host()
    metadata = attached()
    host.target(metadata)
    host.autogenerate()
    host.upgrade()

    Table("invoices", metadata, Column("id", Integer, primary_key=True))
    source = host.autogenerate()

    assert "create_table('invoices'" in source
    assert "sa_jobs" not in source
    assert body(source, "upgrade")[-1] == ")"
    assert "drop_table('own'" not in source


def test_a_newer_package_turns_the_check_red_until_the_host_has_its_revision(
    make_host: MakeHost, second_step_later: Callable[[], Step], empty_database: str
) -> None:
    host = make_host()
    host.target(attached())
    host.autogenerate()
    host.upgrade()

    step = second_step_later()
    host.upgrade()
    assert marker(empty_database) == [HEAD]
    with pytest.raises(CommandError, match=rf"sa_jobs_upgrade.*{HEAD}.*{step.revision}"):
        host.check()
    source = host.autogenerate()
    (line,) = body(source, "upgrade")
    assert line == (
        f"sa_jobs.migrations.upgrade({step.revision!r}, from_={HEAD!r}, "
        "schema=None, name='sa_jobs')"
    )
    host.upgrade()
    host.check()
    host.downgrade("-1")
    assert marker(empty_database) == [HEAD]
    host.downgrade("base")
    assert objects(empty_database) == set()


def test_tables_that_are_newer_than_the_package_stop_autogenerate(
    make_host: MakeHost, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "UPDATE sa_jobs_step SET revision = 'sa_jobs_9999'")
    host = make_host()
    host.target(attached())
    with pytest.raises(CommandError, match=r"sa_jobs_9999, .*pip install --upgrade sa-jobs"):
        host.autogenerate()


def test_a_revision_that_finds_the_tables_there_says_what_its_way_back_does(
    make_host: MakeHost, empty_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    create_all(empty_database)
    host = make_host()
    host.add_steps()
    host.upgrade()
    (record,) = (record for record in caplog.records if "sa_jobs" in record.name)
    assert record.getMessage() == (
        "The tables of public.sa_jobs were there already, and this revision adopts them: its "
        "downgrade() will drop them with all jobs"
    )
    host.add_steps(HEAD, HEAD)
    host.upgrade()
    assert len([record for record in caplog.records if "sa_jobs" in record.name]) == 1


def test_a_create_all_database_is_clean_and_so_is_one_of_apply(
    own_tables: None, make_host: MakeHost, empty_database: str, empty_engine: Engine
) -> None:
    migrations.apply(empty_engine)
    host = make_host()
    host.target(attached())
    host.check()


# --- Hosts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "option",
    ["include_schemas=True", "compare_server_default=True", "transaction_per_migration=True"],
)
@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
def test_with_options_of_env_py_the_check_is_clean(
    option: str, place: Place, make_host: MakeHost
) -> None:
    host = make_host()
    host.target(attached(place), option)
    host.autogenerate()
    host.upgrade()
    host.check()


def test_metadata_may_be_a_list(make_host: MakeHost, empty_database: str) -> None:
    host = make_host()
    other = MetaData()
    Table("theirs", other, Column("id", Integer, primary_key=True))
    host.target([other, attached()])
    source = host.autogenerate()
    host.upgrade()
    host.check()
    assert body(source, "upgrade")[0].startswith("sa_jobs.migrations.upgrade(")
    assert marker(empty_database) == [HEAD]


@pytest.mark.parametrize("search_path", ["public", "app"])
@pytest.mark.parametrize("include_schemas", [False, True])
def test_metadata_with_a_schema_spells_it_out(
    include_schemas: bool,
    search_path: str,
    second_step_later: Callable[[], Step],
    make_host: MakeHost,
    empty_database: str,
) -> None:
    execute(
        empty_database,
        "CREATE SCHEMA app",
        f'ALTER DATABASE "{make_url(empty_database).database}" SET search_path TO {search_path}',
    )
    before = objects(empty_database)
    metadata = MetaData(schema="app")
    attach(metadata)
    host = make_host()
    host.target(metadata, *(["include_schemas=True"] if include_schemas else []))

    assert body(host.autogenerate(), "upgrade") == [
        f"sa_jobs.migrations.upgrade({HEAD!r}, from_=None, schema='app', name='sa_jobs')"
    ]
    host.upgrade()
    host.check()
    assert marker(empty_database, Place("app")) == [HEAD]

    step = second_step_later().revision
    with pytest.raises(CommandError, match=f"'sa_jobs_upgrade', 'app', 'sa_jobs', .*{step}"):
        host.check()
    host.autogenerate()
    host.upgrade()
    host.check()
    assert marker(empty_database, Place("app")) == [step]

    # Without the option, Alembic itself looks for no table of the host's in other schemas.
    own = Table("own", metadata, Column("id", Integer, primary_key=True))
    with create_engine(empty_database, poolclass=NullPool).begin() as connection:
        own.create(connection)
    if include_schemas or search_path == "app":
        host.check()
    else:
        with pytest.raises(CommandError, match=r"add_table.*own") as raised:
            host.check()
        assert "sa_jobs" not in str(raised.value)
    execute(empty_database, "DROP TABLE app.own")

    host.downgrade()
    assert objects(empty_database) == before


# In 1.19.0 and 1.19.1 it compares them by default, and since then on request.
EVERYTHING = "include_schemas=True, compare_type=True, compare_server_default=True" + (
    ', autogenerate_plugins=["alembic.autogenerate.*", "alembic.ext.checkconstraint_byname"]'
    if ALEMBIC >= (1, 19, 2)
    else ""
)


@pytest.mark.skipif(
    ALEMBIC < (1, 19), reason="Alembic 1.19 is the first to compare CHECK constraints"
)
def test_comparing_checks_by_name_finds_those_of_the_host_alone(
    make_host: MakeHost, empty_database: str
) -> None:
    metadata = attached(CUSTOM)
    Table("theirs", metadata, Column("id", Integer), CheckConstraint("id > 0", name="c"))
    host = make_host()
    host.target([metadata, MetaData()], EVERYTHING)
    host.autogenerate()
    host.upgrade()
    host.check()
    execute(empty_database, "ALTER TABLE theirs DROP CONSTRAINT c")
    execute(empty_database, "ALTER TABLE queue.q DROP CONSTRAINT q_max_attempts_check")
    with pytest.raises(CommandError, match="add_constraint") as raised:
        host.check()
    assert "q_" not in str(raised.value)


def test_a_naming_convention_changes_no_name_of_ours(
    make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    for url, options in [
        (empty_database, {"naming_convention": NAMING_CONVENTION}),
        (another_database, {}),
    ]:
        metadata = MetaData(**options)  # type: ignore[arg-type]
        attach(metadata)
        host = make_host(url)
        host.target(metadata)
        host.autogenerate()
        host.upgrade()
        host.check()
    assert pg_dump(empty_database) == pg_dump(another_database)


def test_a_foreign_key_of_the_host_comes_after_the_tables(
    make_host: MakeHost, empty_database: str
) -> None:
    metadata = attached()
    Table(
        "receipts",
        metadata,
        Column("id", Integer, primary_key=True),
        Column("job_id", BigInteger, ForeignKey("sa_jobs.id")),
    )
    host = make_host()
    host.target(metadata)
    source = host.autogenerate()
    assert body(source, "upgrade")[0].startswith("sa_jobs.migrations.upgrade(")
    assert body(source, "downgrade")[-1].startswith("sa_jobs.migrations.downgrade(")
    host.upgrade()
    host.check()
    host.downgrade("base")
    assert objects(empty_database) == set()


def test_two_queues_are_made_together_and_each_goes_alone(
    make_host: MakeHost, empty_database: str
) -> None:
    metadata = attached()
    host = make_host()
    host.target(metadata)
    host.autogenerate()
    attach(metadata, **CUSTOM.options)
    with pytest.raises(CommandError, match="not up to date"):
        host.autogenerate()
    host.upgrade()
    source = host.autogenerate()
    assert len(body(source, "upgrade")) == 1
    host.upgrade()
    host.check()
    assert marker(empty_database) == marker(empty_database, CUSTOM) == [HEAD]
    host.downgrade("-1")
    assert marker(empty_database) == [HEAD]
    assert not {name for name in objects(empty_database) if " queue." in name}


def test_the_version_table_of_the_steps_own_chain_is_left_alone(
    own_tables: None, make_host: MakeHost, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "CREATE TABLE sa_jobs_alembic_version (version_num varchar(32))")
    host = make_host()
    host.target(attached())
    host.check()


def test_a_host_that_never_attached_sees_the_tables_as_it_did(
    make_host: MakeHost, empty_database: str
) -> None:
    sa_jobs.alembic.register()
    create_all(empty_database)
    metadata = MetaData()
    host = make_host()
    host.target(metadata)
    with pytest.raises(CommandError, match="remove_table"):
        host.check()


@pytest.mark.parametrize("helper", ["include_name", "include_object"])
def test_a_host_that_does_not_attach_may_hide_them_and_keep_its_own_filter(
    helper: str, make_host: MakeHost, empty_database: str
) -> None:
    create_all(empty_database)
    execute(empty_database, "CREATE TABLE legacy (id int)")
    host = make_host()
    also = {
        "include_name": "lambda name, kind, parents: name != 'legacy'",
        "include_object": "lambda found, name, kind, reflected, to: name != 'legacy'",
    }[helper]
    host.target(MetaData(), f"{helper}=__import__('sa_jobs.alembic').alembic.{helper}(also={also})")
    host.check()

    execute(empty_database, "CREATE TABLE forgotten (id int)")
    with pytest.raises(CommandError, match="forgotten"):
        host.check()


@pytest.mark.parametrize("begin", ["connection.begin()", "connection.exec_driver_sql('SELECT 1')"])
def test_an_env_that_begins_the_transaction_itself(
    begin: str, make_host: MakeHost, empty_database: str
) -> None:
    """Fresh tables need nothing; large ones an error that names the ways out."""
    host = make_host()
    host.edit_env(
        (
            "        context.configure(\n            connection=",
            f"        {begin}\n        context.configure(\n            connection=",
        ),
        (
            "            context.run_migrations()\n\n\nif",
            "            context.run_migrations()\n        connection.commit()\n\n\nif",
        ),
    )
    host.add_steps("sa_jobs_0001")
    host.upgrade()
    assert marker(empty_database) == ["sa_jobs_0001"]
    fill(empty_database)
    before = pg_dump(empty_database)
    host.add_steps("sa_jobs_0002", "sa_jobs_0001")

    with pytest.raises(NeedsOwnTransactionError) as caught:
        host.upgrade()

    assert isinstance(caught.value, CommandError)
    for way_out in ("sa-jobs db build-indexes", "transaction_per_migration", "concurrently=False"):
        assert way_out in str(caught.value)
    assert pg_dump(empty_database) == before

    # The first way out.
    migrations.build_indexes(create_engine(empty_database, poolclass=NullPool))
    host.upgrade()
    assert marker(empty_database) == ["sa_jobs_0002"]


def fill(url: str, rows: int = 10_001) -> None:
    execute(
        url,
        f"INSERT INTO sa_jobs (queue, handler) SELECT 'q', 'h' FROM generate_series(1, {rows})",
    )


def test_our_tables_in_another_schema_are_not_dropped(
    own_tables: None, make_host: MakeHost, empty_database: str
) -> None:
    """Of another application, or where the search path found them before."""
    create_all(empty_database)
    create_all(empty_database, Place("queue"))
    execute(empty_database, "CREATE SCHEMA app", "CREATE TABLE app.sa_jobs_workers (id int)")
    execute(empty_database, "CREATE TABLE app.own (id int)")
    host = make_host()
    metadata = attached()
    # This one is the host's: an index of its that is gone must be seen.
    Table("sa_jobs_workers", metadata, Column("id", Integer), schema="app")
    execute(empty_database, "CREATE INDEX sa_jobs_workers_own ON app.sa_jobs_workers (id)")
    host.target(metadata, "include_schemas=True")
    upgrade = body(host.autogenerate(), "upgrade")
    # Newer releases of Alembic write op.f() around names that were read from the database.
    dropped = {re.sub(r"op\.f\((.*?)\)", r"\1", line) for line in upgrade if "drop_" in line}
    assert dropped == {
        "op.drop_index('sa_jobs_workers_own', table_name='sa_jobs_workers', schema='app')",
        "op.drop_table('own', schema='app')",
    }


@pytest.mark.parametrize("helper", ["include_name", "include_object"])
@pytest.mark.parametrize("schema", [None, "public", "queue"])
def test_the_filters_know_the_tables_in_whatever_schema(
    schema: str | None, helper: str, make_host: MakeHost, empty_database: str
) -> None:
    create_all(empty_database)
    create_all(empty_database, Place("queue"))
    host = make_host()
    given = f"sa_jobs.attach(MetaData(), schema={schema!r}, register=False)"
    host.target(MetaData(), f"include_schemas=True, {helper}=sa_jobs.alembic.{helper}({given})")
    host.edit_env(
        ("from alembic import context", "import sa_jobs.alembic\nfrom alembic import context"),
        ("import sa_jobs.alembic\n", "import sa_jobs.alembic\nfrom sqlalchemy import MetaData\n"),
    )
    host.check()


@pytest.mark.parametrize("schema", [None, "queue"])
def test_metadata_that_env_py_merges_is_known(
    schema: str | None, make_host: MakeHost, empty_database: str
) -> None:
    metadata = attached(Place(schema))
    merged = MetaData()
    for table in metadata.tables.values():
        table.to_metadata(merged)
    assert "sa_jobs" not in merged.info
    host = make_host()
    host.target(merged)
    source = host.autogenerate()
    assert f"schema={schema!r}, name='sa_jobs')" in body(source, "upgrade")[0]
    assert "create_table('sa_jobs" not in source
    host.upgrade()
    host.check()
    assert marker(empty_database, Place(schema)) == [HEAD]


def test_tables_that_were_reflected_are_the_hosts_own(
    make_host: MakeHost, empty_engine: Engine, empty_database: str
) -> None:
    create_all(empty_database)
    reflected = MetaData()
    reflected.reflect(empty_engine)
    host = make_host()
    host.target(reflected)
    host.check()
    execute(empty_database, "CREATE INDEX own_idx ON sa_jobs (queue)")
    assert re.search(r"drop_index\(.*'own_idx'", host.autogenerate())


# Imported after ours, as in most hosts.
WITH_ALEMBIC_UTILS = """\
from sqlalchemy import MetaData
import sa_jobs
target_metadata = MetaData()
sa_jobs.attach(target_metadata)
from alembic_utils.pg_function import PGFunction
from alembic_utils.pg_trigger import PGTrigger
from alembic_utils.pg_grant_table import PGGrantTable
from alembic_utils.replaceable_entity import register_entities
own = PGFunction('public', 'own()', 'RETURNS int LANGUAGE sql AS $$ SELECT 1 $$')
register_entities([own], entity_types=[PGFunction, PGTrigger, PGGrantTable])
"""


@pytest.fixture
def reader(empty_database: str) -> Iterator[str]:
    """A role to which rights may be given."""
    name = f"reader_{uuid4().hex}"
    execute(empty_database, f"CREATE ROLE {name}")
    try:
        yield name
    finally:
        execute(empty_database, f"DROP OWNED BY {name}", f"DROP ROLE {name}")


def test_alembic_utils_drops_neither_trigger_nor_function_nor_rights(
    make_host: MakeHost, empty_database: str, reader: str
) -> None:
    """In a process of its own, since alembic-utils changes autogenerate for all of it."""
    pytest.importorskip("alembic_utils")
    host = make_host()
    host.edit_env(("target_metadata = None", WITH_ALEMBIC_UTILS))
    host.run("revision", "--autogenerate", "-m", "generated")
    source = next(host.directory.glob("versions/*.py")).read_text()
    assert "create_entity" in source
    host.run("upgrade", "head")
    execute(
        empty_database,
        f"GRANT SELECT, DELETE ON sa_jobs, sa_jobs_workers TO {reader}",
        f"GRANT DELETE ON alembic_version TO {reader}",
    )
    host.run("revision", "--autogenerate", "-m", "granted")
    source = next(host.directory.glob("versions/*granted.py")).read_text()
    # The one that is the host's, in the functions of both ways.
    assert source.count("_entity(") == 2
    assert "alembic_version" in source
    assert "sa_jobs" not in source


def test_a_sqlite_host_is_untouched(make_host: MakeHost, tmp_path: Any) -> None:
    host = make_host(f"sqlite:///{tmp_path / 'host.db'}")
    metadata = MetaData()
    Table("own", metadata, Column("id", Integer, primary_key=True), Column("name", String(20)))
    sa_jobs.alembic.register()
    host.target(metadata)
    source = host.autogenerate()
    host.upgrade()
    host.check()
    assert "sa_jobs" not in source


def test_sqlite_leaves_our_tables_out_and_says_so_once(
    make_host: MakeHost, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host = make_host(f"sqlite:///{tmp_path / 'host.db'}")
    metadata = attached(CUSTOM, schema=None)
    host.target(metadata)
    source = host.autogenerate()
    assert "create_table('own'" in source
    assert "'q" not in source
    assert "sa_jobs" not in source
    (record,) = (record for record in caplog.records if "sa_jobs" in record.name)
    assert record.levelname == "WARNING"
    assert "queue.q are left out" in record.getMessage()
    assert "database is sqlite: generate the revision that makes them on PostgreSQL" in (
        record.getMessage()
    )
    host.upgrade()
    host.check()


def test_a_revision_for_both_has_a_guard(
    make_host: MakeHost, tmp_path: Any, empty_database: str
) -> None:
    url = f"sqlite:///{tmp_path / 'host.db'}"
    host = make_host(url)
    host.add_steps()
    with pytest.raises(CommandError, match="not on sqlite: in a revision") as caught:
        host.upgrade()
    assert "\n" not in str(caught.value)
    guard = re.search(r"put `(if .*:)` before", str(caught.value))
    assert guard is not None

    (file,) = host.directory.glob("versions/*.py")
    lines = file.read_text().replace(
        "    sa_jobs.migrations.", f"    {guard[1]}\n        sa_jobs.migrations."
    )
    file.write_text(lines)
    host.upgrade()
    host.downgrade()
    host.url = empty_database
    host.upgrade()
    assert marker(empty_database) == [HEAD]


# --- Several databases ----------------------------------------------------------------------------


def test_by_alembics_template_for_several_databases_the_call_is_where_the_tables_are(
    tmp_path: Path, empty_database: str, another_database: str
) -> None:
    command.init(Config(str(tmp_path / "alembic.ini")), str(tmp_path / "chain"), "multidb")
    env = tmp_path / "chain/env.py"
    source = env.read_text()
    assert "target_metadata = {}" in source
    env.write_text(
        source.replace("target_metadata = {}", 'target_metadata = config.attributes["metadata"]')
    )
    own = MetaData()
    Table("own", own, Column("id", Integer, primary_key=True))
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(tmp_path / "chain"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("databases", "engine1, engine2")
    config.set_section_option("engine1", "sqlalchemy.url", empty_database)
    config.set_section_option("engine2", "sqlalchemy.url", another_database)
    config.attributes["metadata"] = {"engine1": own, "engine2": attached(CUSTOM)}

    script = command.revision(config, "generated", autogenerate=True)
    assert isinstance(script, Script)
    source = Path(script.path).read_text()
    command.upgrade(config, "head")
    command.check(config)

    assert source.count("sa_jobs.migrations.upgrade(") == 1
    assert body(source, "upgrade_engine2")[0].startswith(f"sa_jobs.migrations.upgrade({HEAD!r}")
    assert body(source, "downgrade_engine2")[-1].startswith("sa_jobs.migrations.downgrade(None")
    assert body(source, "upgrade_engine1")[0].startswith("op.create_table('own'")
    assert marker(another_database, CUSTOM) == [HEAD]
    assert {name for name in objects(empty_database) if "own" not in name} == set()

    command.downgrade(config, "base")
    assert objects(empty_database) == objects(another_database) == set()


# --- Programs -------------------------------------------------------------------------------------


def test_a_program_may_run_the_operations_itself(empty_engine: Engine, empty_database: str) -> None:
    metadata = MetaData()
    attach(metadata)

    def migrate(connection: Connection) -> None:
        context = MigrationContext.configure(connection)
        script = produce_migrations(context, metadata)
        assert script.upgrade_ops is not None
        with Operations.context(context) as operations:
            for op in script.upgrade_ops.ops:
                operations.invoke(op)

    with empty_engine.begin() as connection:
        migrate(connection)
    with empty_engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    assert marker(empty_database) == [HEAD]


def test_operations_of_a_programs_own_are_used(empty_engine: Engine, empty_database: str) -> None:
    """Without Operations.context(), which makes alembic.op stand for them."""
    metadata = MetaData()
    attach(metadata)
    with empty_engine.begin() as connection:
        context = MigrationContext.configure(connection)
        script = produce_migrations(context, metadata)
        assert script.upgrade_ops is not None
        assert script.downgrade_ops is not None
        for op in script.upgrade_ops.ops:
            Operations(context).invoke(op)
        assert migrations.current(connection) == HEAD
        for op in script.downgrade_ops.ops:
            Operations(context).invoke(op)
    assert objects(empty_database) == set()


def test_attach_registers_whatever_was_imported_first() -> None:
    program = (
        "import sys, sa_jobs\n"
        "from sqlalchemy import MetaData\n"
        "assert 'alembic' not in sys.modules\n"
        "sa_jobs.attach(MetaData(), register=False)\n"
        "assert 'alembic' not in sys.modules\n"
        "sa_jobs.attach(MetaData())\n"
        "from alembic.autogenerate import comparators\n"
        "import sa_jobs.alembic as ours\n"
        "assert ours._registered\n"
        "before = str(comparators._registry)\n"
        "sa_jobs.attach(MetaData())\n"
        "assert str(comparators._registry) == before\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
