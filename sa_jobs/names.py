"""Which names and schemas the tables can have, by whatever way they are given."""

from __future__ import annotations

import re
from typing import Any

from sqlalchemy.schema import BLANK_SCHEMA

from sa_jobs import ddl
from sa_jobs.errors import SaJobsError

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

# What PostgreSQL cuts every name to.
_MAX_BYTES = 63

# What statements call their intermediate results; a test holds that this is all of them.
ALIASES = frozenset((
    "asked", "by_lane", "candidate", "counted", "due", "finished", "first", "gated", "given",
    "held", "history", "lane", "lapsed", "mine", "ready_lane", "ready_queue", "sa_jobs_added",
    "sa_jobs_refused", "sa_jobs_source", "served", "settled", "some_ready_queue", "taken", "twin",
    "unfinished", "unknown",
))  # fmt: skip


def check_names(name: Any, schema: Any, error: type[SaJobsError]) -> tuple[str, str | None]:
    """Return the tables' name and schema as plain text, or raise the given kind of error."""
    name = _identifier("name", name, error)
    if name in ALIASES:
        raise error(
            f"name={name!r} cannot be the tables' name, since statements of sa-jobs call an "
            f"intermediate result so: use another, as {name + '_jobs'!r}"
        )
    longest = name + max(ddl.SUFFIXES, key=len)
    if len(longest) > _MAX_BYTES:
        raise error(
            f"name={name!r} is too long: PostgreSQL would cut {longest!r} to {_MAX_BYTES} bytes; "
            f"use at most {_MAX_BYTES - len(longest) + len(name)} characters"
        )
    return name, None if schema is None else _check_schema(schema, error)


def _check_schema(schema: Any, error: type[SaJobsError]) -> str:
    if schema is BLANK_SCHEMA:
        raise error("schema=BLANK_SCHEMA is for attach() only: say schema=None here")
    checked = _identifier("schema", schema, error)
    if checked.startswith("pg_") or checked == "information_schema":
        raise error(f"schema={checked!r} is a schema of PostgreSQL's own: use another")
    return checked


def _identifier(what: str, value: Any, error: type[SaJobsError]) -> str:
    if not (isinstance(value, str) and _IDENTIFIER.fullmatch(value) and len(value) <= _MAX_BYTES):
        raise error(
            f"{what}={value!r} must be a plain identifier: letters, digits and underscores, "
            f"not starting with a digit, at most {_MAX_BYTES} characters"
        )
    # A subclass such as StrEnum would be written into revisions by its own rules.
    return str.__str__(value)
