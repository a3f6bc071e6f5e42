"""Jobs whose key is taken: who holds it, and what becomes of the job that wanted it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sqlalchemy import Connection

from sa_jobs import jsontext, presence, statements
from sa_jobs.errors import DuplicateJobError, InvalidJobError
from sa_jobs.job_options import Values
from sa_jobs.models import Tables


class Holder(Protocol):
    """The job that holds a key."""

    @property
    def id(self) -> int: ...  # noqa: D102
    @property
    def queue(self) -> str: ...  # noqa: D102
    @property
    def handler(self) -> str: ...  # noqa: D102


def holders(connection: Connection, tables: Tables, rows: Sequence[Values]) -> list[Holder | None]:
    """Return for each row the job that holds its idempotency key, or its unique key, or None."""
    wanted = {name: [row[name] for row in rows if name in row] for name in statements.KEYS}
    found: Sequence[Any] = connection.execute(
        statements.existing(tables),
        {f"{name}s": jsontext.array(keys) for name, keys in wanted.items()},
    ).all()
    by_idempotency_key = {job.idempotency_key: job for job in found if job.idempotency_key}
    by_unique_key = {job.unique_key: job for job in found if job.status in ("ready", "running")}
    return [
        by_idempotency_key.get(row.get("idempotency_key"))
        or (by_unique_key.get(row["unique_key"]) if "unique_key" in row else None)
        for row in rows
    ]


def taken(holder: Holder, values: Values) -> DuplicateJobError:
    """Return the error that names the job that holds a key."""
    return DuplicateJobError(f"job {holder.id} has {keys_in(values)} already", id=holder.id)


def keys_in(values: Values) -> str:
    """Return the keys that a job wants, in words."""
    return " or ".join(f"{name}={values[name]!r}" for name in statements.KEYS if name in values)


def replace(connection: Connection, tables: Tables, holder: Holder, values: Values) -> None:
    """Give the job that holds a key another payload and time, if it is still ready.

    Raises DuplicateJobError if it is of another handler or queue.
    """
    _check_same(holder, values)
    parameters = {
        "job_id": holder.id,
        "of_handler": holder.handler,
        "on_queue": holder.queue,
        "payload": values["payload"],
        "run_at": values.get("run_at"),
        "delay": values.get("delay", 0.0),
    }
    if connection.execute(statements.replace(tables), parameters).first() is not None:
        wake(connection, tables, [holder.queue])


def replace_many(
    connection: Connection, tables: Tables, pairs: Sequence[tuple[Holder, Values]]
) -> None:
    """Replace as `replace` does; of several for one job, the last one counts.

    Nothing is changed if one of them is of another handler or queue.
    """
    for holder, values in pairs:
        _check_same(holder, values)
    last = {holder.id: values for holder, values in pairs}
    if not last:
        return
    parameters = {
        "ids": jsontext.array(list(last)),
        "payloads": jsontext.join([values["payload"] for values in last.values()]),
        "on_queues": jsontext.array([values["queue"] for values in last.values()]),
        "run_ats": jsontext.array([values.get("run_at") for values in last.values()]),
        "delays": jsontext.array([values.get("delay", 0.0) for values in last.values()]),
        "of_handler": pairs[0][1]["handler"],
    }
    replaced = connection.execute(statements.replace_many(tables), parameters).scalars()
    queues = sorted(set(replaced))
    if queues:
        wake(connection, tables, queues)


def refuse_rivals(rows: Sequence[Values], firsts: Sequence[int]) -> None:
    """Raise InvalidJobError if not all jobs of a call are the first that want their keys."""
    if len(firsts) == len(rows):
        return
    owners: dict[tuple[str, str], int] = {}
    for position, row in enumerate(rows):
        for name in statements.KEYS:
            if name in row:
                owner = owners.setdefault((name, row[name]), position)
                if owner != position:
                    raise InvalidJobError(
                        f"row {position} has {name}={row[name]!r}, as row {owner} has: with "
                        'on_conflict="raise" all keys of a call must differ'
                    )


def wake(connection: Connection, tables: Tables, queues: Sequence[str]) -> None:
    """Wake workers that sleep on queues whose jobs were changed; the trigger sees inserts only."""
    if connection.dialect.name == "postgresql":
        connection.execute(presence.wake(tables), {"queues": queues})


def _check_same(holder: Holder, values: Values) -> None:
    if (holder.handler, holder.queue) != (values["handler"], values["queue"]):
        raise DuplicateJobError(
            f"job {holder.id} has {keys_in(values)} already, for handler {holder.handler!r} on "
            f"queue {holder.queue!r}: a job for handler {values['handler']!r} on queue "
            f"{values['queue']!r} cannot replace it; use another key",
            id=holder.id,
        )
