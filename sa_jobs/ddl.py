"""What `create_all()` must do beyond tables and indexes: schema, storage, trigger, step marker.

The migration steps hold the same SQL as frozen text; a test compares `pg_dump -s` of both ways.
No statement here contains a percent sign or a colon followed by a word: Alembic and the drivers
would read them as parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import DDL, event, inspect
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
    "_sleepers",
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
# for due rows of queues on which a worker sleeps: a committing NOTIFY takes a lock that is global
# to the server. The body names every object with its schema, and the search path is pinned with
# pg_temp last, so that no object of the inserting role can stand in for one of ours. The schema
# is looked up when the function is made, since it may be whatever the search path says.
NOTIFY_FUNCTION = """\
DO $do$
DECLARE
    place text := {place};
    channel text := 'sa_jobs_' || left(
        encode(sha256(convert_to(place || '.{name}', 'UTF8')), 'hex'), 16);
BEGIN
    EXECUTE replace(replace($create$
CREATE FUNCTION @schema@."{name}_notify"() RETURNS trigger
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $function$
BEGIN
    IF coalesce(current_setting('sa_jobs.notify', true), '') <> 'off' THEN
        PERFORM pg_notify(@channel@, sleeping.queue_hash)
        FROM (
            SELECT DISTINCT left(
                encode(sha256(convert_to(sleeper.queue, 'UTF8')), 'hex'), 16) AS queue_hash
            FROM new_jobs
            JOIN @schema@."{name}_sleepers" AS sleeper ON sleeper.queue = new_jobs.queue
            WHERE new_jobs.status = 'ready'
            AND new_jobs.run_at <= clock_timestamp()
            AND sleeper.asleep_until > clock_timestamp()
        ) AS sleeping;
    END IF;
    RETURN NULL;
END
$function$
$create$, '@schema@', quote_ident(place)), '@channel@', quote_literal(channel));
END
$do$"""

NOTIFY_TRIGGER = """\
CREATE TRIGGER "{name}_notify" AFTER INSERT ON {table}
REFERENCING NEW TABLE AS new_jobs
FOR EACH STATEMENT EXECUTE FUNCTION {function}()"""


def listen(tables: Tables) -> None:
    """Make `create_all()` and `drop_all()` on PostgreSQL complete for these tables."""
    schema = f'"{tables.schema}".' if tables.schema else ""
    names = {
        "name": tables.name,
        "table": f'{schema}"{tables.name}"',
        "function": f'{schema}"{tables.name}_notify"',
        "place": f"'{tables.schema}'" if tables.schema else "current_schema()",
    }
    if tables.schema:
        event.listen(tables.jobs.metadata, "before_create", _create_schema(tables.schema))
    for statement in (STORAGE, NOTIFY_FUNCTION, NOTIFY_TRIGGER):
        event.listen(
            tables.jobs,
            "after_create",
            _ddl(statement.format(**names)).execute_if(dialect="postgresql"),
        )
    event.listen(
        tables.jobs,
        "after_drop",
        _ddl(f"DROP FUNCTION IF EXISTS {names['function']}()").execute_if(dialect="postgresql"),
    )
    event.listen(
        tables.step,
        "after_create",
        _ddl(
            f'INSERT INTO {schema}"{tables.step.name}" (revision, min_client)'
            f" VALUES ('{STEP}', '{MIN_CLIENT}')"
        ),
    )


def _ddl(statement: str) -> DDL:
    return DDL(statement)  # type: ignore[no-untyped-call]


def _create_schema(schema: str) -> Any:
    def create(target: Any, connection: Connection, **_: Any) -> None:
        # IF NOT EXISTS would ask for CREATE on the database even where the schema exists.
        if connection.dialect.name == "postgresql" and not inspect(connection).has_schema(schema):
            connection.execute(CreateSchema(schema))

    return create
