"""The tables in a host's metadata, whatever that looks like."""

from __future__ import annotations

from enum import Enum
from typing import Any

import pytest
from sqlalchemy import (
    BigInteger,
    Connection,
    Engine,
    ForeignKey,
    MetaData,
    NullPool,
    String,
    create_engine,
    func,
    insert,
    inspect,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    declarative_base,
    mapped_column,
    registry,
    relationship,
)
from sqlalchemy.schema import BLANK_SCHEMA

from sa_jobs import AttachError, Jobs, attach, cancel, ddl, enqueue
from sa_jobs.models import DEFAULT_TABLES, STATES, metadata
from tests.support.jobs import add, job

OURS = {f"sa_jobs{suffix}" for suffix in ddl.TABLE_SUFFIXES}


@pytest.fixture
def empty(empty_database: str) -> Any:
    engine = create_engine(empty_database, poolclass=NullPool)
    yield engine
    engine.dispose()


def names_in(engine: Engine) -> set[str]:
    """Return everything of ours or the host's that the catalogue holds."""
    query = text("""
        SELECT nspname || '.' || relname FROM pg_class
        JOIN pg_namespace ON pg_namespace.oid = relnamespace
        WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
        UNION ALL SELECT nspname || '.' || proname || '()' FROM pg_proc
        JOIN pg_namespace ON pg_namespace.oid = pronamespace
        WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'
        UNION ALL SELECT 'type ' || typname FROM pg_type WHERE typtype = 'e'
    """)
    with engine.connect() as connection:
        return set(connection.execute(query).scalars())


def constraint_names(engine: Engine) -> set[str]:
    query = text("""
        SELECT conname FROM pg_constraint WHERE connamespace = current_schema()::regnamespace
        AND contype <> 'n'
        UNION SELECT relname FROM pg_class WHERE relkind = 'i'
        AND relnamespace = current_schema()::regnamespace
    """)
    with engine.connect() as connection:
        return set(connection.execute(query).scalars())


def works(engine: Engine, tables: Any) -> None:
    """Enqueue and cancel in the given tables."""
    with Session(engine) as session:
        enqueued = enqueue(session, "send", {"a": 1}, idempotency_key="k", tables=tables)
        session.commit()
        found = session.get(tables.Job, enqueued.id)
        assert found is not None
        assert found.payload == {"a": 1}
        session.rollback()
        assert cancel(session, enqueued.id, tables=tables) == "cancelled"
        session.commit()
        assert session.scalars(select(tables.Step.revision)).one() == ddl.STEP


def test_drop_all_leaves_nothing(empty: Engine) -> None:
    metadata.create_all(empty)
    assert {f"public.{name}" for name in OURS} < names_in(empty)
    metadata.drop_all(empty)
    assert names_in(empty) == set()
    metadata.create_all(empty)
    metadata.drop_all(empty)


def test_create_all_leaves_what_is_there_alone(engine: Engine) -> None:
    metadata.create_all(engine)
    works(engine, DEFAULT_TABLES)


def test_a_declarative_base_can_carry_the_tables(empty: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    tables = attach(Base)
    assert set(Base.metadata.tables) == OURS
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_an_older_declarative_base_can_carry_the_tables(empty: Engine) -> None:
    Base = declarative_base()  # noqa: N806
    tables = attach(Base)
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_a_metadata_can_carry_the_tables(empty: Engine) -> None:
    host = MetaData()
    tables = attach(host)
    host.create_all(empty)
    works(empty, tables)


def test_another_name_and_schema_can_be_chosen(empty: Engine) -> None:
    host = MetaData()
    tables = attach(host, name="Work_queue", schema="Back_office")
    host.create_all(empty)
    works(empty, tables)
    assert {name.split(".")[0] for name in names_in(empty)} == {"Back_office"}
    host.drop_all(empty)
    assert names_in(empty) == set()


def test_two_queues_can_stand_in_one_base(empty: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    attached = [
        attach(Base),
        attach(Base, name="mail_jobs"),
        attach(Base, schema="reports"),
        attach(Base, name="mail_jobs", schema="reports"),
    ]
    assert [tables.Job.__name__ for tables in attached] == [
        "SaJobsJob",
        "SaJobsMailJobsJob",
        "SaJobsInReportsJob",
        "SaJobsMailJobsInReportsJob",
    ]
    Base.metadata.create_all(empty)
    for tables in attached:
        works(empty, tables)
        assert Jobs(tables).tables is tables


def test_a_bases_own_columns_do_not_reach_our_tables(empty: Engine) -> None:
    class Base(DeclarativeBase):
        id: Mapped[int] = mapped_column(primary_key=True)
        changed_by: Mapped[str] = mapped_column(String(5))

    tables = attach(Base)
    assert "changed_by" not in tables.jobs.c
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_a_dataclass_base_can_carry_the_tables(empty: Engine) -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    tables = attach(Base)
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_a_bases_type_map_does_not_reach_our_tables(empty: Engine) -> None:
    class Base(DeclarativeBase):
        type_annotation_map = {str: String(3), int: BigInteger}  # noqa: RUF012

    tables = attach(Base)
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_a_hosts_naming_convention_renames_nothing_of_ours(empty: Engine, engine: Engine) -> None:
    convention = {
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }

    class Base(DeclarativeBase):
        metadata = MetaData(naming_convention=convention)

    tables = attach(Base)
    Base.metadata.create_all(empty)
    assert constraint_names(empty) == constraint_names(engine)
    works(empty, tables)


def test_every_name_of_ours_starts_with_the_tables_name(empty: Engine) -> None:
    host = MetaData()
    attach(host, name="work")
    host.create_all(empty)
    assert all(name.split(".")[1].startswith("work") for name in names_in(empty))
    assert all(name.startswith("work") for name in constraint_names(empty))


def test_the_metadatas_schema_is_ours_by_default(empty: Engine) -> None:
    class Base(DeclarativeBase):
        metadata = MetaData(schema="app")

    tables = attach(Base)
    assert tables.schema == "app"
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_no_schema_can_be_forced(empty: Engine) -> None:
    class Base(DeclarativeBase):
        metadata = MetaData(schema="app")

    tables = attach(Base, schema=BLANK_SCHEMA)
    assert tables.jobs.schema is None
    Base.metadata.create_all(empty)
    works(empty, tables)


def test_a_host_model_may_refer_to_a_job(empty: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    tables = attach(Base)

    class Export(Base):
        __tablename__ = "exports"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(ForeignKey("sa_jobs.id"))
        job: Mapped[Any] = relationship("SaJobsJob")

    Base.metadata.create_all(empty)
    with Session(empty) as session:
        enqueued = enqueue(session, "send", tables=tables)
        session.add(Export(job_id=enqueued.id))
        session.commit()
        assert session.scalars(select(Export)).one().job.handler == "send"


def test_a_host_may_have_a_class_called_job(empty: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(Base):
        __tablename__ = "positions"
        id: Mapped[int] = mapped_column(primary_key=True)
        candidates: Mapped[list[Any]] = relationship("Candidate", back_populates="job")

    class Candidate(Base):
        __tablename__ = "candidates"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(ForeignKey("positions.id"))
        job: Mapped[Any] = relationship("Job", back_populates="candidates")

    tables = attach(Base)
    Base.metadata.create_all(empty)
    with Session(empty) as session:
        session.add(Job(candidates=[Candidate()]))
        session.commit()
    works(empty, tables)


def test_our_classes_under_any_name_are_none_of_the_hosts(empty: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    tables = attach(Base, name="app")

    class AppJob(Base):
        __tablename__ = "app_jobs"
        id: Mapped[int] = mapped_column(primary_key=True)
        parts: Mapped[list[Any]] = relationship("AppFailure", back_populates="job")

    class AppFailure(Base):
        __tablename__ = "app_parts"
        id: Mapped[int] = mapped_column(primary_key=True)
        job_id: Mapped[int] = mapped_column(ForeignKey("app_jobs.id"))
        job: Mapped[Any] = relationship("AppJob", back_populates="parts")

    Base.metadata.create_all(empty)
    with Session(empty) as session:
        session.add(AppJob(parts=[AppFailure()]))
        session.commit()
    works(empty, tables)


@pytest.mark.parametrize(
    ("first", "second"), [("sa_jobs_x", "sa_jobs_X"), ("my_jobs", "my_JOBS"), ("mail", "mail_")]
)
def test_names_that_would_map_the_same_classes_are_refused(first: str, second: str) -> None:
    class Base(DeclarativeBase):
        pass

    attach(Base, name=first)
    before = set(Base.metadata.tables)
    with pytest.raises(AttachError, match=rf"name='{second}' would map .*Job.*'{first}'"):
        attach(Base, name=second)
    assert set(Base.metadata.tables) == before
    # A metadata alone has no classes that could be mixed up.
    host = MetaData()
    attach(host, name=first)
    attach(host, name=second)


def test_a_class_of_the_hosts_that_has_our_name_is_named() -> None:
    class Base(DeclarativeBase):
        pass

    class SaJobsWorker(Base):
        __tablename__ = "clerks"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(AttachError, match=r"class SaJobsWorker, .* table 'clerks'"):
        attach(Base)


class Places(str, Enum):
    SCHEMA = "queue"
    NAME = "q"


def test_names_of_an_enum_are_taken_for_their_text() -> None:
    tables = attach(MetaData(), name=Places.NAME, schema=Places.SCHEMA)
    assert (type(tables.name), type(tables.schema)) == (str, str)
    assert tables.jobs.key == "queue.q"


@pytest.mark.parametrize("schema", [None, "queue"])
def test_tables_copied_to_another_metadata_are_whole(schema: str | None, empty: Engine) -> None:
    host = MetaData()
    tables = attach(host, schema=schema)
    merged = MetaData()
    for table in host.tables.values():
        table.to_metadata(merged)
    merged.create_all(empty)
    works(empty, tables)
    made = names_in(empty)
    merged.drop_all(empty)
    assert names_in(empty) == set()

    other = MetaData()
    for table in host.tables.values():
        table.to_metadata(other, schema="other")
    other.create_all(empty)
    assert names_in(empty) == {name.replace(f"{schema or 'public'}.", "other.") for name in made}


def test_a_search_path_decides_where_unqualified_tables_are(empty_database: str) -> None:
    engine = create_engine(
        empty_database,
        poolclass=NullPool,
        connect_args={"options": "-c search_path=app,public"},
    )
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA app"))
    host = MetaData()
    tables = attach(host)
    host.create_all(engine)
    works(engine, tables)
    assert {name.split(".")[0] for name in names_in(engine)} == {"app"}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a-b",
        "a b",
        'a"b',
        "a'b",
        "1a",
        "a;drop table x;--",
        "a$$b",
        "x.job",
        "é",
        "x" * 43,
        5,
        None,
        "a\n",
        "a%s",
        "a:b",
    ],
)
def test_a_name_that_is_no_plain_identifier_or_too_long_is_refused(name: Any) -> None:
    host = MetaData()
    with pytest.raises(AttachError, match="name="):
        attach(host, name=name)
    assert not host.tables


@pytest.mark.parametrize(
    "schema", ["", "a-b", 'a"b', "x.y", "x" * 64, 5, "a\n", "pg_x", "information_schema"]
)
def test_a_schema_that_is_no_plain_identifier_is_refused(schema: Any) -> None:
    host = MetaData()
    with pytest.raises(AttachError, match="schema="):
        attach(host, schema=schema)
    assert not host.tables


def test_the_longest_name_is_cut_nowhere(empty: Engine) -> None:
    host = MetaData()
    longest = "x" * 39
    with pytest.raises(AttachError, match="at most 39 characters"):
        attach(MetaData(), name=longest + "x")
    tables = attach(host, name=longest)
    host.create_all(empty)
    works(empty, tables)
    ours = {index.name for table in tables.all for index in table.indexes} | {
        constraint.name for table in tables.all for constraint in table.constraints
    }
    assert ours - {None} == constraint_names(empty) | ours - {None}
    assert max(len(str(name)) for name in ours) <= 63


def test_the_same_tables_twice_are_refused() -> None:
    host = MetaData()
    attach(host)
    with pytest.raises(AttachError, match="already has a table 'sa_jobs'"):
        attach(host)


@pytest.mark.parametrize("base", [None, object(), registry(), "Base", create_engine("sqlite://")])
def test_what_is_no_base_is_refused(base: Any) -> None:
    with pytest.raises(AttachError, match="takes a declarative base"):
        attach(base)


@pytest.mark.parametrize("status", STATES)
@pytest.mark.parametrize(
    "lease",
    [
        {},
        {"locked_by": "w"},
        {"leased_until": func.now()},
        {"locked_by": "w", "leased_until": func.now()},
    ],
    ids=["no owner or lease", "owner", "lease", "owner and lease"],
)
def test_only_a_running_job_has_an_owner_and_a_lease(
    connection: Connection, status: str, lease: dict[str, Any]
) -> None:
    statement = insert(DEFAULT_TABLES.jobs).values(queue="q", handler="h", status=status, **lease)
    if (status == "running") == (len(lease) == 2):
        connection.execute(statement)
    else:
        with pytest.raises(IntegrityError, match="sa_jobs_lease_check"):
            connection.execute(statement)


@pytest.mark.parametrize(
    ("values", "constraint"),
    [
        ({"status": "failed"}, "sa_jobs_status_check"),
        ({"max_attempts": 0}, "sa_jobs_max_attempts_check"),
    ],
)
def test_hand_written_sql_cannot_break_a_rule(
    connection: Connection, values: dict[str, Any], constraint: str
) -> None:
    with pytest.raises(IntegrityError, match=constraint):
        connection.execute(insert(DEFAULT_TABLES.jobs).values(queue="q", handler="h", **values))


def test_a_row_of_plain_sql_is_a_whole_job(connection: Connection) -> None:
    connection.execute(text("INSERT INTO sa_jobs (queue, handler) VALUES ('q', 'h')"))
    connection.commit()
    row = job(connection, 1)
    assert (row.payload, row.meta, row.status, row.priority) == ({}, {}, "ready", 0)
    assert (row.attempts, row.max_attempts, row.claim_no) == (0, 20, 0)
    assert row.run_at == row.created_at == row.updated_at


def test_a_failed_attempt_goes_with_its_job(connection: Connection) -> None:
    job_id = add(connection, status="dead")
    connection.execute(
        insert(DEFAULT_TABLES.failures).values(
            job_id=job_id, queue="q", handler="h", attempt=1, claim_no=1, error="x"
        )
    )
    connection.execute(DEFAULT_TABLES.jobs.delete())
    assert connection.execute(select(DEFAULT_TABLES.failures)).all() == []


def test_no_number_of_ours_is_narrower_than_needed(engine: Engine) -> None:
    inspector = inspect(engine)
    for table in OURS:
        for column in inspector.get_columns(table):
            kind = str(column["type"])
            assert kind in {"BIGINT", "TEXT", "JSONB", "TIMESTAMP", "SMALLINT", "INTERVAL"}, column
            if kind == "SMALLINT":
                assert column["name"] == "priority"
            if kind == "TIMESTAMP":
                assert column["type"].timezone, column  # type: ignore[attr-defined]


def test_the_archive_has_the_columns_of_the_jobs() -> None:
    jobs, archive = DEFAULT_TABLES.jobs, DEFAULT_TABLES.archive
    assert [c.name for c in archive.c if c.name != "archived_at"] == [c.name for c in jobs.c]
    for column in jobs.c:
        archived = archive.c[column.name]
        assert (repr(archived.type), archived.nullable) == (repr(column.type), column.nullable)
