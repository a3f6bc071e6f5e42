"""The SQL of every builder, compared with what is kept in `sql/`, the same on all SQLAlchemys.

After a wanted change run this file with SA_JOBS_WRITE_SQL=1, and read the diff.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import MetaData, column, select, table
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg
from sqlalchemy.sql import visitors
from sqlalchemy.sql.selectable import AliasedReturnsRows

from sa_jobs import AttachError, attach, lookup, presence, statements, stats
from sa_jobs.models import DEFAULT_TABLES, STATES, Tables
from sa_jobs.names import ALIASES

DIALECT: Any = PGDialect_psycopg()  # type: ignore[no-untyped-call]
SQL = Path(__file__).parent / "sql"
ELSEWHERE = attach(MetaData(), name="elsewhere", schema="other")

invoices = table("invoices", column("id"), column("due"), column("customer"))
wide = table("wide", *(column(f"c{number}") for number in range(51)))

every_option = select(
    invoices.c.id, *(invoices.c.customer.label(label) for label in statements.OPTION_LABELS)
)

Builder = Callable[..., Any]

PAYLOAD = frozenset({"payload"})
ONE = PAYLOAD | {"queue", "handler", "priority", "max_attempts"}
KEYS = frozenset({"idempotency_key", "unique_key"})
TIMES = frozenset({"run_at", "delay"})

# The builders that need to be told more than the tables; a case per line of the file.
ARGUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "insert_one": {
        "without options": {"given": ONE},
        "with a time": {"given": ONE | TIMES},
        "with keys": {"given": ONE | KEYS},
        "with meta": {"given": ONE | {"meta"}},
    },
    "insert_many": {
        "payloads only": {"given": ONE, "varying": PAYLOAD},
        "a common time": {"given": ONE | TIMES, "varying": PAYLOAD},
        "keys and times": {"given": ONE, "varying": PAYLOAD | KEYS | TIMES},
        "with ids": {"given": ONE, "varying": PAYLOAD | KEYS | {"id"}},
        "with meta": {"given": ONE | {"meta"}, "varying": PAYLOAD},
    },
    "claim": {"": {}, "from places": {"from_places": True}},
    "finish": {"": {}, "results": {"results": True}, "wait": {"results": True, "wait": True}},
    "finish_and_claim": {"": {}, "results, from places": {"results": True, "from_places": True}},
    "insert_select": {
        "payload only": {"query": select(invoices.c.id, invoices.c.due), "options": {}},
        "every option": {"query": every_option, "options": {}},
        "with meta": {"query": select(invoices.c.id), "options": {"meta": "{}"}},
    },
    "insert_select_checked": {"every option": {"query": every_option, "options": {}}},
}


def builders() -> dict[str, Builder]:
    found: dict[str, Builder] = {
        "insert_select": statements.insert_select,
        "insert_select_checked": statements.insert_select_checked,
    }
    for module in (statements, presence):
        for name, value in vars(module).items():
            # What `built` made of a function.
            if hasattr(value, "cache_info") and value.__module__ == module.__name__:
                assert name not in found
                found[name] = value
    return found


BUILDERS = builders()
NAMED_CASES = [(name, case) for name in BUILDERS for case in ARGUMENTS.get(name, {"": {}})]
CASES = [
    pytest.param(name, case, id=f"{name}-{case}" if case else name) for name, case in NAMED_CASES
]


def statement_of(name: str, case: str, tables: Tables = DEFAULT_TABLES) -> Any:
    return BUILDERS[name](tables, **ARGUMENTS.get(name, {"": {}})[case])


def compiled(name: str, case: str, tables: Tables = DEFAULT_TABLES) -> Any:
    return statement_of(name, case, tables).compile(dialect=DIALECT)


def sql_of(name: str, case: str, tables: Tables = DEFAULT_TABLES) -> str:
    return " ".join(str(compiled(name, case, tables)).split())


def file_text(name: str) -> str:
    parts = []
    for case in ARGUMENTS.get(name, {"": {}}):
        lines = [line.rstrip() for line in str(compiled(name, case)).splitlines() if line.strip()]
        parts.append("\n".join([f"-- {case}"] * bool(case) + lines) + "\n")
    return "\n".join(parts)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_sql_is_what_was_agreed(name: str) -> None:
    path = SQL / f"{name}.sql"
    if os.environ.get("SA_JOBS_WRITE_SQL"):
        path.write_text(file_text(name), encoding="utf-8")
    assert file_text(name).split() == path.read_text(encoding="utf-8").split()


def test_no_file_is_kept_for_a_builder_that_is_gone() -> None:
    assert {path.stem for path in SQL.glob("*.sql")} == set(BUILDERS)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_state_is_spelled_out_and_never_bound(name: str, case: str) -> None:
    bound = compiled(name, case).params.values()
    assert not {value for value in bound if isinstance(value, str)} & set(STATES)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_table_is_named_with_its_schema(name: str, case: str) -> None:
    sql = re.sub(r"'[^']*'", "''", sql_of(name, case, ELSEWHERE))
    # Parameters, labels and aliases beside a caller's query.
    for own in (*statements.OPTION_LABELS, *ALIASES):
        sql = sql.replace(own, "")
    sql = re.sub(r"%\(\w+\)s", "", sql)
    # A row lock names its table as it is known in the statement.
    sql = sql.replace("FOR NO KEY UPDATE OF elsewhere", "")
    assert "sa_jobs" not in sql
    assert len(re.findall(r"\belsewhere", sql)) == len(re.findall(r"\bother\.elsewhere", sql))


def test_attach_knows_every_name_that_a_statement_uses_within_itself() -> None:
    """Tables of such a name would stand in for the intermediate result, or the other way round."""
    found = {alias for name, case in NAMED_CASES for alias in aliases_in(statement_of(name, case))}
    for module in (lookup, stats):
        for name, value in vars(module).items():
            if hasattr(value, "cache_info") and value.__module__ == module.__name__:
                arguments: Any = (None, frozenset()) if name == "_list" else ()
                found |= aliases_in(value(DEFAULT_TABLES, *arguments))
    assert found == ALIASES


def aliases_in(statement: Any) -> set[str]:
    elements = visitors.iterate(statement)
    names = {element.name for element in elements if isinstance(element, AliasedReturnsRows)}
    # What SQLAlchemy names itself is told apart from every table.
    return {str(name) for name in names if not str(name).startswith("%(")}


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_attach_refuses_a_name_that_a_statement_uses_within_itself(name: str) -> None:
    host = MetaData()
    with pytest.raises(AttachError, match=f"'{name}_jobs'"):
        attach(host, name=name)
    assert not host.tables
    attach(host, name=f"{name}_jobs", schema=name)


@pytest.mark.parametrize("name", ["insert_select", "insert_select_checked"])
def test_a_parameter_beside_a_callers_query_has_a_name_of_ours(name: str) -> None:
    for case in ARGUMENTS[name]:
        assert all(key.startswith("sa_jobs_") for key in compiled(name, case).params)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_no_statement_reads_a_clock_of_ours(name: str, case: str) -> None:
    values = compiled(name, case).params.values()
    assert not [value for value in values if hasattr(value, "tzinfo")]


CLAIMS = [
    ("claim", ""),
    ("claim", "from places"),
    ("finish_and_claim", ""),
    ("finish_and_claim", "results, from places"),
]


@pytest.mark.parametrize(("name", "case"), CLAIMS)
def test_a_claim_locks_only_what_others_have_not(name: str, case: str) -> None:
    sql = sql_of(name, case)
    assert "FOR NO KEY UPDATE SKIP LOCKED" in sql
    assert "FOR UPDATE" not in sql


@pytest.mark.parametrize(("name", "case"), CLAIMS)
def test_a_claim_takes_its_candidates_as_an_array(name: str, case: str) -> None:
    assert "WHERE sa_jobs.id = ANY (array((SELECT candidate.id FROM candidate)))" in sql_of(
        name, case
    )


@pytest.mark.parametrize(("name", "case"), CLAIMS)
def test_a_claim_sorts_nothing_above_its_locks(name: str, case: str) -> None:
    """A sort there would lock all due rows before the first is given out."""
    candidates = sql_of(name, case).partition("candidate AS")[2].partition("UPDATE sa_jobs SET")[0]
    after_the_locks = candidates.partition("SKIP LOCKED")[2]
    assert after_the_locks
    assert "ORDER BY" not in after_the_locks


LATER_WRITES = [
    ("heartbeat", ""),
    ("settle", ""),
    ("finish", ""),
    ("finish", "results"),
    ("finish", "wait"),
    ("finish_and_claim", ""),
    ("finish_and_claim", "results, from places"),
]


@pytest.mark.parametrize(("name", "case"), LATER_WRITES)
def test_every_later_write_names_the_id_the_claim_and_the_owner(name: str, case: str) -> None:
    where = sql_of(name, case)
    for condition in (
        "sa_jobs.id = ANY (CAST(%(ids)s::VARCHAR AS BIGINT[]))",
        "mine.id = given.ids",
        "mine.claim_no = given.claim_nos",
        "sa_jobs.locked_by = %(worker)s::VARCHAR",
        "sa_jobs.leased_until IS NOT NULL",
    ):
        assert condition in where


@pytest.mark.parametrize(("name", "case"), LATER_WRITES)
def test_no_later_write_asks_for_the_state(name: str, case: str) -> None:
    """The planner would answer it from the partial index on running rows, dead entries and all."""
    writing = sql_of(name, case).partition("mine AS")[2].partition(" RETURNING ")[0]
    conditions = re.findall(r"\bWHERE (.*?)(?: ORDER BY|\)\)|$)", writing)
    assert len(conditions) >= 2
    assert "status" not in "".join(conditions)


def test_a_heartbeat_writes_no_column_of_an_index() -> None:
    indexed = {column.name for index in DEFAULT_TABLES.jobs.indexes for column in index.columns} | {
        "status"
    }
    written = re.findall(r"(\w+)=", sql_of("heartbeat", "").partition(" SET ")[2])
    assert {"leased_until", "meta", "updated_at"} <= set(written)
    assert not set(written) & indexed


@pytest.mark.parametrize("name", ["heartbeat", "reclaim"])
def test_what_writes_many_rows_locks_them_in_the_order_of_their_ids(name: str) -> None:
    assert re.search(r"ORDER BY sa_jobs\.id (LIMIT \S+ )?FOR NO KEY UPDATE", sql_of(name, ""))


@pytest.mark.parametrize("name", ["insert_one", "insert_many", "insert_select"])
def test_only_what_has_a_key_is_inserted_with_care_for_conflicts(name: str) -> None:
    """The clause makes PostgreSQL insert each row in two steps, a third slower."""
    for case in ARGUMENTS[name]:
        keyed = any(word in case for word in ("key", "ids", "every"))
        assert ("ON CONFLICT DO NOTHING" in sql_of(name, case)) is keyed


def test_a_builder_is_built_once_for_given_tables() -> None:
    assert statements.claim(DEFAULT_TABLES) is statements.claim(DEFAULT_TABLES)
    assert statements.claim(DEFAULT_TABLES) is not statements.claim(ELSEWHERE)


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 120])
def test_a_payload_of_any_number_of_columns_stays_within_the_arguments_of_a_call(
    count: int,
) -> None:
    query: Any = select(
        *(column(f"c{number}") for number in range(count)), column("x").label("sa_jobs_queue")
    ).select_from(wide)
    statement: Any = statements.insert_select(DEFAULT_TABLES, query, {})
    sql = str(statement.compile(dialect=DIALECT))
    calls = re.findall(r"jsonb_build_object\(([^)]*)\)", sql)
    assert len(calls) == max(1, -(-count // 50))
    assert all(len(call.split(", ")) <= 100 for call in calls)
