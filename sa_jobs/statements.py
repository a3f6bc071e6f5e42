"""Pure builders: tables -> one Core statement with named parameters.

No builder knows a connection, a clock or a setting. Each is built once for given tables and kept,
so that a call costs binding and execution only. A docstring names the parameters; times come from
the database's clock, or from `now=`, an expression that tests put in its place.

The fence. A claim raises `claim_no` and writes `locked_by` and `leased_until`. Every later write
of the worker names all three: the id with the claim number, the owner, and that the lease was not
yet given back (`leased_until IS NOT NULL`). So a worker that lost its job, or writes twice, changes
no row. `status` stays out of those conditions: the planner would answer `status = 'running'` from
the partial index on running rows, and walk that index's dead entries.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    Boolean,
    ColumnElement,
    DateTime,
    Double,
    Executable,
    FromClause,
    Select,
    SelectBase,
    SmallInteger,
    TableValuedAlias,
    Text,
    Update,
    all_,
    and_,
    any_,
    bindparam,
    case,
    cast,
    exists,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    true,
    update,
)
from sqlalchemy.dialects.postgresql import JSONB, OID, REGCLASS, Insert
from sqlalchemy.dialects.postgresql import insert as pg_insert

from sa_jobs import limits
from sa_jobs.backoff import DEFAULT_BASE_SECONDS, DEFAULT_CAP_SECONDS
from sa_jobs.expressions import (
    EARLIEST,
    LATEST,
    array,
    due_at,
    json_array,
    json_object,
    json_value,
    one_of,
    readable,
    seconds,
    table_name,
    unnest,
)
from sa_jobs.models import STATES, Tables

Moment = ColumnElement[dt.datetime]

NOW: Moment = func.now()
CLOCK: Moment = func.clock_timestamp()
# In place of these, a moment that the caller gives as the parameter `now`.
GIVEN: Moment = cast(bindparam("now", type_=DateTime(timezone=True)), DateTime(timezone=True))
LEASE_EXPIRED = "lease expired"
LEASE_EXPIRED_FINALLY = "lease expired on final attempt"

# Spelled out, never bound: with a parameter in their place a generic plan cannot use an index that
# is partial on the status.
READY, RUNNING, DONE, DEAD, CANCELLED = (literal_column(f"'{state}'", Text()) for state in STATES)
LIVE = (READY, RUNNING)

# Advisory locks of sweeps are this, "swp" in the upper half, and the oid of the jobs table.
_SWEEP_LOCK = int.from_bytes(b"swp", "big") << 32

# The order of these is the order of the columns in INSERT ... SELECT.
ENQUEUE_COLUMNS: dict[str, Any] = {
    "queue": Text(),
    "handler": Text(),
    "payload": JSONB(),
    "priority": SmallInteger(),
    "tenant": Text(),
    "run_at": DateTime(timezone=True),
    "max_attempts": BigInteger(),
    "idempotency_key": Text(),
    "unique_key": Text(),
}

# A job is due at `run_at`, or where that is NULL `delay` seconds from now.
_DUE = {"run_at": ENQUEUE_COLUMNS["run_at"], "delay": Double()}
_MANY_PARAMETERS = {**ENQUEUE_COLUMNS, **_DUE, "id": BigInteger()}
# JSON goes in as text that is cast, so that no driver or engine has a say in it.
_ONE_PARAMETERS = {**ENQUEUE_COLUMNS, **_DUE, "payload": Text(), "meta": Text()}
KEYS = ("idempotency_key", "unique_key")

# The columns of a select by which `insert_select` sets options in place of payload keys.
OPTION_LABELS = {
    f"sa_jobs_{name}": name
    for name in ("queue", "priority", "run_at", "tenant", "idempotency_key", "unique_key")
}

# What the caller's query is called beside ours: it may have tables and CTEs of any name.
SOURCE = "sa_jobs_source"

built = lru_cache(maxsize=512)


# --- what applications do -----------------------------------------------------------------------


@built
def insert_one(tables: Tables, *, given: frozenset[str], now: Moment = NOW) -> Executable:
    """Insert one job and return its id; with a key in `given`, return no row where it is taken.

    Parameters: those of ENQUEUE_COLUMNS that `given` names, and `delay` in seconds with `run_at`
    (which may be None); without the two the job is due now. `meta` may be given, too.
    """
    values = _insertable(
        {name: bindparam(name, type_=_ONE_PARAMETERS[name]) for name in given}, now
    )
    values["payload"] = json_value(values["payload"])
    statement = pg_insert(tables.jobs).values(values)
    return _or_nothing(statement, given).returning(tables.jobs.c.id)


@built
def insert_many(
    tables: Tables, *, given: frozenset[str], varying: frozenset[str], now: Moment = NOW
) -> Executable:
    """Insert the jobs of parallel arrays, in their order, and select the new ones' ids.

    They are selected as the JSON text of one array, or NULL for none: rows by the thousand would
    cost the client more time than all else.

    The parameters are those of `insert_one`: those in `varying` are JSON text, arrays of one
    length; the others in `given` are single values that all rows share. With `id` in `varying` the
    ids are given too. Rows whose key is taken, also by an earlier row of the batch, are left out;
    then, without `id`, each element is an array of the id and the keys.
    """
    rows = unnest(
        "given",
        {name: kind for name, kind in _MANY_PARAMETERS.items() if name in varying},
        ordinality="position",
        parameter=json_array,
    )
    shared = {name: bindparam(name, type_=_ONE_PARAMETERS[name]) for name in given - varying}
    source = _insertable({**shared, **{name: rows.c[name] for name in varying}}, now)
    if "id" in varying:
        source["id"] = rows.c.id
    jobs = tables.jobs
    statement = pg_insert(jobs).from_select(
        list(source), select(*source.values()).order_by(rows.c.position)
    )
    keys = [name for name in KEYS if name in varying]
    returned = [jobs.c.id, *(jobs.c[name] for name in keys)]
    added = _or_nothing(statement, keys).returning(*returned).cte("sa_jobs_added")
    element: ColumnElement[Any] = added.c.id
    if keys and "id" not in varying:
        element = func.json_build_array(*added.c)
    return select(cast(func.json_agg(element), Text))


def insert_select(
    tables: Tables, query: SelectBase, options: Mapping[str, Any], *, now: Moment = NOW
) -> Executable:
    """Insert one job for each row of `query`; rows whose key is taken are left out.

    Columns labelled as in OPTION_LABELS set the job's options, the others are the payload. What no
    column sets comes from `options`: values for ENQUEUE_COLUMNS but the payload, `delay`, and
    perhaps `meta`.
    """
    return _insert_from(tables, query.subquery(SOURCE), options, now, true())


def insert_select_checked(
    tables: Tables, query: SelectBase, options: Mapping[str, Any], *, now: Moment = NOW
) -> Select[Any]:
    """Insert as `insert_select` does, unless an option that a column sets cannot be stored.

    Selects `added`, how many jobs, and by the name of each option that a column sets the start of a
    value that is refused, or None. One refused value means that nothing is inserted. The query is
    evaluated once, its rows kept until all were looked at.
    """
    source = query.cte(SOURCE)
    refused = {
        OPTION_LABELS[label]: _refused(OPTION_LABELS[label], given)
        for label, given in source.c.items()
        if label in OPTION_LABELS
    }
    examples = select(
        *(
            func.min(func.left(cast(source.c[f"sa_jobs_{name}"], Text), literal_column("60")))
            .filter(condition)
            .label(name)
            for name, condition in refused.items()
        )
    ).cte("sa_jobs_refused")
    none_refused = select(and_(*(column.is_(None) for column in examples.c))).scalar_subquery()
    added = (
        _insert_from(tables, source, options, now, none_refused)
        .returning(literal_column("1"))
        .cte("sa_jobs_added")
    )
    count = select(func.count()).select_from(added).scalar_subquery()
    return select(count.label("added"), *examples.c)


@built
def next_ids(tables: Tables) -> Select[Any]:
    """Take the ids of `count` new jobs, and select them as the JSON text of one array.

    To a role that may not use the sequence its elements are NULL. Inserting needs no privilege on
    the sequence, but taking an id before the insert does.
    """
    sequence = cast(
        func.pg_get_serial_sequence(table_name(tables.jobs), literal_column("'id'")), REGCLASS
    )
    # Scalar subqueries, so that the sequence is looked for once.
    allowed = select(func.has_sequence_privilege(sequence, literal_column("'USAGE, UPDATE'")))
    id = case((allowed.scalar_subquery(), func.nextval(select(sequence).scalar_subquery())))
    return select(cast(func.json_agg(id), Text)).select_from(
        func.generate_series(literal_column("1"), bindparam("count", type_=BigInteger()))
    )


@built
def existing(tables: Tables) -> Select[Any]:
    """Select the jobs that hold one of the keys: id, status, queue, handler and both keys.

    Parameters: `idempotency_keys`, `unique_keys` (JSON text, arrays). A unique key is held by a job
    that is ready or running, an idempotency key by a job in any state.
    """
    jobs = tables.jobs
    return select(
        jobs.c.id,
        jobs.c.status,
        jobs.c.queue,
        jobs.c.handler,
        jobs.c.idempotency_key,
        jobs.c.unique_key,
    ).where(
        or_(
            one_of(jobs.c.idempotency_key, bindparam("idempotency_keys", type_=Text())),
            and_(
                one_of(jobs.c.unique_key, bindparam("unique_keys", type_=Text())),
                jobs.c.status.in_(LIVE),
            ),
        )
    )


@built
def replace(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Give a job that is still ready another payload and run_at, and return its id and queue.

    Parameters: `job_id`, `of_handler` and `on_queue` (the job's own), `payload`, `run_at` or None,
    `delay`.
    """
    jobs = tables.jobs
    return (
        update(jobs)
        .where(
            jobs.c.id == bindparam("job_id", type_=BigInteger()),
            jobs.c.handler == bindparam("of_handler", type_=Text()),
            jobs.c.queue == bindparam("on_queue", type_=Text()),
            jobs.c.status == READY,
        )
        .values(
            payload=json_value(bindparam("payload", type_=Text())),
            run_at=_due(now),
            updated_at=now,
        )
        .returning(jobs.c.id, jobs.c.queue)
    )


@built
def replace_many(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Give jobs that are still ready another payload and run_at, and return their queues.

    Parameters: `of_handler`; JSON text of arrays: `ids`, `on_queues` (the jobs' own), `payloads`,
    `run_ats`, `delays`. The rows are locked in the order of their ids.
    """
    jobs = tables.jobs
    kinds = {
        "ids": BigInteger(),
        "on_queues": Text(),
        "payloads": JSONB(),
        "run_ats": _DUE["run_at"],
        "delays": _DUE["delay"],
    }
    given = unnest("given", kinds, parameter=json_array)
    mine = (
        select(jobs.c.id)
        .select_from(jobs.join(given, jobs.c.id == given.c.ids))
        .where(
            # The array keeps the plan on the primary key; the join alone scans the table.
            jobs.c.id == any_(json_array("ids", BigInteger())),
            jobs.c.queue == given.c.on_queues,
            jobs.c.handler == bindparam("of_handler", type_=Text()),
            jobs.c.status == READY,
        )
        .order_by(jobs.c.id)
        .with_for_update(key_share=True, of=jobs)
        .cte("mine")
    )
    return (
        update(jobs)
        .where(
            jobs.c.id == any_(func.array(select(mine.c.id).scalar_subquery())),
            jobs.c.id == given.c.ids,
        )
        .values(
            payload=given.c.payloads,
            run_at=due_at(given.c.run_ats, given.c.delays, now),
            updated_at=now,
        )
        .returning(jobs.c.queue)
    )


@built
def cancel(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Cancel a ready job, or ask a running one to stop; return its status afterwards.

    Parameter: `job_id`. No row is returned for a job in a final state.
    """
    jobs = tables.jobs
    ready = jobs.c.status == READY
    return (
        update(jobs)
        .where(
            jobs.c.id == bindparam("job_id", type_=BigInteger()),
            jobs.c.status.in_(LIVE),
        )
        .values(
            status=case((ready, CANCELLED), else_=jobs.c.status),
            finished_at=case((ready, now), else_=null()),
            cancel_requested_at=func.coalesce(jobs.c.cancel_requested_at, now),
            updated_at=now,
        )
        .returning(jobs.c.status)
    )


@built
def retry(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Make a dead or cancelled job ready again with all its attempts; return its id and queue.

    Parameters: `job_id`, `run_at` or None, `delay`. No row is returned for a job in another state,
    or whose unique key a live job holds by now.
    """
    jobs = tables.jobs
    twin = jobs.alias("twin")
    return (
        update(jobs)
        .where(
            jobs.c.id == bindparam("job_id", type_=BigInteger()),
            jobs.c.status.in_((DEAD, CANCELLED)),
            ~exists().where(twin.c.unique_key == jobs.c.unique_key, twin.c.status.in_(LIVE)),
        )
        .values(
            status=READY,
            attempts=0,
            run_at=_due(now),
            finished_at=null(),
            cancel_requested_at=null(),
            last_error=null(),
            updated_at=now,
        )
        .returning(jobs.c.id, jobs.c.queue)
    )


@built
def status_of(tables: Tables) -> Select[Any]:
    """Select the status of the job `job_id`."""
    jobs = tables.jobs
    return select(jobs.c.status).where(jobs.c.id == bindparam("job_id", type_=BigInteger()))


# --- what workers do ----------------------------------------------------------------------------


@built
def claim(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Take up to `limit` due jobs for `worker` until now + `lease` seconds, and return them.

    Parameters: `queues` (array: the order in which they are served), `handlers` (array: the only
    ones that are taken), `limit`, `worker`, `lease`.

    Within a queue the order is priority (high first), run_at, id; RETURNING has no order.

    `lane` steps from each queue's highest priority to its next lower one by index look-ups, and
    each lane's due jobs are read from the ready index in order. Everything is pulled lazily, with
    no sort above the row locks: the claim locks the rows that it takes and no other, and jobs that
    are scheduled for later cost nothing at any priority. Rows that another worker has locked are
    skipped. KEY SHARE locks, which a host's foreign keys to the job hold, do not stand in the way.
    The array form takes no more than `limit` rows under any plan; a join with the candidates can,
    and flips to a scan of the whole table.
    """
    jobs = tables.jobs
    ready = jobs.c.status == READY

    def highest(queue: ColumnElement[str], *below: ColumnElement[bool]) -> ColumnElement[int]:
        return (
            select(jobs.c.priority)
            .where(jobs.c.queue == queue, ready, *below)
            .order_by(jobs.c.priority.desc())
            .limit(literal_column("1"))
            .scalar_subquery()
        )

    served = unnest("served", {"queues": Text()})
    lane = select(served.c.queues.label("queue"), highest(served.c.queues).label("priority")).cte(
        "lane", recursive=True
    )
    lane = lane.union_all(
        select(lane.c.queue, highest(lane.c.queue, jobs.c.priority < lane.c.priority)).where(
            lane.c.priority.is_not(None)
        )
    )
    limit = bindparam("limit", type_=BigInteger())
    due = (
        select(jobs.c.id)
        .where(
            jobs.c.queue == lane.c.queue,
            jobs.c.priority == lane.c.priority,
            ready,
            jobs.c.run_at <= now,
            jobs.c.handler == any_(array("handlers", Text())),
        )
        .order_by(jobs.c.run_at, jobs.c.id)
        .limit(limit)
        .with_for_update(skip_locked=True, key_share=True)
        .lateral("due")
    )
    candidate = select(due.c.id).select_from(lane.join(due, true())).limit(limit).cte("candidate")
    return (
        update(jobs)
        .where(jobs.c.id == any_(func.array(select(candidate.c.id).scalar_subquery())))
        .values(
            status=RUNNING,
            attempts=jobs.c.attempts + 1,
            claim_no=jobs.c.claim_no + 1,
            locked_by=bindparam("worker", type_=Text()),
            claimed_at=now,
            leased_until=now + seconds(bindparam("lease", type_=Double())),
            updated_at=now,
        )
        .returning(
            jobs.c.id,
            jobs.c.queue,
            jobs.c.handler,
            cast(jobs.c.payload, Text).label("payload"),
            jobs.c.priority,
            jobs.c.tenant,
            # A time that no driver can read would fail each claim of its queue.
            readable(jobs.c.run_at).label("run_at"),
            readable(jobs.c.scheduled_for).label("scheduled_for"),
            jobs.c.attempts,
            jobs.c.max_attempts,
            jobs.c.claim_no,
            jobs.c.idempotency_key,
            jobs.c.unique_key,
            cast(jobs.c.meta, Text).label("meta"),
            readable(jobs.c.created_at).label("created_at"),
            jobs.c.claimed_at,
        )
    )


@built
def heartbeat(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Push out the leases of the worker's claims; return (id, cancel_requested) of those renewed.

    Parameters: `ids`, `claim_nos`, `progress` (arrays; progress is JSON text or None), `worker`,
    `lease`. A row that is locked, as by a transactional finish under way, is skipped and not
    returned. No indexed column is written, so that the update stays HOT.
    """
    jobs = tables.jobs
    given = unnest("given", {"ids": BigInteger(), "claim_nos": BigInteger(), "progress": Text()})
    return (
        _update_own(tables, given, wait=False)
        .values(
            leased_until=now + seconds(bindparam("lease", type_=Double())),
            meta=case(
                (
                    given.c.progress.is_not(None),
                    jobs.c.meta.op("||")(
                        func.jsonb_build_object("progress", cast(given.c.progress, JSONB))
                    ),
                ),
                else_=jobs.c.meta,
            ),
            updated_at=now,
        )
        .returning(jobs.c.id, jobs.c.cancel_requested_at.is_not(None).label("cancel_requested"))
    )


@built
def claims_now(tables: Tables) -> Select[Any]:
    """Select (id, claim_no, locked_by, leased, status) of the jobs `ids`: what became of claims."""
    jobs = tables.jobs
    return select(
        jobs.c.id,
        jobs.c.claim_no,
        jobs.c.locked_by,
        jobs.c.leased_until.is_not(None).label("leased"),
        jobs.c.status,
    ).where(jobs.c.id == any_(array("ids", BigInteger())))


@built
def finish(tables: Tables, *, wait: bool = False, now: Moment | None = None) -> Executable:
    """End claims as done; return the ids that were still the worker's.

    Parameters: `ids`, `claim_nos`, `results` (arrays; a result is JSON text or None), `worker`.
    A row that somebody has locked is left alone and not returned, or with `wait` waited for: so in
    a transaction of the handler's, whose own now() would be from before the work.
    """
    if now is None:
        now = CLOCK if wait else NOW
    jobs = tables.jobs
    given = unnest("given", {"ids": BigInteger(), "claim_nos": BigInteger(), "results": Text()})
    return (
        _update_own(tables, given, wait=wait)
        .values(
            status=DONE,
            result=cast(given.c.results, JSONB),
            finished_at=now,
            leased_until=null(),
            updated_at=now,
        )
        .returning(jobs.c.id)
    )


@built
def fail(tables: Tables, *, now: Moment = NOW) -> Executable:
    """End claims as failed attempts, each with a row of history; return (id, status) of each.

    Parameters: `ids`, `claim_nos`, `final` (true: dead), `delays` in seconds, `errors` (arrays),
    `worker`. A job that was asked to cancel becomes cancelled, never ready.
    """
    jobs = tables.jobs
    given = unnest(
        "given",
        {
            "ids": BigInteger(),
            "claim_nos": BigInteger(),
            "final": Boolean(),
            "delays": Double(),
            "errors": Text(),
        },
    )
    cancelled = jobs.c.cancel_requested_at.is_not(None)
    failed = (
        _update_own(tables, given, wait=False)
        .values(
            status=case((cancelled, CANCELLED), (given.c.final, DEAD), else_=READY),
            run_at=case(
                (or_(cancelled, given.c.final), jobs.c.run_at),
                else_=now + seconds(given.c.delays),
            ),
            finished_at=case((or_(cancelled, given.c.final), now), else_=null()),
            last_error=given.c.errors,
            leased_until=null(),
            updated_at=now,
        )
        .returning(*_failed_columns(tables), jobs.c.locked_by.label("worker"))
        .cte("failed")
    )
    return select(failed.c.id, failed.c.status).add_cte(_history(tables, failed, now))


@built
def release(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Give claims back at once, at no cost of an attempt; return (id, queue, status) of each.

    Parameters: `ids`, `claim_nos` (arrays), `worker`. The job keeps its place in the queue.
    """
    given = unnest("given", {"ids": BigInteger(), "claim_nos": BigInteger()})
    return _given_back(
        tables, _update_own(tables, given, wait=False), now, run_at=tables.jobs.c.run_at
    )


@built
def snooze(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Give claims back for later, at no cost of an attempt; return (id, queue, status) of each.

    Parameters: `ids`, `claim_nos`, `delays` in seconds (arrays), `worker`.
    """
    given = unnest("given", {"ids": BigInteger(), "claim_nos": BigInteger(), "delays": Double()})
    return _given_back(
        tables,
        _update_own(tables, given, wait=False),
        now,
        run_at=now + seconds(given.c.delays),
    )


@built
def disown(tables: Tables, *, now: Moment = NOW) -> Executable:
    """Give back the worker's claims that it does not know of; return (id, queue, status) of them.

    Parameters: `worker`, `ids` (array: the jobs that it knows of). A claim can be committed while
    its answer is lost with the connection: nobody runs it, and no attempt was made.
    """
    jobs = tables.jobs
    unknown = (
        select(jobs.c.id)
        .where(
            jobs.c.status == RUNNING,
            jobs.c.locked_by == bindparam("worker", type_=Text()),
            jobs.c.id != all_(array("ids", BigInteger())),
        )
        .order_by(jobs.c.id)
        .with_for_update(skip_locked=True, key_share=True)
        .cte("unknown")
    )
    updating = update(jobs).where(
        jobs.c.id == any_(func.array(select(unknown.c.id).scalar_subquery()))
    )
    return _given_back(tables, updating, now, run_at=jobs.c.run_at)


@built
def reclaim(tables: Tables, *, alone: bool = False, now: Moment = NOW) -> Executable:
    """Take back up to `limit` jobs whose lease ran out, and return what became of them.

    The rows are (id, queue, handler, attempt, worker, status). Each job gets a row of history that
    names the lost worker. The first lapse in a row makes the job ready at once, in its old place;
    from the second on it waits with full jitter, so that a job that kills its worker does so ever
    more rarely. Out of attempts it is dead. Rows that another sweep has locked are skipped.
    """
    jobs = tables.jobs
    lapsed = (
        select(jobs.c.id, jobs.c.locked_by)
        .where(
            jobs.c.status == RUNNING,
            jobs.c.leased_until < now,
            ~and_(
                jobs.c.locked_by == bindparam("worker", type_=Text()),
                jobs.c.id == any_(array("held", BigInteger())),
            ),
            *([_is_our_turn(tables)] if alone else []),
        )
        .order_by(jobs.c.id)
        .limit(bindparam("limit", type_=BigInteger()))
        .with_for_update(skip_locked=True, key_share=True)
        .cte("lapsed")
    )
    cancelled = jobs.c.cancel_requested_at.is_not(None)
    final = jobs.c.attempts >= jobs.c.max_attempts
    in_a_row = func.starts_with(func.coalesce(jobs.c.last_error, ""), LEASE_EXPIRED)
    ceiling = func.least(
        literal_column(str(DEFAULT_CAP_SECONDS)),
        literal_column(str(DEFAULT_BASE_SECONDS))
        * func.power(2.0, func.least(func.greatest(jobs.c.attempts - 1, 0), 30)),
    )
    taken = (
        update(jobs)
        .where(
            jobs.c.id == any_(func.array(select(lapsed.c.id).scalar_subquery())),
            jobs.c.id == lapsed.c.id,
        )
        .values(
            status=case((cancelled, CANCELLED), (final, DEAD), else_=READY),
            run_at=case((in_a_row, now + seconds(func.random() * ceiling)), else_=jobs.c.run_at),
            finished_at=case((or_(cancelled, final), now), else_=null()),
            last_error=case((final, LEASE_EXPIRED_FINALLY), else_=LEASE_EXPIRED),
            locked_by=null(),
            leased_until=null(),
            updated_at=now,
        )
        .returning(*_failed_columns(tables), lapsed.c.locked_by.label("worker"))
        .cte("taken")
    )
    return select(
        taken.c.id,
        taken.c.queue,
        taken.c.handler,
        taken.c.attempts.label("attempt"),
        taken.c.worker,
        taken.c.status,
    ).add_cte(_history(tables, taken, now))


# --- pieces -------------------------------------------------------------------------------------


def _insertable(
    values: dict[str, ColumnElement[Any]], now: Moment
) -> dict[str, ColumnElement[Any]]:
    columns = {name: values[name] for name in ENQUEUE_COLUMNS if name in values}
    columns["run_at"] = due_at(*(values[name] for name in _DUE if name in values), now)
    if "meta" in values:
        columns["meta"] = json_value(values["meta"])
    return columns


def _or_nothing(statement: Insert, given: Collection[str]) -> Insert:
    """Leave out rows whose key is taken; what has none is inserted faster without the clause."""
    keyed = any(name in given for name in KEYS)
    return statement.on_conflict_do_nothing() if keyed else statement


def _insert_from(
    tables: Tables,
    source: FromClause,
    options: Mapping[str, Any],
    now: Moment,
    condition: ColumnElement[bool],
) -> Insert:
    def bound(name: str, value: Any, kind: Any) -> ColumnElement[Any]:
        # The query's own parameters may have any name; one that is unique never takes their place.
        return bindparam(f"sa_jobs_{name}", value, type_=kind, unique=True)

    options = {"delay": 0.0, **options}
    values = {name: bound(name, options.get(name), kind) for name, kind in _ONE_PARAMETERS.items()}
    if "meta" in options:
        values["meta"] = json_value(values["meta"])
    else:
        # Left to the column's default.
        del values["meta"]
    arguments: list[Any] = []
    for label, given in source.c.items():
        if label in OPTION_LABELS:
            name = OPTION_LABELS[label]
            # A row may leave the option to the call's own value.
            values[name] = func.coalesce(given, values[name])
        else:
            arguments += [bound("key", label, Text()), given]
    values["payload"] = json_object(*arguments)
    values["run_at"] = due_at(values["run_at"], values.pop("delay"), now)
    statement = pg_insert(tables.jobs).from_select(
        list(values), select(*values.values()).where(condition)
    )
    options_set = {name for label, name in OPTION_LABELS.items() if label in source.c}
    return _or_nothing(statement, options_set)


def _refused(option: str, given: ColumnElement[Any]) -> ColumnElement[bool]:
    """Return whether an option's value is outside what `limits` allows."""
    if option == "priority":
        least: ColumnElement[int] = literal_column(str(limits.MIN_PRIORITY))
        most: ColumnElement[int] = literal_column(str(limits.MAX_PRIORITY))
        return ~given.between(least, most)
    if option == "run_at":
        return or_(given < EARLIEST, given > LATEST)
    empty: ColumnElement[str] = literal_column("''")
    value = cast(given, Text)
    size = func.octet_length(func.convert_to(value, literal_column("'UTF8'")))
    if option in ("idempotency_key", "unique_key"):
        return or_(value == empty, size > literal_column(str(limits.MAX_KEY_BYTES)))
    return or_(
        value == empty,
        size > literal_column(str(limits.MAX_NAME_BYTES)),
        value.op("~")(literal_column(r"E'[\\u0001-\\u001f\\u007f-\\u009f]'")),
    )


def _due(now: Moment) -> ColumnElement[Any]:
    return due_at(*(bindparam(name, type_=kind) for name, kind in _DUE.items()), now)


def _owned(jobs: Any, given: TableValuedAlias) -> ColumnElement[bool]:
    # The array condition keeps the plan on the primary key; the join alone scans the table.
    return and_(
        jobs.c.id == any_(array("ids", BigInteger())),
        jobs.c.id == given.c.ids,
        jobs.c.claim_no == given.c.claim_nos,
        jobs.c.locked_by == bindparam("worker", type_=Text()),
        jobs.c.leased_until.is_not(None),
    )


def _update_own(tables: Tables, given: TableValuedAlias, *, wait: bool) -> Update:
    """Return the start of an UPDATE of those of the given claims that are still the worker's.

    Rows are locked in the order of their ids. Without `wait` a row that is locked already is
    skipped: a host's transaction that holds a job's row must not hold up the worker.
    """
    jobs = tables.jobs
    mine = (
        select(jobs.c.id)
        .select_from(jobs.join(given, jobs.c.id == given.c.ids))
        .where(_owned(jobs, given))
        .order_by(jobs.c.id)
        .with_for_update(skip_locked=not wait, key_share=True, of=jobs)
        .cte("mine")
    )
    return update(jobs).where(
        jobs.c.id == any_(func.array(select(mine.c.id).scalar_subquery())),
        jobs.c.id == given.c.ids,
        # A worker that lost a job and claimed it again may give both claims.
        jobs.c.claim_no == given.c.claim_nos,
    )


def _given_back(
    tables: Tables, updating: Update, now: Moment, *, run_at: ColumnElement[Any]
) -> Executable:
    """Complete an UPDATE that makes claims ready again, as if they had not been made."""
    jobs = tables.jobs
    cancelled = jobs.c.cancel_requested_at.is_not(None)
    statement: Executable = updating.values(
        status=case((cancelled, CANCELLED), else_=READY),
        # claim_no never falls, so the fence holds; the job shows the attempts it had.
        attempts=jobs.c.attempts - 1,
        run_at=run_at,
        finished_at=case((cancelled, now), else_=null()),
        leased_until=null(),
        updated_at=now,
    ).returning(jobs.c.id, jobs.c.queue, jobs.c.status)
    return statement


def _is_our_turn(tables: Tables) -> ColumnElement[bool]:
    # A subquery of its own is evaluated once, not for each row.
    oid = cast(cast(func.to_regclass(table_name(tables.jobs)), OID), BigInteger)
    key: ColumnElement[int] = literal_column(str(_SWEEP_LOCK), BigInteger()) + oid
    return select(func.pg_try_advisory_xact_lock(key)).scalar_subquery().is_(true())


def _failed_columns(tables: Tables) -> list[ColumnElement[Any]]:
    jobs = tables.jobs
    return [
        jobs.c.id,
        jobs.c.queue,
        jobs.c.handler,
        jobs.c.attempts,
        jobs.c.claim_no,
        jobs.c.claimed_at,
        jobs.c.last_error,
        jobs.c.status,
    ]


def _history(tables: Tables, ended: CTE, now: Moment) -> CTE:
    """Return the CTE that writes a failure row for each row of an UPDATE's RETURNING."""
    source: dict[str, ColumnElement[Any]] = {
        "job_id": ended.c.id,
        "queue": ended.c.queue,
        "handler": ended.c.handler,
        "attempt": ended.c.attempts,
        "claim_no": ended.c.claim_no,
        "worker": ended.c.worker,
        "error": ended.c.last_error,
        "claimed_at": ended.c.claimed_at,
    }
    return (
        insert(tables.failures)
        .from_select([*source, "failed_at"], select(*source.values(), now))
        .cte("history")
    )
