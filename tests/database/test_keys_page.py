"""What docs/keys.md says of keys, statement by statement."""

from __future__ import annotations

import re
import unicodedata
import warnings
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, func, literal, select, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from sa_jobs import (
    DuplicateJobError,
    Enqueued,
    EnqueueRaceError,
    InvalidJobError,
    Row,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    retry,
)
from sa_jobs.models import DEFAULT_TABLES
from tests.support.jobs import add, all_jobs, change, claim, job

PAGE = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
KEYS = ["idempotency_key", "unique_key"]
LATER = func.now() + func.make_interval(0, 0, 0, 1)

# The values of a job in each state, as workers leave it.
STATES: dict[str, dict[str, Any]] = {
    "ready": {},
    "for later": {"run_at": LATER},
    "waiting for its next attempt": {
        "attempts": 1, "claim_no": 1, "last_error": "x", "locked_by": "w", "run_at": LATER,
    },
    "running": {
        "status": "running", "attempts": 1, "claim_no": 1, "locked_by": "w", "leased_until": LATER,
    },
    "lease run out": {
        "status": "running", "attempts": 1, "claim_no": 1, "locked_by": "w",
        "leased_until": func.now() - func.make_interval(0, 0, 0, 1),
    },
    "done": {"status": "done", "finished_at": func.now(), "attempts": 1},
    "dead": {"status": "dead", "finished_at": func.now(), "attempts": 20},
    "cancelled": {"status": "cancelled", "finished_at": func.now()},
}  # fmt: skip
LIVE = {"ready", "for later", "waiting for its next attempt", "running", "lease run out"}
READY = {"ready", "for later", "waiting for its next attempt"}

PRUNE = text("DELETE FROM sa_jobs WHERE status IN ('done', 'dead', 'cancelled')")
ARCHIVE = text("""
    WITH moved AS (
        DELETE FROM sa_jobs WHERE status IN ('done', 'dead', 'cancelled') RETURNING *
    )
    INSERT INTO sa_jobs_archive SELECT moved.*, now() FROM moved
""")


def wanting(key: str, text: str = "k") -> dict[str, Any]:
    return {key: text}


def test_the_examples_run(session: Session, connection: Connection) -> None:
    module: dict[str, Any] = {"__name__": "keys_page"}
    with warnings.catch_warnings():
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(block, "docs/keys.md", "exec", dont_inherit=True), module)
    for order_id in (1, 2, 2):
        module["pay"](session, order_id, customer_id=7)
    session.commit()
    keys = [row.idempotency_key or row.unique_key for row in all_jobs(connection)]
    assert keys == ["receipt:1", "rebuild:7", "receipt:2"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("key", KEYS)
def test_how_long_a_key_is_taken(connection: Connection, key: str, state: str) -> None:
    holder = add(connection, **STATES[state], **wanting(key))
    taken = key == "idempotency_key" or state in LIVE
    result = enqueue(connection, "send", {"a": 1}, **wanting(key))
    assert result.created is not taken
    assert (result.id == holder) is taken


@pytest.mark.parametrize(
    ("key", "state"),
    [(key, state) for key in KEYS for state in STATES if key != "unique_key" or state in LIVE],
)
def test_a_replacement_changes_payload_and_time_of_a_ready_job_and_nothing_else(
    connection: Connection, key: str, state: str
) -> None:
    holder = add(connection, **STATES[state], **wanting(key), payload={"a": 0}, tenant="t")
    before = job(connection, holder)._asdict()
    options: dict[str, Any] = {"priority": 9, "max_attempts": 3, "tenant": "other", "delay": 7200}
    result = enqueue(connection, "send", {"a": 1}, on_conflict="replace", **wanting(key), **options)
    connection.commit()
    assert result == Enqueued(holder, created=False)
    after = job(connection, holder)._asdict()
    changed = {name for name, value in after.items() if value != before[name]}
    assert changed == ({"payload", "run_at", "updated_at"} if state in READY else set())


@pytest.mark.parametrize("end", ["dead", "cancelled"])
def test_a_retry_takes_the_unique_key_again_if_it_is_free(connection: Connection, end: str) -> None:
    ended = add(connection, **STATES[end], unique_key="k", idempotency_key="i")
    twin = enqueue(connection, "send", unique_key="k")
    assert twin.created
    assert retry(connection, ended) == "duplicate"
    assert enqueue(connection, "send").created, "the transaction is usable"
    connection.commit()
    change(connection, twin.id, status="done")
    assert retry(connection, ended) == "ready"
    again = Enqueued(ended, created=False)
    assert enqueue(connection, "send", unique_key="k") == again
    assert enqueue(connection, "send", idempotency_key="i") == again
    row = job(connection, ended)
    assert (row.status, row.attempts) == ("ready", 0)


def test_a_dead_job_runs_again_by_a_retry_and_not_by_an_enqueue(connection: Connection) -> None:
    dead = add(connection, **STATES["dead"], idempotency_key="k")
    assert enqueue(connection, "send", idempotency_key="k") == Enqueued(dead, created=False)
    assert claim(connection) == []
    assert retry(connection, dead) == "ready"
    connection.commit()
    assert [claimed.id for claimed in claim(connection)] == [dead]


@pytest.mark.parametrize("clearing", [PRUNE, ARCHIVE], ids=["pruned", "archived"])
@pytest.mark.parametrize("end", ["done", "dead", "cancelled"])
@pytest.mark.parametrize("key", KEYS)
def test_a_row_that_is_gone_has_freed_its_keys(
    connection: Connection, key: str, end: str, clearing: Any
) -> None:
    gone = add(connection, **STATES[end], **wanting(key))
    live = add(connection, **wanting(key, "live"))
    connection.execute(clearing)
    new = enqueue(connection, "send", **wanting(key))
    assert new.created
    assert enqueue(connection, "send", **wanting(key, "live")).id == live
    archived = list(connection.execute(select(DEFAULT_TABLES.archive.c[key])).scalars())
    assert archived == (["k"] if clearing is ARCHIVE else [])
    assert retry(connection, gone) == "missing"
    connection.commit()
    # The archive may hold many jobs that had one key.
    change(connection, new.id, status="done")
    connection.execute(clearing)
    assert enqueue(connection, "send", **wanting(key)).created


def test_a_key_is_compared_byte_by_byte(connection: Connection) -> None:
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    keys = ["key", "Key", "key ", composed, decomposed, "k" * 500]
    results = [enqueue(connection, "send", unique_key=key) for key in keys]
    assert all(result.created for result in results)
    with pytest.raises(InvalidJobError, match="at most 500 bytes"):
        enqueue(connection, "send", unique_key="k" * 501)


def test_keys_are_shared_by_all_handlers_and_queues(connection: Connection) -> None:
    first = enqueue(connection, "send", unique_key="k")
    other = enqueue(connection, "make_pdf", queue="pdf", unique_key="k")
    assert other == Enqueued(first.id, created=False)


def test_the_two_kinds_of_keys_do_not_meet(connection: Connection) -> None:
    first = enqueue(connection, "send", idempotency_key="k")
    second = enqueue(connection, "send", unique_key="k")
    assert second.created
    both = enqueue(connection, "send", idempotency_key="k", unique_key="k")
    assert both == Enqueued(first.id, created=False)


def test_a_text_is_found_as_the_kind_of_key_that_it_is(connection: Connection) -> None:
    """The holder of the other kind is not taken for it in a look-up of many."""
    one = enqueue(connection, "send", idempotency_key="a", unique_key="b")
    two = enqueue(connection, "send", idempotency_key="b", unique_key="a")
    rows = [Row(idempotency_key="a"), Row(unique_key="a"), Row(idempotency_key="b")]
    assert [found.id for found in enqueue_many(connection, "send", rows)] == [
        one.id,
        two.id,
        two.id,
    ]


def test_of_many_rows_for_one_job_the_last_one_replaces(connection: Connection) -> None:
    before = enqueue(connection, "send", {"n": "before"}, unique_key="old", priority=5)
    running = add(connection, **STATES["running"], unique_key="running")
    rows: list[Any] = [
        Row({"n": 0}, unique_key="new"),
        Row({"n": 1}, unique_key="old"),
        Row({"n": 2}, unique_key="new", delay=60),
        {"n": 3},
        Row({"n": 4}, unique_key="running"),
        Row({"n": 5}, unique_key="old"),
    ]
    results = enqueue_many(connection, "send", rows, on_conflict="replace", delay=30)
    connection.commit()
    assert [result.created for result in results] == [True, False, False, True, False, False]
    assert results[1].id == results[5].id == before.id
    assert (results[2].id, results[4].id) == (results[0].id, running)
    new, old = job(connection, results[0].id), job(connection, before.id)
    assert (new.payload, (new.run_at - new.updated_at).total_seconds()) == ({"n": 2}, 60)
    assert (old.payload, (old.run_at - old.updated_at).total_seconds()) == ({"n": 5}, 30)
    assert (old.priority, job(connection, running).payload) == (5, {})


@pytest.mark.parametrize("other", [{"handler": "make_pdf"}, {"queue": "pdf"}])
def test_many_that_cannot_replace_leave_nothing_behind(
    connection: Connection, other: dict[str, str]
) -> None:
    holder = add(connection, unique_key="k", **other)
    mine = add(connection, unique_key="mine")
    rows: list[Any] = [Row({"n": 0}, unique_key="mine"), {"n": 1}, Row({"n": 2}, unique_key="k")]
    with pytest.raises(DuplicateJobError, match="cannot replace it; use another key") as caught:
        enqueue_many(connection, "send", rows, on_conflict="replace")
    assert caught.value.id == holder
    after = enqueue(connection, "send", {"after": 1})
    connection.commit()
    assert [row.id for row in all_jobs(connection)] == [holder, mine, after.id]
    assert job(connection, mine).payload == {}


def test_many_of_which_one_is_refused_leave_nothing_behind(connection: Connection) -> None:
    holder = add(connection, idempotency_key="k")
    before = enqueue(connection, "send", {"before": 1})
    rows: list[Any] = [{"n": 0}, Row({"n": 1}, unique_key="u"), Row({"n": 2}, idempotency_key="k")]
    with pytest.raises(DuplicateJobError, match=f"^job {holder} has idempotency_key='k' already"):
        enqueue_many(connection, "send", rows, on_conflict="raise")
    results = enqueue_many(connection, "send", rows[:2], on_conflict="raise")
    connection.commit()
    assert all(result.created for result in results)
    assert [row.id for row in all_jobs(connection)] == [
        holder,
        before.id,
        *(result.id for result in results),
    ]


@pytest.mark.parametrize("key", KEYS)
def test_rows_of_one_key_are_refused_before_any_sql(
    engine: Engine, connection: Connection, key: str
) -> None:
    rows: list[Any] = [Row(**wanting(key)), {}, Row(**wanting(key))]
    with pytest.raises(InvalidJobError, match=f"^row 2 has {key}='k', as row 0 has"):
        enqueue_many(connection, "send", rows, on_conflict="raise")
    assert not connection.in_transaction(), "nothing was sent"


def test_a_select_skips_keys_that_are_taken_and_counts_the_rest(connection: Connection) -> None:
    add(connection, unique_key="k1")
    numbers = func.unnest(text("ARRAY['k1', 'k2', 'k2', 'k3']")).column_valued("key")
    query: Any = select(literal(1).label("n"), numbers.label("sa_jobs_unique_key"))
    assert enqueue_from_select(connection, "send", query) == 2


def test_a_holder_that_ends_before_it_is_looked_at_leaves_the_key(
    engine: Engine, connection: Connection
) -> None:
    """A trigger of the test's ends it in between, once or for ever."""
    connection.execute(text("CREATE TABLE endings (times int)"))
    connection.execute(
        text("""
            CREATE FUNCTION end_holder() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                UPDATE endings SET times = times - 1;
                IF (SELECT times >= 0 FROM endings) THEN
                    UPDATE sa_jobs SET status = 'done' WHERE unique_key = 'k' AND status = 'ready';
                    RETURN NULL;
                END IF;
                RETURN NEW;
            END $$
        """)
    )
    connection.execute(
        text("""
            CREATE TRIGGER end_holder BEFORE INSERT ON sa_jobs FOR EACH ROW
            WHEN (NEW.handler = 'late') EXECUTE FUNCTION end_holder()
        """)
    )
    holder = enqueue(connection, "send", unique_key="k")
    connection.execute(text("INSERT INTO endings VALUES (1)"))
    late = enqueue(connection, "late", unique_key="k")
    assert late.created
    assert late.id != holder.id
    connection.execute(text("UPDATE endings SET times = 1; DELETE FROM sa_jobs"))
    (many,) = enqueue_many(connection, "late", [Row(unique_key="k")])
    assert many.created
    connection.execute(text("UPDATE endings SET times = 99; DELETE FROM sa_jobs"))
    with pytest.raises(EnqueueRaceError, match="unique_key='k' appeared and vanished 20 times"):
        enqueue(connection, "late", unique_key="k")
    assert enqueue(connection, "send").created, "the transaction is usable"


def test_a_lock_timeout_bounds_the_wait_for_a_key(engine: Engine, connection: Connection) -> None:
    enqueue(connection, "send", unique_key="k")
    with engine.connect() as other:
        other.execute(text("SET LOCAL lock_timeout = '50ms'"))
        with pytest.raises(OperationalError, match="lock timeout"):
            enqueue(other, "send", unique_key="k")
    connection.rollback()


@pytest.mark.parametrize("call", ["enqueue", "enqueue_many"])
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"], ids=str.lower)
def test_at_higher_levels_a_key_taken_since_the_first_statement_means_run_again(
    engine: Engine, connection: Connection, level: Any, call: str
) -> None:
    def want(own: Connection) -> Enqueued:
        if call == "enqueue":
            return enqueue(own, "send", unique_key="k")
        return enqueue_many(own, "send", [Row(unique_key="k")])[0]

    with engine.connect().execution_options(isolation_level=level) as own:
        own.execute(text("SELECT 1"))
        taken = enqueue(connection, "send", unique_key="k")
        connection.commit()
        with pytest.raises(OperationalError) as caught:
            want(own)
        assert getattr(caught.value.orig, "sqlstate", None) == "40001"
        own.rollback()
        assert want(own) == Enqueued(taken.id, created=False)
