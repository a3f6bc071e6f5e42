"""What `create_all()` must do beyond tables and indexes: schema, storage, trigger, step marker.

The migration steps hold the same SQL as frozen text; a test compares `pg_dump -s` of both ways.
No statement here contains a percent sign or a colon followed by a word: Alembic and the drivers
would read them as parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import DDL, MetaData, Table, event, inspect
from sqlalchemy.engine import Connection
from sqlalchemy.schema import CreateSchema

if TYPE_CHECKING:
    from sa_jobs.models import Tables

# The newest step that the models stand for.
STEP = "sa_jobs_0003"
MIN_CLIENT = "0.1.0"

TABLE_SUFFIXES = (
    "",
    "_failures",
    "_workers",
    "_queues",
    "_schedules",
    "_archive",
    "_step",
)
# Every name of ours is the tables' name and one of these, so that none passes 63 bytes unseen.
SUFFIXES = (
    *TABLE_SUFFIXES,
    "_alembic_version",
    "_failures_failed_at_idx",
    "_failures_job_id_fkey",
    "_idempotency_key_idx",
    "_max_attempts_check",
    "_schedules_cadence_check",
    "_schedules_misfire_check",
)

STORAGE = """\
ALTER TABLE {table} SET (
    fillfactor = 85,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_vacuum_insert_scale_factor = 0.02,
    autovacuum_analyze_scale_factor = 0.02
)"""

# A statement-level trigger, so that rows inserted by plain SQL wake workers too. It notifies only
# for due rows of queues whose gate is open, since a worker sleeps: a committing NOTIFY takes a lock
# that is global to the server. A gate is an advisory lock, open while a worker's session holds it
# exclusively (see sa_jobs.presence): no row that every enqueue would read, at whatever isolation
# level, and none that is written each time a worker sleeps. The look at it holds it shared for a
# microsecond, and not to the end of the transaction: a long one would keep workers from opening it.
# The search path is pinned with pg_temp last, so that no object of the inserting role can stand in
# for one of ours. The schema is looked up when the function is made, since it may be whatever the
# search path says.
NOTIFY_FUNCTION = """\
DO $do$
DECLARE
    schema_name text := {place};
    place text := schema_name || '.{name}';
    channel text := 'sa_jobs_' || left(encode(sha256(convert_to(place, 'UTF8')), 'hex'), 16);
BEGIN
    EXECUTE replace(replace(replace($create$
CREATE FUNCTION @schema@."{name}_notify"() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(current_setting('sa_jobs.notify', true), '') <> 'off' THEN
        PERFORM pg_notify(@channel@, left(
            encode(sha256(convert_to(due.queue, 'UTF8')), 'hex'), 16))
        FROM (
            SELECT DISTINCT new_jobs.queue,
                hashtextextended(new_jobs.queue, hashtextextended(@place@, 0)) AS gate
            FROM new_jobs
            WHERE new_jobs.status = 'ready'
            AND new_jobs.run_at <= clock_timestamp()
        ) AS due
        WHERE CASE WHEN pg_try_advisory_lock_shared(due.gate)
            THEN NOT pg_advisory_unlock_shared(due.gate) ELSE true END;
    END IF;
    RETURN NULL;
END
$function$
$create$, '@schema@', quote_ident(schema_name)), '@channel@', quote_literal(channel)),
        '@place@', quote_literal(place));
END
$do$"""

NOTIFY_TRIGGER = """\
CREATE TRIGGER "{name}_notify" AFTER INSERT ON {table}
REFERENCING NEW TABLE AS new_jobs
FOR EACH STATEMENT EXECUTE FUNCTION {function}()"""


def listen(tables: Tables) -> None:
    """Make `create_all()` and `drop_all()` on PostgreSQL complete for these tables.

    Also for their copies: the listeners go along with `Table.to_metadata()`, and ask table and
    connection for the schema, in whose place a `schema_translate_map` may put another.
    """
    # On the metadata too, so that the host's tables in this schema find it.
    for target in (tables.jobs.metadata, *tables.all):
        event.listen(target, "before_create", _create_schema_of(tables.jobs), propagate=True)
    event.listen(tables.jobs, "after_create", _complete_jobs, propagate=True)
    event.listen(tables.jobs, "after_drop", _drop_function, propagate=True)
    event.listen(tables.step, "after_create", _mark_step, propagate=True)


def _complete_jobs(jobs: Table, connection: Connection, **_: Any) -> None:
    if connection.dialect.name != "postgresql":
        return
    schema = connection.schema_for_object(jobs)
    names = {
        "name": jobs.name,
        "table": _qualified(connection, jobs),
        "function": _qualified(connection, jobs, "_notify"),
        "place": _literal(schema) if schema else "current_schema()",
    }
    for statement in (STORAGE, NOTIFY_FUNCTION, NOTIFY_TRIGGER):
        connection.execute(_ddl(statement.format(**names)))


def _drop_function(jobs: Table, connection: Connection, **_: Any) -> None:
    if connection.dialect.name == "postgresql":
        function = _qualified(connection, jobs, "_notify")
        connection.execute(_ddl(f"DROP FUNCTION IF EXISTS {function}()"))


def _mark_step(step: Table, connection: Connection, **_: Any) -> None:
    connection.execute(
        _ddl(
            f"INSERT INTO {_qualified(connection, step)} (revision, min_client)"
            f" VALUES ('{STEP}', '{MIN_CLIENT}')"
        )
    )


def _qualified(connection: Connection, table: Table, suffix: str = "") -> str:
    quoted = connection.dialect.identifier_preparer.quote_identifier
    schema = connection.schema_for_object(table)
    return (
        f"{quoted(schema)}.{quoted(table.name + suffix)}" if schema else quoted(table.name + suffix)
    )


def _literal(value: str) -> str:
    doubled = value.replace("'", "''")
    return f"'{doubled}'"


def _ddl(statement: str) -> DDL:
    return DDL(statement)  # type: ignore[no-untyped-call]


def _create_schema_of(table: Table) -> Any:
    def create(target: MetaData | Table, connection: Connection, **_: Any) -> None:
        schema = connection.schema_for_object(table if isinstance(target, MetaData) else target)
        if schema is None or connection.dialect.name != "postgresql":
            return
        # IF NOT EXISTS would ask for CREATE on the database even where the schema exists.
        if not inspect(connection).has_schema(schema):
            connection.execute(CreateSchema(schema))

    return create
