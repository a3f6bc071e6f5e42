"""How checked jobs get into the table: one by one, or some thousand in a statement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Any

import msgspec
from sqlalchemy import Connection

from sa_jobs import duplicates, jsontext, statements
from sa_jobs.autocommit import savepoint
from sa_jobs.duplicates import Holder
from sa_jobs.errors import EnqueueRaceError
from sa_jobs.job_options import OnConflict, Values
from sa_jobs.models import Tables

# Few enough for a statement and its parameters to stay small, many enough for the round trip to
# vanish.
ROWS_PER_STATEMENT = 5_000
PAYLOADS_PER_STATEMENT = 2**24
_LOOKUPS = 20


class Enqueued(msgspec.Struct, frozen=True, gc=False):
    """The job that an enqueue added (`created`), or found under its key (not `created`)."""

    id: int
    created: bool


def insert_one(
    connection: Connection, tables: Tables, values: Values, on_conflict: OnConflict
) -> Enqueued:
    """Add a job, or do with the one that holds its key what `on_conflict` says."""
    found = _insert_or_find(connection, tables, values)
    if isinstance(found, Enqueued):
        return found
    if on_conflict == "raise":
        raise duplicates.taken(found, values)
    if on_conflict == "replace":
        duplicates.replace(connection, tables, found, values)
    return Enqueued(found.id, False)


def insert_many(
    connection: Connection,
    tables: Tables,
    common: Values,
    rows: list[Values],
    on_conflict: OnConflict,
) -> list[Enqueued]:
    """Add jobs and return their ids in the order of the rows.

    `rows` hold what differs from `common`.
    """
    keyed = any("idempotency_key" in row or "unique_key" in row for row in rows)
    firsts = _firsts(rows) if keyed else []
    if keyed and on_conflict == "raise":
        duplicates.refuse_rivals(rows, firsts)
    # Refused, the call leaves nothing behind and the transaction usable.
    with savepoint(connection) if keyed and on_conflict != "existing" else nullcontext():
        if connection.dialect.name != "postgresql":
            return [insert_one(connection, tables, common | row, on_conflict) for row in rows]
        if not keyed:
            return _insert_plain(connection, tables, common, rows)
        return _insert_keyed(connection, tables, common, rows, firsts, on_conflict)


def _insert_or_find(connection: Connection, tables: Tables, values: Values) -> Enqueued | Holder:
    insert = statements.insert_one(tables, given=frozenset(values))
    # The key's holder can vanish between the two statements: it ended, or it was pruned.
    for _ in range(_LOOKUPS):
        created = connection.execute(insert, values).scalar()
        if created is not None:
            return Enqueued(created, True)
        (holder,) = duplicates.holders(connection, tables, [values])
        if holder is not None:
            return holder
    raise EnqueueRaceError(
        f"the holder of {duplicates.keys_in(values)} appeared and vanished {_LOOKUPS} times; "
        "roll back and try again"
    )


def _insert_plain(
    connection: Connection, tables: Tables, common: Values, rows: list[Values]
) -> list[Enqueued]:
    """Insert rows without keys, of which none can be a duplicate."""
    results: list[Enqueued] = []
    for chunk in _chunks(rows):
        # Ids are given out in the order of the rows; RETURNING has none.
        ids = sorted(_execute(connection, tables, common, chunk))
        results.extend(map(Enqueued, ids, repeat(True)))
    return results


def _insert_keyed(
    connection: Connection,
    tables: Tables,
    common: Values,
    rows: list[Values],
    firsts: list[int],
    on_conflict: OnConflict,
) -> list[Enqueued]:
    """Insert rows, some with keys, in the order of the keys, whichever order they are given in."""
    ordered = sorted(
        firsts,
        key=lambda position: (
            rows[position].get("idempotency_key", ""),
            rows[position].get("unique_key", ""),
        ),
    )
    results: list[Enqueued | None] = [None] * len(rows)
    ids = None if ordered == firsts else _ids_for(connection, tables, rows)
    if ids is None:
        _insert_as_given(connection, tables, common, rows, firsts, results)
    else:
        _insert_with_ids(connection, tables, common, rows, ordered, ids, results)
    skipped = [position for position, result in enumerate(results) if result is None]
    pairs = []
    for position, found in _found(connection, tables, common, rows, skipped):
        if isinstance(found, Enqueued):
            results[position] = found
            continue
        results[position] = Enqueued(found.id, False)
        if on_conflict == "raise":
            raise duplicates.taken(found, rows[position])
        pairs.append((found, common | rows[position]))
    if on_conflict == "replace":
        duplicates.replace_many(connection, tables, pairs)
    return [result for result in results if result is not None]


def _insert_with_ids(
    connection: Connection,
    tables: Tables,
    common: Values,
    rows: list[Values],
    positions: list[int],
    ids: list[int],
    results: list[Enqueued | None],
) -> None:
    inserted: set[int] = set()
    given = [rows[position] | {"id": ids[position]} for position in positions]
    for chunk in _chunks(given):
        inserted.update(_execute(connection, tables, common, chunk))
    for position in positions:
        if ids[position] in inserted:
            results[position] = Enqueued(ids[position], True)


def _insert_as_given(
    connection: Connection,
    tables: Tables,
    common: Values,
    rows: list[Values],
    positions: list[int],
    results: list[Enqueued | None],
) -> None:
    """Insert rows in their order; the inserted are a subsequence of them, with equal keys."""
    remaining = iter(positions)
    for chunk in _chunks([rows[position] for position in positions]):
        # Ids are given out in the order of the rows; RETURNING has none.
        inserted = sorted(_execute(connection, tables, common, chunk))
        names = [name for name in statements.KEYS if any(name in row for row in chunk)]
        following = 0
        for row, position in zip(chunk, remaining):  # noqa: B905 - the next chunk goes on
            if following < len(inserted):
                id, *keys = inserted[following] if names else [inserted[following]]
                if keys == [row.get(name) for name in names]:
                    results[position] = Enqueued(id, True)
                    following += 1


def _execute(
    connection: Connection, tables: Tables, common: Values, rows: list[Values]
) -> list[Any]:
    """Insert rows with one statement, and return what it selects of those that were added."""
    varying = frozenset().union(*rows)
    if "run_at" in varying:
        # A row that has neither takes both from the call.
        common = {"run_at": None, "delay": 0.0, **common}
    parameters = common | {
        name: jsontext.array([row.get(name, common.get(name)) for row in rows])
        for name in varying
        if name != "payload"
    }
    parameters["payload"] = jsontext.join([row["payload"] for row in rows])
    statement = statements.insert_many(tables, given=frozenset(common), varying=varying)
    added: list[Any] = jsontext.loads(connection.execute(statement, parameters).scalar() or "[]")
    return added


def _ids_for(connection: Connection, tables: Tables, rows: Sequence[Values]) -> list[int] | None:
    """Return an id for each row, or None if the role may not take ids.

    Rows that are inserted in the order of their keys would get ids in that order, too.
    """
    text = connection.execute(statements.next_ids(tables), {"count": len(rows)}).scalar_one()
    ids: list[int] = jsontext.loads(text)
    return None if None in ids else sorted(ids)


def _firsts(rows: Sequence[Values]) -> list[int]:
    """Return the positions of the rows whose keys no earlier one of these has.

    The first of equal keys wins, also where the order by another key would put it last.
    """
    taken: set[tuple[str, str]] = set()
    firsts: list[int] = []
    for position, row in enumerate(rows):
        keys = {(name, row[name]) for name in statements.KEYS if name in row}
        if taken.isdisjoint(keys):
            taken |= keys
            firsts.append(position)
    return firsts


def _found(
    connection: Connection,
    tables: Tables,
    common: Values,
    rows: Sequence[Values],
    positions: list[int],
) -> Iterator[tuple[int, Enqueued | Holder]]:
    """Yield for each row that was not inserted the job that holds its key, or else add it."""
    for start in range(0, len(positions), ROWS_PER_STATEMENT):
        chunk = positions[start : start + ROWS_PER_STATEMENT]
        holders = duplicates.holders(connection, tables, [rows[position] for position in chunk])
        for position, holder in zip(chunk, holders, strict=True):
            if holder is None:
                # It has vanished meanwhile, or a row of the call that was not added had the key.
                yield position, _insert_or_find(connection, tables, common | rows[position])
            else:
                yield position, holder


def _chunks(rows: list[Values]) -> Iterator[list[Values]]:
    """Yield the rows in parts that are good for one statement each."""
    chunk: list[Values] = []
    size = 0
    for row in rows:
        chunk.append(row)
        size += len(row["payload"])
        if len(chunk) == ROWS_PER_STATEMENT or size > PAYLOADS_PER_STATEMENT:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
