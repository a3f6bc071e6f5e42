"""The tables, as declarative mixins: the only place that knows their columns.

`attach()` puts them into a host's metadata under any name and schema; the default mapping (`Job`,
`Failure`, ... on `metadata`) is for `select(Job)` where no host metadata is wanted.

Rules that all tables keep: no id or counter narrower than bigint; timestamptz only, written from
the database's clock; states are text with a named CHECK, since a native enum outlives a downgrade;
every constraint and index is named explicitly, so that a host's naming convention cannot rename it.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    ForeignKeyConstraint,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    mapped_column,
    registry,
)
from sqlalchemy.schema import BLANK_SCHEMA
from sqlalchemy.sql.elements import conv
from sqlalchemy.types import JSON

from sa_jobs import ddl
from sa_jobs.errors import AttachError
from sa_jobs.names import check_names

DEFAULT_NAME = "sa_jobs"
STATES = ("ready", "running", "done", "dead", "cancelled")
FINAL_STATES = ("done", "dead", "cancelled")

# SQLite is for hosts' unit tests: attach, create_all, enqueue and sa_jobs.testing work there, a
# worker does not.
_Id = BigInteger().with_variant(Integer(), "sqlite")
_Json = JSONB(none_as_null=True).with_variant(JSON(none_as_null=True), "sqlite")
_Time = DateTime(timezone=True)
_Period = Interval()


def _id() -> Mapped[int]:
    return mapped_column(_Id, Identity(always=False), autoincrement=True)


def _now() -> Mapped[dt.datetime]:
    return mapped_column(_Time, nullable=False, server_default=func.now())


class JobMixin:
    """A job.

    `status` is ready, running, done, dead or cancelled; later work is ready with a later `run_at`.
    While it runs, `locked_by` owns it until `leased_until`; afterwards `locked_by` keeps the last
    owner, by which a worker recognises a write whose answer was lost.
    """

    id: Mapped[int] = _id()
    queue: Mapped[str] = mapped_column(Text, nullable=False)
    handler: Mapped[str] = mapped_column(Text, nullable=False)
    payload: Mapped[Any] = mapped_column(_Json, nullable=False, server_default=text("'{}'"))
    status: Mapped[str] = mapped_column(Text, nullable=False, server_default=text("'ready'"))
    priority: Mapped[int] = mapped_column(SmallInteger, nullable=False, server_default=text("0"))
    tenant: Mapped[str | None] = mapped_column(Text, nullable=True)
    run_at: Mapped[dt.datetime] = _now()
    scheduled_for: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    attempts: Mapped[int] = mapped_column(BigInteger, nullable=False, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(BigInteger, nullable=False, server_default=text("20"))
    claim_no: Mapped[int] = mapped_column(BigInteger, nullable=False, server_default=text("0"))
    locked_by: Mapped[str | None] = mapped_column(Text, nullable=True)
    claimed_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    leased_until: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    cancel_requested_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    idempotency_key: Mapped[str | None] = mapped_column(Text, nullable=True)
    unique_key: Mapped[str | None] = mapped_column(Text, nullable=True)
    result: Mapped[Any] = mapped_column(_Json, nullable=True)
    last_error: Mapped[str | None] = mapped_column(Text, nullable=True)
    meta: Mapped[Any] = mapped_column(_Json, nullable=False, server_default=text("'{}'"))
    created_at: Mapped[dt.datetime] = _now()
    updated_at: Mapped[dt.datetime] = _now()
    finished_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    # New columns come last: there, ALTER TABLE adds them.
    schedule: Mapped[str | None] = mapped_column(Text, nullable=True)


class FailureMixin:
    """One failed attempt of a job: when, on which worker, and the error's text."""

    id: Mapped[int] = _id()
    job_id: Mapped[int] = mapped_column(BigInteger, nullable=False)
    queue: Mapped[str] = mapped_column(Text, nullable=False)
    handler: Mapped[str] = mapped_column(Text, nullable=False)
    attempt: Mapped[int] = mapped_column(BigInteger, nullable=False)
    claim_no: Mapped[int] = mapped_column(BigInteger, nullable=False)
    worker: Mapped[str | None] = mapped_column(Text, nullable=True)
    error: Mapped[str] = mapped_column(Text, nullable=False)
    claimed_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    failed_at: Mapped[dt.datetime] = _now()


class WorkerMixin:
    """A worker that was seen alive: a view for operators, never the base of a job's ownership."""

    id: Mapped[str] = mapped_column(Text, nullable=False)
    host: Mapped[str] = mapped_column(Text, nullable=False)
    pid: Mapped[int] = mapped_column(BigInteger, nullable=False)
    version: Mapped[str] = mapped_column(Text, nullable=False)
    queues: Mapped[Any] = mapped_column(_Json, nullable=False)
    handlers: Mapped[Any] = mapped_column(_Json, nullable=False)
    concurrency: Mapped[int] = mapped_column(BigInteger, nullable=False)
    running: Mapped[int] = mapped_column(BigInteger, nullable=False, server_default=text("0"))
    started_at: Mapped[dt.datetime] = _now()
    heartbeat_at: Mapped[dt.datetime] = _now()
    alive_until: Mapped[dt.datetime] = mapped_column(_Time, nullable=False)


class SleeperMixin:
    """A queue on which some worker sleeps: only then does an enqueue send a notification."""

    queue: Mapped[str] = mapped_column(Text, nullable=False)
    asleep_until: Mapped[dt.datetime] = mapped_column(_Time, nullable=False)


class StepMixin:
    """The step marker: one row, the newest migration step that these tables have.

    `min_client` is the oldest release of this package that may work on them, so that an older
    release can tell whether a step that it does not know concerns it.
    """

    revision: Mapped[str] = mapped_column(Text, nullable=False)
    min_client: Mapped[str] = mapped_column(Text, nullable=False)


class QueueMixin:
    """What an operator has set for a queue: a pause and limits. A queue without a row has none.

    `rate_limit` is the number of jobs that may start in each `rate_period`.
    """

    queue: Mapped[str] = mapped_column(Text, nullable=False)
    paused_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    tenant_limit: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    running_limit: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    rate_limit: Mapped[int | None] = mapped_column(BigInteger, nullable=True)
    rate_period: Mapped[dt.timedelta | None] = mapped_column(_Period, nullable=True)
    updated_at: Mapped[dt.datetime] = _now()


class ScheduleMixin:
    """A recurring definition, by cron expression or period, and the job that it makes."""

    name: Mapped[str] = mapped_column(Text, nullable=False)
    cron: Mapped[str | None] = mapped_column(Text, nullable=True)
    every: Mapped[dt.timedelta | None] = mapped_column(_Period, nullable=True)
    timezone: Mapped[str] = mapped_column(Text, nullable=False, server_default=text("'UTC'"))
    handler: Mapped[str] = mapped_column(Text, nullable=False)
    queue: Mapped[str] = mapped_column(Text, nullable=False)
    payload: Mapped[Any] = mapped_column(_Json, nullable=False, server_default=text("'{}'"))
    priority: Mapped[int] = mapped_column(SmallInteger, nullable=False, server_default=text("0"))
    max_attempts: Mapped[int] = mapped_column(BigInteger, nullable=False, server_default=text("20"))
    tenant: Mapped[str | None] = mapped_column(Text, nullable=True)
    misfire: Mapped[str] = mapped_column(Text, nullable=False, server_default=text("'coalesce'"))
    grace: Mapped[dt.timedelta | None] = mapped_column(_Period, nullable=True)
    paused_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    disabled_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    next_due_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    last_due_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    created_at: Mapped[dt.datetime] = _now()
    updated_at: Mapped[dt.datetime] = _now()


class ArchivedJobMixin:
    """A finished job that was moved out of the jobs: their columns, and when it was moved."""

    id: Mapped[int] = mapped_column(_Id, nullable=False, autoincrement=False)
    queue: Mapped[str] = mapped_column(Text, nullable=False)
    handler: Mapped[str] = mapped_column(Text, nullable=False)
    payload: Mapped[Any] = mapped_column(_Json, nullable=False)
    status: Mapped[str] = mapped_column(Text, nullable=False)
    priority: Mapped[int] = mapped_column(SmallInteger, nullable=False)
    tenant: Mapped[str | None] = mapped_column(Text, nullable=True)
    run_at: Mapped[dt.datetime] = mapped_column(_Time, nullable=False)
    scheduled_for: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    attempts: Mapped[int] = mapped_column(BigInteger, nullable=False)
    max_attempts: Mapped[int] = mapped_column(BigInteger, nullable=False)
    claim_no: Mapped[int] = mapped_column(BigInteger, nullable=False)
    locked_by: Mapped[str | None] = mapped_column(Text, nullable=True)
    claimed_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    leased_until: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    cancel_requested_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    idempotency_key: Mapped[str | None] = mapped_column(Text, nullable=True)
    unique_key: Mapped[str | None] = mapped_column(Text, nullable=True)
    result: Mapped[Any] = mapped_column(_Json, nullable=True)
    last_error: Mapped[str | None] = mapped_column(Text, nullable=True)
    meta: Mapped[Any] = mapped_column(_Json, nullable=False)
    created_at: Mapped[dt.datetime] = mapped_column(_Time, nullable=False)
    updated_at: Mapped[dt.datetime] = mapped_column(_Time, nullable=False)
    finished_at: Mapped[dt.datetime | None] = mapped_column(_Time, nullable=True)
    schedule: Mapped[str | None] = mapped_column(Text, nullable=True)
    archived_at: Mapped[dt.datetime] = _now()


@dataclass(frozen=True, eq=False)
class Tables:
    """The tables under one name and schema, and the classes that are mapped to them."""

    name: str
    schema: str | None
    jobs: Table
    failures: Table
    workers: Table
    sleepers: Table
    queues: Table
    schedules: Table
    archive: Table
    step: Table
    Job: type[JobMixin] = field(repr=False)
    Failure: type[FailureMixin] = field(repr=False)
    Worker: type[WorkerMixin] = field(repr=False)
    Sleeper: type[SleeperMixin] = field(repr=False)
    Queue: type[QueueMixin] = field(repr=False)
    Schedule: type[ScheduleMixin] = field(repr=False)
    ArchivedJob: type[ArchivedJobMixin] = field(repr=False)
    Step: type[StepMixin] = field(repr=False)

    @property
    def all(self) -> tuple[Table, ...]:
        """Every table, the jobs first."""
        return (
            self.jobs,
            self.failures,
            self.workers,
            self.sleepers,
            self.queues,
            self.schedules,
            self.archive,
            self.step,
        )


# What `_map()` calls its classes, after a prefix.
_CLASSES = (
    "Job", "Failure", "Worker", "Sleeper", "Queue", "Schedule", "ArchivedJob", "Step",
)  # fmt: skip


def attach(
    base: type[DeclarativeBase] | type[Any] | MetaData,
    *,
    name: str = DEFAULT_NAME,
    schema: Any = None,
    register: bool = True,
) -> Tables:
    """Put the queue's tables into a declarative base or a MetaData, and return them.

    On a declarative base the classes are mapped in the host's registry as `SaJobsJob`,
    `SaJobsFailure`, ..., so that host models can hold foreign keys and relationships to them; they
    do not inherit from the base, whose own columns and dataclass rules would reach them. With
    `name="mail"` they are `SaJobsMailJob`, ..., and for a second queue of that name, in the schema
    "reports", `SaJobsMailInReportsJob`, ... The tables are called `name`, `name_failures`, ...
    `schema=None` means the metadata's own schema;
    `BLANK_SCHEMA` (from sqlalchemy.schema) means none.

    Alembic's autogenerate then writes the revisions that create and upgrade these tables, and
    leaves them alone otherwise; `register=False` opts out of that, and does not import Alembic.

    Raises AttachError for a name or schema that is no plain identifier, a name so long that
    PostgreSQL would cut one of ours, one of the few that our statements use within themselves, a
    metadata that already has such a table, or a base that already has such a class.
    """
    if isinstance(base, MetaData):
        metadata, mappings = base, registry(metadata=base)
    else:
        metadata, mappings = _declarative(base)
    name, resolved = check_names(name, _resolve_schema(schema, metadata), AttachError)
    _refuse_taken_tables(name, resolved, metadata)
    prefix = _class_prefix(name, resolved, metadata)
    _refuse_taken_classes(prefix, name, mappings)
    tables = _map(_bridge(mappings, metadata), prefix, name, resolved)
    metadata.info.setdefault("sa_jobs", []).append(tables)
    if register:
        # Always, and now: Alembic may be imported after the models, and then it is too late to
        # notice. By its name, since that module is above this one.
        import_module("sa_jobs.alembic").register()
    return tables


def _declarative(base: Any) -> tuple[MetaData, registry]:
    mappings = getattr(base, "registry", None)
    metadata = getattr(base, "metadata", None)
    if not isinstance(mappings, registry) or not isinstance(metadata, MetaData):
        raise AttachError(
            f"attach() takes a declarative base (Flask-SQLAlchemy: db.Model) or a MetaData, "
            f"not {base!r}"
        )
    return metadata, mappings


def _class_prefix(name: str, schema: str | None, metadata: MetaData) -> str:
    """Return what our classes' names begin with: relationships by name need them to differ."""
    prefix = "SaJobs" if name == DEFAULT_NAME else "SaJobs" + _in_camel_case(name)
    if any(attached.name == name for attached in metadata.info.get("sa_jobs", ())):
        prefix += "In" + _in_camel_case(schema or "no_schema")
    return prefix


def _in_camel_case(name: str) -> str:
    return "".join(part.title() for part in name.split("_"))


def _refuse_taken_classes(prefix: str, name: str, mappings: registry) -> None:
    # Two classes of one name would make relationships to either of them by its name fail.
    taken = {mapper.class_.__name__: mapper.class_ for mapper in mappings.mappers}
    for class_name in (prefix + kind for kind in _CLASSES):
        if class_name in taken:
            other = taken[class_name]
            raise AttachError(
                f"name={name!r} would map a class {class_name}, and there is one already, for the "
                f"table {other.__tablename__!r}: use a name= that differs in more than capitals "
                "and underscores"
            )


def _bridge(mappings: registry, metadata: MetaData) -> type[DeclarativeBase]:
    """Return a bare declarative base that maps into the host's registry and metadata."""
    return type("SaJobsBase", (DeclarativeBase,), {"registry": mappings, "metadata": metadata})


def _resolve_schema(schema: Any, metadata: MetaData) -> str | None:
    if schema is BLANK_SCHEMA:
        return None
    if schema is None:
        return metadata.schema
    return cast("str", schema)


def _refuse_taken_tables(name: str, schema: str | None, metadata: MetaData) -> None:
    for suffix in ddl.TABLE_SUFFIXES:
        key = f"{schema}.{name}{suffix}" if schema else name + suffix
        if key in metadata.tables:
            raise AttachError(
                f"the metadata already has a table {key!r}: attach() each queue once, "
                "or choose another name="
            )


def _map(bridge: type[DeclarativeBase], prefix: str, name: str, schema: str | None) -> Tables:
    def mapped(class_name: str, mixin: type[Any], suffix: str, *arguments: Any) -> Any:
        namespace = {
            "__module__": __name__,
            "__doc__": mixin.__doc__,
            "__tablename__": name + suffix,
            # None would mean the metadata's own.
            "__table_args__": (*arguments, {"schema": schema or BLANK_SCHEMA}),
        }
        return type(prefix + class_name, (mixin, bridge), namespace)

    def named(suffix: str) -> str:
        return conv(name + suffix)

    def partial_index(suffix: str, where: str, *columns: Any, unique: bool = False) -> None:
        condition = text(where)
        Index(
            named(suffix),
            *columns,
            unique=unique,
            postgresql_where=condition,
            sqlite_where=condition,
        )

    job = mapped(
        "Job",
        JobMixin,
        "",
        PrimaryKeyConstraint("id", name=named("_pkey")),
        CheckConstraint(
            "status IN ('ready', 'running', 'done', 'dead', 'cancelled')",
            name=named("_status_check"),
        ),
        # So that hand-written SQL cannot break the fence.
        CheckConstraint(
            "(status = 'running') = (locked_by IS NOT NULL AND leased_until IS NOT NULL)",
            name=named("_lease_check"),
        ),
        CheckConstraint("max_attempts >= 1", name=named("_max_attempts_check")),
    )
    jobs = cast("Table", job.__table__)
    c = jobs.c
    partial_index("_ready_idx", "status = 'ready'", c.queue, c.priority.desc(), c.run_at, c.id)
    # Not on leased_until: a heartbeat must touch no indexed column to stay a HOT update.
    partial_index("_running_idx", "status = 'running'", c.locked_by, c.id)
    partial_index("_dead_idx", "status = 'dead'", c.finished_at)
    partial_index(
        "_idempotency_key_idx", "idempotency_key IS NOT NULL", c.idempotency_key, unique=True
    )
    partial_index(
        "_unique_key_idx",
        "unique_key IS NOT NULL AND status IN ('ready', 'running')",
        c.unique_key,
        unique=True,
    )

    partial_index("_schedule_idx", "schedule IS NOT NULL", c.schedule, c.scheduled_for, unique=True)
    partial_index("_finished_idx", "status IN ('done', 'cancelled')", c.finished_at)

    failure = mapped(
        "Failure",
        FailureMixin,
        "_failures",
        PrimaryKeyConstraint("id", name=named("_failures_pkey")),
        ForeignKeyConstraint(
            ["job_id"], [jobs.c.id], name=named("_failures_job_id_fkey"), ondelete="CASCADE"
        ),
        Index(named("_failures_job_id_idx"), "job_id"),
        Index(named("_failures_failed_at_idx"), "failed_at"),
    )
    worker = mapped(
        "Worker",
        WorkerMixin,
        "_workers",
        PrimaryKeyConstraint("id", name=named("_workers_pkey")),
    )
    sleeper = mapped(
        "Sleeper",
        SleeperMixin,
        "_sleepers",
        PrimaryKeyConstraint("queue", name=named("_sleepers_pkey")),
    )
    queue = mapped(
        "Queue",
        QueueMixin,
        "_queues",
        PrimaryKeyConstraint("queue", name=named("_queues_pkey")),
        CheckConstraint(
            "(rate_limit IS NULL) = (rate_period IS NULL)", name=named("_queues_rate_check")
        ),
    )
    schedule = mapped(
        "Schedule",
        ScheduleMixin,
        "_schedules",
        PrimaryKeyConstraint("name", name=named("_schedules_pkey")),
        CheckConstraint(
            "(cron IS NULL) <> (every IS NULL)", name=named("_schedules_cadence_check")
        ),
        CheckConstraint(
            "misfire IN ('skip', 'coalesce', 'all')", name=named("_schedules_misfire_check")
        ),
    )
    archived_job = mapped(
        "ArchivedJob",
        ArchivedJobMixin,
        "_archive",
        PrimaryKeyConstraint("id", name=named("_archive_pkey")),
    )
    step = mapped(
        "Step",
        StepMixin,
        "_step",
        PrimaryKeyConstraint("revision", name=named("_step_pkey")),
    )
    tables = Tables(
        name=name,
        schema=schema,
        jobs=jobs,
        failures=failure.__table__,
        workers=worker.__table__,
        sleepers=sleeper.__table__,
        queues=queue.__table__,
        schedules=schedule.__table__,
        archive=archived_job.__table__,
        step=step.__table__,
        Job=job,
        Failure=failure,
        Worker=worker,
        Sleeper=sleeper,
        Queue=queue,
        Schedule=schedule,
        ArchivedJob=archived_job,
        Step=step,
    )
    for table in tables.all:
        # On each, since Table.to_metadata() takes this along: so autogenerate knows it as ours.
        table.info["sa_jobs"] = name
    ddl.listen(tables)
    return tables


class Base(DeclarativeBase):
    """The base of the default mapping, for programs without a declarative base of their own."""


metadata = Base.metadata
DEFAULT_TABLES = attach(Base, register=False)
Job = DEFAULT_TABLES.Job
Failure = DEFAULT_TABLES.Failure
