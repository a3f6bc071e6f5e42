"""Where the tables are: by a schema that is named, mapped, or found on the search path."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Connection, text

from sa_jobs.errors import MigrationError
from sa_jobs.names import check_names


class Found(NamedTuple):
    """Where tables are, and what their step marker says."""

    schema: str
    revision: str | None
    min_client: str | None


def check_place(dialect: str, name: Any, schema: Any) -> tuple[str, str | None]:
    """Return name and schema as plain text; raise MigrationError where there can be no tables."""
    if dialect != "postgresql":
        raise MigrationError(
            f"the migrations of sa-jobs run on PostgreSQL, not on {dialect}: in a revision that "
            'runs on both, put `if op.get_context().dialect.name == "postgresql":` before the '
            f"call, and on {dialect} call create_all() on the metadata that was attached"
        )
    return check_names(name, schema, MigrationError)


def find(connection: Connection, *, name: str, schema: str | None) -> Found | None:
    """Return where the tables are and what their marker says, None if there are no tables.

    Without a schema, the first one on the search path that has a step marker counts, as for the
    statements of workers and applications.
    """
    name, schema = check_place(connection.dialect.name, name, schema)
    schema = mapped(connection, schema)
    return find_in(connection, name, schema or visible(connection, name))


def find_in(connection: Connection, name: str, schema: str | None) -> Found | None:
    """Return what the marker of the tables in this very schema says, None if there are none."""
    if schema is None:
        return None
    marker = connection.execute(
        text(
            "SELECT has_schema_privilege(space.oid, 'USAGE'),"
            " has_table_privilege(marker.oid, 'SELECT'), current_user,"
            " (SELECT count(*) = 2 FROM pg_catalog.pg_attribute WHERE attrelid = marker.oid"
            " AND attname IN ('revision', 'min_client') AND NOT attisdropped)"
            " FROM pg_catalog.pg_class AS marker"
            " JOIN pg_catalog.pg_namespace AS space ON space.oid = marker.relnamespace"
            " WHERE space.nspname = CAST(:schema AS text) AND marker.relname = CAST(:name AS text)"
        ),
        {"schema": schema, "name": f"{name}_step"},
    ).one_or_none()
    if marker is None:
        return None
    table = qualified(f"{name}_step", schema)
    # Looked at beforehand, since an error would leave the caller's transaction aborted.
    may_look, may_read, role, is_ours = marker
    if not (may_look and may_read):
        grant = f"SELECT ON {table}" if may_look else f'USAGE ON SCHEMA "{schema}"'
        raise MigrationError(
            f'the role "{role}" may not read the step marker {table}; let its owner run: '
            f'GRANT {grant} TO "{role}"'
        )
    if not is_ours:
        raise MigrationError(
            f"there is a table {table} that is not of sa-jobs: choose another name= or schema=, or "
            "move that table away"
        )
    row = connection.execute(
        text(f"SELECT revision, min_client FROM {table} ORDER BY revision DESC LIMIT 1")
    ).one_or_none()
    return Found(schema, *(row or (None, None)))


def locate(connection: Connection, name: str, schema: str | None, *, alone: bool) -> str:
    """Return the schema that a migration works in: the one given, or where CREATE puts tables.

    Never tables farther down the search path, which may be somebody else's: where there are such
    and none of ours here, raise MigrationError, unless the caller makes its own `alone`.
    """
    schema = mapped(connection, schema)
    if schema is not None:
        return schema
    here = connection.scalar(text("SELECT current_schema()"))
    if here is None:
        raise MigrationError(
            "no schema on the connection's search_path exists: create one, or say schema="
        )
    there = None if alone or find_in(connection, name, here) else visible(connection, name)
    if there is not None:
        raise MigrationError(
            f'the tables of {name} are in the schema "{there}", and not in "{here}", where the '
            "connection's search_path creates tables: say which of the two is meant, "
            f"schema={there!r} or schema={here!r} (--schema on the command line)"
        )
    return str(here)


def visible(connection: Connection, name: str) -> str | None:
    """Return the schema of the first tables on the search path."""
    schema: str | None = connection.scalar(
        text(
            "SELECT space.nspname FROM pg_catalog.pg_class AS marker"
            " JOIN pg_catalog.pg_namespace AS space ON space.oid = marker.relnamespace"
            " WHERE marker.relname = CAST(:name AS text)"
            " AND pg_catalog.pg_table_is_visible(marker.oid)"
        ),
        {"name": f"{name}_step"},
    )
    return schema


def mapped(connection: Connection, schema: str | None) -> str | None:
    """Return the schema that the connection's `schema_translate_map` puts in place of this one."""
    given = connection.get_execution_options().get("schema_translate_map") or {}
    if schema not in given:
        return schema
    try:
        return check_names("sa_jobs", given[schema], MigrationError)[1]
    except MigrationError as error:
        raise MigrationError(f"schema_translate_map for {schema!r}: {error}") from None


def place_text(schema: str | None, name: str) -> str:
    """Return how the tables are called in a message."""
    return f"{schema}.{name}" if schema else name


def place_options(schema: str | None, name: str) -> str:
    """Return the options that name these tables on the command line."""
    return (f" --schema {schema}" if schema else "") + (
        f" --name {name}" if name != "sa_jobs" else ""
    )


def qualified(table: str, schema: str | None) -> str:
    """Return the quoted name of a table, for use in SQL."""
    return f'"{schema}"."{table}"' if schema else f'"{table}"'
