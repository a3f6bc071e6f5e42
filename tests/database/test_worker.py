"""The worker, in this process: what it runs, writes, refuses and survives."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, event, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sa_jobs import (
    JobContext,
    Jobs,
    SchemaVersionError,
    Worker,
    WorkerError,
    WorkerOptionError,
    enqueue,
    fixed,
)
from sa_jobs.worker import EXIT_HANDED_BACK, EXIT_RECYCLED
from tests.support.gates import wait_until_asleep
from tests.support.looking import failures, job, status, wait_until_done
from tests.support.postgres import Cluster
from tests.support.running import SHORT, RunningWorker, constraint, run_all, running
from tests.support.waiting import wait_until


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


# --- running ------------------------------------------------------------------------------------


def test_one_slot_runs_jobs_by_priority_then_time_then_id(engine: Engine, jobs: Jobs) -> None:
    ran: list[str] = []

    @jobs.handler("note")
    def note(name: str) -> None:
        ran.append(name)

    with Session(engine) as session, session.begin():
        jobs.enqueue(session, note, {"name": "low"}, priority=-1)
        jobs.enqueue(session, note, {"name": "first"})
        jobs.enqueue(session, note, {"name": "second"})
        jobs.enqueue(session, note, {"name": "high"}, priority=5)
        jobs.enqueue(session, note, {"name": "later"}, priority=9, delay=60)
    run_all(engine, jobs, concurrency=1)

    assert ran == ["high", "first", "second", "low"]


def test_a_backlog_of_one_queue_does_not_starve_another(engine: Engine, jobs: Jobs) -> None:
    ran: list[str] = []

    @jobs.handler("a", queue="a")
    def a() -> None:
        ran.append("a")

    @jobs.handler("b", queue="b")
    def b() -> None:
        ran.append("b")

    add(engine, jobs, "a", *[{}] * 20)
    add(engine, jobs, "b", *[{}] * 3)
    run_all(engine, jobs, concurrency=1)

    assert ran.count("b") == 3
    assert [place for place, name in enumerate(ran) if name == "b"][-1] <= 6


def test_plain_and_coroutine_handlers_give_their_results(engine: Engine, jobs: Jobs) -> None:
    @jobs.handler("plain")
    def plain(x: int) -> dict[str, int]:
        return {"x": x}

    @jobs.handler("coroutine")
    async def coroutine(x: int) -> list[int]:
        await asyncio.sleep(0)
        return [x]

    (first,) = add(engine, jobs, "plain", {"x": 1})
    (second,) = add(engine, jobs, "coroutine", {"x": 2})
    run_all(engine, jobs)

    assert job(engine, first).result == {"x": 1}
    assert job(engine, second).result == [2]
    assert job(engine, second).finished_at is not None


def test_a_plain_handler_that_returns_something_to_await_fails_clearly(
    engine: Engine, jobs: Jobs
) -> None:
    async def work() -> None: ...

    @jobs.handler("forgets", max_attempts=1)
    def forgets() -> object:
        return work()

    @jobs.handler("wrapped")
    @functools.wraps(work)
    def wrapped() -> str:
        return "a plain wrapper of a coroutine function"

    (bad,) = add(engine, jobs, "forgets")
    (good,) = add(engine, jobs, "wrapped")
    run_all(engine, jobs)

    assert status(engine, bad) == "dead"
    assert "make it an async function" in job(engine, bad).last_error
    assert job(engine, good).result == "a plain wrapper of a coroutine function"


def test_the_recorded_traceback_begins_in_the_handler(engine: Engine, jobs: Jobs) -> None:
    @jobs.handler("fails", max_attempts=1)
    def fails() -> None:
        raise ValueError("why")

    (job_id,) = add(engine, jobs, "fails")
    run_all(engine, jobs)

    error = job(engine, job_id).last_error
    assert error.endswith("ValueError: why")
    assert error.count("File ") == 1
    assert __file__ in error


def test_a_row_that_the_database_refuses_fails_alone(engine: Engine, jobs: Jobs) -> None:
    together = threading.Barrier(8)

    @jobs.handler("number", max_attempts=1)
    def number(n: int) -> int:
        together.wait()
        return n

    ids = add(engine, jobs, "number", *[{"n": n} for n in range(8, 16)])
    with constraint(engine, "status <> 'done' OR payload->>'n' <> '13'"):
        run_all(engine, jobs, concurrency=8)

    states = {job(engine, job_id).payload["n"]: status(engine, job_id) for job_id in ids}
    assert states.pop(13) == "dead"
    assert set(states.values()) == {"done"}
    (dead,) = [job_id for job_id in ids if status(engine, job_id) == "dead"]
    assert "the outcome could not be stored" in job(engine, dead).last_error


def test_progress_is_stored_with_the_next_heartbeat(engine: Engine, jobs: Jobs) -> None:
    seen = threading.Event()

    @jobs.handler("reports")
    def reports(ctx: JobContext) -> None:
        ctx.progress({"step": 3})
        ctx.progress(object())  # left out, and harmless
        seen.wait(20)

    (job_id,) = add(engine, jobs, "reports")
    with running(engine, jobs):
        wait_until(
            lambda: job(engine, job_id).meta.get("progress") == {"step": 3}, "progress is stored"
        )
        seen.set()
        wait_until(lambda: status(engine, job_id) == "done", "the job is done")


# --- time-outs ----------------------------------------------------------------------------------


def test_a_thread_that_runs_out_of_time_frees_its_slot_and_its_late_result_is_dropped(
    engine: Engine, jobs: Jobs
) -> None:
    release = threading.Event()
    told: list[bool] = []

    @jobs.handler("slow", timeout=0.3, max_attempts=1)
    def slow(ctx: JobContext) -> str:
        release.wait(20)
        told.append(ctx.cancelled)
        return "late"

    jobs.handler("quick")(lambda: None)
    (stuck,) = add(engine, jobs, "slow")
    with running(engine, jobs, concurrency=1):
        wait_until(lambda: status(engine, stuck) == "dead", "the attempt is booked")
        (after,) = add(engine, jobs, "quick")
        wait_until(lambda: status(engine, after) == "done", "the slot is free again")
        release.set()
        wait_until(lambda: told == [True], "the handler returns at last")

    assert job(engine, stuck).last_error == "timed out after 0.3 s"
    assert (status(engine, stuck), job(engine, stuck).result) == ("dead", None)


def test_a_coroutine_that_runs_out_of_time_is_cancelled(engine: Engine, jobs: Jobs) -> None:
    cleaned: list[str] = []

    @jobs.handler("slow", timeout=0.3, max_attempts=1)
    async def slow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.append("up")

    (job_id,) = add(engine, jobs, "slow")
    run_all(engine, jobs)

    assert job(engine, job_id).last_error == "timed out after 0.3 s"
    wait_until(lambda: cleaned == ["up"], "the coroutine cleans up")


def test_a_worker_whose_threads_are_all_stuck_says_so_and_ends(engine: Engine, jobs: Jobs) -> None:
    release = threading.Event()

    @jobs.handler("stuck", timeout=0.2, max_attempts=1)
    def stuck() -> None:
        release.wait(30)

    add(engine, jobs, "stuck", *[{}] * 4)
    worker = RunningWorker(Worker(engine, jobs, concurrency=2, lease=3, heartbeat=1, poll=0.2))
    worker.join()
    release.set()

    assert isinstance(worker.error, WorkerError)
    assert "told to stop and still run" in str(worker.error)


# --- sessions -----------------------------------------------------------------------------------


@pytest.fixture
def effects(engine: Engine) -> Engine:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effects (note text)"))
    return engine


def notes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT note FROM effects ORDER BY note")).scalars())


INSERT = text("INSERT INTO effects VALUES (:note)")


def test_a_session_commits_with_the_finish(effects: Engine, jobs: Jobs) -> None:
    @jobs.handler("writes")
    def writes(session: Session) -> None:
        session.execute(INSERT, {"note": "kept"})
        with session.begin_nested():
            session.execute(INSERT, {"note": "kept too"})
        part = session.begin_nested()
        session.execute(INSERT, {"note": "dropped"})
        part.rollback()

    (job_id,) = add(effects, jobs, "writes")
    run_all(effects, jobs)

    assert status(effects, job_id) == "done"
    assert notes(effects) == ["kept", "kept too"]


def end_by_commit(session: Session) -> None:
    session.commit()


def end_by_close(session: Session) -> None:
    session.close()


def end_by_context(session: Session) -> None:
    with session:
        pass


def end_by_transaction(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    transaction.commit()


def end_by_connection(session: Session) -> None:
    session.connection().commit()


def end_by_outer_transaction(session: Session) -> None:
    session.begin_nested()
    end_by_transaction(session)


@pytest.mark.parametrize(
    "end",
    [
        end_by_commit,
        end_by_close,
        end_by_context,
        end_by_transaction,
        end_by_connection,
        end_by_outer_transaction,
    ],
)
def test_a_session_refuses_to_be_ended_by_its_handler(
    effects: Engine, jobs: Jobs, end: Any
) -> None:
    @jobs.handler("ends", max_attempts=1)
    def ends(session: Session) -> None:
        session.execute(INSERT, {"note": "lost"})
        end(session)

    (job_id,) = add(effects, jobs, "ends")
    run_all(effects, jobs)

    assert status(effects, job_id) == "dead"
    assert "begin_nested()" in job(effects, job_id).last_error
    assert notes(effects) == []


def swallow_an_error(session: Session) -> None:
    try:
        session.execute(text("SELECT 1 / 0"))
    except Exception:
        session.get_transaction()


def end_the_backend(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def leave_a_savepoint_open_and_raise(session: Session) -> None:
    session.begin_nested()
    session.execute(INSERT, {"note": "lost"})
    raise ValueError("with a savepoint open")


@pytest.mark.parametrize(
    "harm", [swallow_an_error, end_the_backend, leave_a_savepoint_open_and_raise]
)
def test_a_handler_that_harms_its_session_harms_no_later_job(
    effects: Engine, jobs: Jobs, harm: Any
) -> None:
    sessions: list[int] = []

    @jobs.handler("harms", max_attempts=1)
    def harms(session: Session) -> None:
        harm(session)

    @jobs.handler("writes")
    def writes(note: str, session: Session) -> None:
        sessions.append(id(session))
        session.execute(INSERT, {"note": note})

    (bad,) = add(effects, jobs, "harms")
    good = add(effects, jobs, "writes", {"note": "1"}, {"note": "2"}, {"note": "3"})
    run_all(effects, jobs, concurrency=1)

    assert status(effects, bad) == "dead"
    assert [status(effects, job_id) for job_id in good] == ["done"] * 3
    assert notes(effects) == ["1", "2", "3"]
    assert effects.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_pool_of_one_connection_starves_no_heartbeat(effects: Engine, jobs: Jobs) -> None:
    small = create_engine(effects.url, pool_size=1, max_overflow=0)

    @jobs.handler("holds")
    def holds(session: Session) -> None:
        session.execute(INSERT, {"note": "held"})
        time.sleep(1.2)

    ids = add(effects, jobs, "holds", {}, {}, {}, {})
    run_all(small, jobs, concurrency=4, lease=1.5, heartbeat=0.4)
    small.dispose()

    assert [(status(effects, job_id), job(effects, job_id).attempts) for job_id in ids] == [
        ("done", 1)
    ] * 4


def test_an_async_session_commits_with_the_finish(effects: Engine, jobs: Jobs) -> None:
    @jobs.handler("writes")
    async def writes(note: str, session: AsyncSession) -> None:
        await session.execute(INSERT, {"note": note})

    @jobs.handler("commits", max_attempts=1)
    async def commits(session: AsyncSession) -> None:
        await session.execute(INSERT, {"note": "lost"})
        await session.commit()

    @jobs.handler("slow", max_attempts=1, timeout=0.3)
    async def slow(session: AsyncSession) -> None:
        await session.execute(INSERT, {"note": "lost"})
        await asyncio.sleep(30)

    done = add(effects, jobs, "writes", {"note": "a"}, {"note": "b"})
    dead = add(effects, jobs, "commits") + add(effects, jobs, "slow")
    run_all(effects, jobs)

    assert [status(effects, job_id) for job_id in done] == ["done"] * 2
    assert [status(effects, job_id) for job_id in dead] == ["dead"] * 2
    assert notes(effects) == ["a", "b"]


@pytest.mark.parametrize("driver", ["psycopg2", "asyncpg", "psycopg_async"])
def test_hosts_on_another_driver_can_run_workers(effects: Engine, jobs: Jobs, driver: str) -> None:
    from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

    host: Engine | AsyncEngine
    if driver == "psycopg2":
        host = create_engine(effects.url.set(drivername="postgresql+psycopg2"))
    else:
        host = create_async_engine(effects.url.set(drivername=f"postgresql+{driver}"))

    @jobs.handler("plain")
    def plain(session: Session) -> None:
        session.execute(INSERT, {"note": "plain"})

    @jobs.handler("coroutine")
    async def coroutine(session: AsyncSession) -> None:
        await session.execute(INSERT, {"note": "coroutine"})

    ids = add(effects, jobs, "plain") + add(effects, jobs, "coroutine")
    run_all(host, jobs)
    if isinstance(host, Engine):
        host.dispose()

    assert [status(effects, job_id) for job_id in ids] == ["done"] * 2
    assert notes(effects) == ["coroutine", "plain"]


# --- connections --------------------------------------------------------------------------------


def connections_of(engine: Engine) -> dict[str, tuple[int, str]]:
    with engine.connect() as connection:
        rows = connection.execute(
            text(
                "SELECT application_name, pid, state FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name LIKE 'sa-jobs %'"
            )
        )
        return {row.application_name: (row.pid, row.state) for row in rows}


def test_each_role_has_a_connection_that_is_never_idle_in_a_transaction(
    engine: Engine, jobs: Jobs
) -> None:
    jobs.handler("noop")(lambda: None)
    roles = {"sa-jobs claim", "sa-jobs heartbeat", "sa-jobs listen", "sa-jobs sweep"}
    with running(engine, jobs):
        wait_until(lambda: set(connections_of(engine)) == roles, "all connections are there")
        for _ in range(20):
            assert all(
                state != "idle in transaction" for _, state in connections_of(engine).values()
            )
    # The server notices a moment later.
    wait_until(lambda: connections_of(engine) == {}, "all connections are closed", seconds=5)


def test_a_worker_holds_as_many_connections_as_its_page_says(engine: Engine, jobs: Jobs) -> None:
    """Four of its own, and a pool for each kind of handler that asks for sessions."""
    slots = 3
    named = engine.url.update_query_dict({"application_name": "handlers"})
    host = create_engine(named, pool_size=slots)
    meeting = threading.Barrier(slots)
    met: list[None] = []
    all_met = asyncio.Event()

    @jobs.handler("plain")
    def plain(session: Session) -> None:
        session.execute(text("SELECT 1"))
        meeting.wait(20)

    @jobs.handler("coroutine")
    async def coroutine(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))
        met.append(None)
        if len(met) == slots:
            all_met.set()
        await all_met.wait()

    def held(name: str) -> int:
        query = text(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name LIKE :name"
        )
        with engine.connect() as connection:
            return int(connection.scalar(query, {"name": name}) or 0)

    with running(host, jobs, concurrency=slots):
        for handler in ("plain", "coroutine"):
            for job_id in add(engine, jobs, handler, *[{}] * slots):
                wait_until_done(engine, job_id)
        wait_until(lambda: held("sa-jobs %") == 4, "its own are there")
        assert held("handlers") == 2 * slots
    host.dispose()


@pytest.mark.parametrize("role", ["claim", "heartbeat", "listen", "sweep"])
def test_a_lost_connection_is_replaced_and_no_attempt_is_lost(
    engine: Engine, jobs: Jobs, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    jobs.handler("noop")(lambda: None)

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    name = f"sa-jobs {role}"
    (held,) = add(engine, jobs, "waits")
    with running(engine, jobs), caplog.at_level(logging.INFO):
        wait_until(lambda: status(engine, held) == "running", "the job runs")
        wait_until(lambda: name in connections_of(engine), "the connection is there")
        pid, _ = connections_of(engine)[name]
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        go.set()
        (after,) = add(engine, jobs, "noop")
        wait_until(lambda: status(engine, held) == "done", "the job's end is written")
        wait_until(lambda: status(engine, after) == "done", "the next job runs")
        wait_until(lambda: connections_of(engine).get(name, (pid, ""))[0] != pid, "it is replaced")

    assert job(engine, held).attempts == 1
    assert failures(engine, held) == []


def test_a_restart_of_the_server_is_survived(
    cluster: Cluster, engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    go = threading.Event()
    jobs.handler("noop")(lambda: None)

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    held = add(engine, jobs, "waits", {}, {})
    fresh = create_engine(engine.url, poolclass=NullPool)
    with running(fresh, jobs, lease=30, heartbeat=1), caplog.at_level(logging.INFO):
        wait_until(
            lambda: [status(fresh, job_id) for job_id in held] == ["running"] * 2, "they run"
        )
        engine.dispose()
        cluster.restart("immediate")
        go.set()
        (after,) = add(fresh, jobs, "noop")
        wait_until(lambda: status(fresh, after) == "done", "the next job runs")
        wait_until(lambda: [status(fresh, job_id) for job_id in held] == ["done"] * 2, "they end")

    assert [job(fresh, job_id).attempts for job_id in held] == [1, 1]
    assert len([record for record in caplog.records if "trying again" in record.message]) <= 8


def test_an_enqueue_wakes_an_idle_worker(engine: Engine, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)

    with running(engine, jobs, poll=60):
        wait_until_asleep(engine)
        for _ in range(5):
            (job_id,) = add(engine, jobs, "noop")
            wait_until_done(engine, job_id, seconds=5)
        # The listener comes back, and what was enqueued in the gap is found.
        pid, _ = connections_of(engine)["sa-jobs listen"]
        with engine.connect() as connection:
            connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        (job_id,) = add(engine, jobs, "noop")
        wait_until(lambda: status(engine, job_id) == "done", "it runs", seconds=5)


def test_without_listen_polling_finds_the_job(engine: Engine, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    with running(engine, jobs, listen=False, poll=0.2):
        (job_id,) = add(engine, jobs, "noop")
        wait_until(lambda: status(engine, job_id) == "done", "it runs")
        assert "sa-jobs listen" not in connections_of(engine)


def test_buffered_jobs_are_handed_back_when_the_worker_stops(engine: Engine, jobs: Jobs) -> None:
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        go.wait(20)

    ids = add(engine, jobs, "waits", *[{}] * 5)
    worker = RunningWorker(Worker(engine, jobs, concurrency=1, buffer=3, grace=10))
    wait_until(
        lambda: [status(engine, job_id) for job_id in ids] == ["running"] * 4 + ["ready"],
        "as many as slots and buffer are claimed",
    )
    worker.worker.stop()
    wait_until(
        lambda: [status(engine, job_id) for job_id in ids] == ["running"] + ["ready"] * 4,
        "what has not begun is handed back",
    )
    go.set()
    worker.join()

    assert worker.code == 0
    assert [job(engine, job_id).attempts for job_id in ids] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_statement_claims_and_ends_no_more_than_a_batch(
    engine: Engine, jobs: Jobs, batch: int
) -> None:
    taken: list[int] = []

    @jobs.handler("noop")
    def noop() -> None: ...

    def note(_: Any, __: Any, ___: Any, parameters: Any, *____: Any) -> None:
        if isinstance(parameters, dict) and "claim_nos" in parameters:
            # The list goes as one text.
            taken.append(parameters["ids"].count(",") + 1)
        if isinstance(parameters, dict) and "limit" in parameters and "queues" in parameters:
            taken.append(parameters["limit"])

    ids = add(engine, jobs, "noop", *[{}] * 20)
    event.listen(Engine, "before_cursor_execute", note)
    try:
        run_all(engine, jobs, concurrency=4, buffer=8, batch=batch)
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert {status(engine, job_id) for job_id in ids} == {"done"}
    assert len(taken) > 20 / batch
    assert max(taken) == batch


@pytest.mark.parametrize(("queue", "warned"), [("defualt", True), ("default", False)])
def test_a_worker_whose_queues_are_those_of_no_handler_says_so(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture, queue: str, warned: bool
) -> None:
    """As with a name that is misspelt: its jobs would wait for ever, with no sign."""
    jobs.handler("noop")(lambda: None)
    run_all(engine, jobs, queues=[queue, "extra"])
    assert ("they have default, and their jobs wait there" in caplog.text) is warned


def test_a_worker_takes_so_many_jobs_and_lets_them_end(engine: Engine, jobs: Jobs) -> None:
    """However many it may run at once or claim ahead, and however long they take."""
    began: list[int] = []
    gate = threading.Event()

    @jobs.handler("wait")
    def wait(number: int) -> None:
        began.append(number)
        gate.wait(30)

    ids = add(engine, jobs, "wait", *({"number": number} for number in range(6)))
    worker = RunningWorker(Worker(engine, jobs, **SHORT, concurrency=2, buffer=4, max_jobs=5))
    try:
        wait_until(lambda: len(began) == 2, "two run")
    finally:
        gate.set()
        worker.join()

    assert worker.code == EXIT_RECYCLED
    assert sorted(began) == [0, 1, 2, 3, 4]
    assert [status(engine, job_id) for job_id in ids] == ["done"] * 5 + ["ready"]


def test_a_worker_says_once_that_it_is_ready_and_before_its_first_handler(
    engine: Engine, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []

    def on_ready() -> None:
        said.append("ready")
        raise ValueError("this harms no job")

    @jobs.handler("note")
    def note() -> None:
        said.append("note")

    add(engine, jobs, "note", *([{}] * 3))
    run_all(engine, jobs, concurrency=1, on_ready=on_ready)

    assert said == ["ready", "note", "note", "note"]
    assert "on_ready failed" in caplog.text


def test_a_worker_in_a_thread_is_stopped_by_its_api(engine: Engine, jobs: Jobs) -> None:
    began = threading.Event()
    go = threading.Event()

    @jobs.handler("waits")
    def waits() -> None:
        began.set()
        go.wait(20)

    (job_id,) = add(engine, jobs, "waits")
    worker = RunningWorker(Worker(engine, jobs, grace=0.2))
    assert began.wait(20)
    assert worker.stop() == EXIT_HANDED_BACK
    go.set()

    assert (status(engine, job_id), job(engine, job_id).attempts) == ("ready", 0)


# --- what cannot work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": True}, "concurrency"),
        ({"buffer": -1}, "buffer"),
        ({"batch": 0}, "batch"),
        ({"lease": 0}, "lease"),
        ({"poll": float("nan")}, "poll"),
        ({"grace": -1}, "grace"),
        ({"lease": 20, "heartbeat": 10}, r"heartbeat \(10 s\).*lease \(20 s\)"),
        ({"max_jobs": 0}, "max_jobs"),
        ({"max_memory_mib": 0.5}, "max_memory_mib"),
        ({"queues": []}, "queues"),
        ({"queues": "default"}, "queues"),
        ({"queues": 5}, "queues .*not 5"),
        ({"queues": b"default"}, "queues"),
        ({"concurrency": 10**30}, "concurrency must be at most"),
        ({"buffer": 10**30}, "buffer must be at most"),
        ({"lease": 1e-9, "heartbeat": 1e-9}, "lease must be from 1 .*not 1e-09"),
        ({"heartbeat": 1e-9}, "heartbeat must be from 0.01"),
        ({"answer": 1e-9}, "answer must be from 0.1 .*not 1e-09"),
        ({"listen": "no"}, "listen must be True or False, not 'no'"),
        ({"on_ready": 5}, "on_ready must be callable.*not 5"),
        ({"control_engine": "postgresql://u:secret@h/d"}, "control_engine .*not str: .*create_eng"),
        ({"listen_engine": 5}, "listen_engine must be an Engine"),
        ({"session_factory": 5}, "session_factory .*int: pass sessionmaker"),
        ({"session_factory": Session()}, "session_factory .*Session: pass sessionmaker"),
        ({"session_factory": async_sessionmaker()}, "session_factory .*makes AsyncSession"),
        ({"async_session_factory": 5}, "async_session_factory .*pass async_sessionmaker"),
        ({"async_session_factory": sessionmaker()}, "async_session_factory .*makes Session: pass"),
        ({"async_session_factory": scoped_session(sessionmaker())}, "async_session_factory"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(
    engine: Engine, jobs: Jobs, options: dict[str, Any], words: str
) -> None:
    jobs.handler("noop")(lambda: None)
    with pytest.raises(WorkerOptionError, match=words) as caught:
        Worker(engine, jobs, **options)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("engine", ["postgresql://u:secret@h/d", None, 5, Jobs()])
def test_what_is_no_engine_is_refused(engine: Any, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    words = rf"engine must be an Engine or AsyncEngine, not {type(engine).__name__}: make one"
    with pytest.raises(WorkerOptionError, match=words):
        Worker(engine, jobs)


def test_every_kind_of_session_factory_is_taken(engine: Engine, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    made, made_async = sessionmaker(engine), async_sessionmaker()
    scoped = async_scoped_session(made_async, scopefunc=asyncio.current_task)
    plain: tuple[Any, ...] = (made, scoped_session(made), made.__call__, Session)
    coroutine: tuple[Any, ...] = (made_async, scoped, made_async.__call__, AsyncSession)
    for factory in plain:
        Worker(engine, jobs, session_factory=factory)
    for factory in coroutine:
        Worker(engine, jobs, async_session_factory=factory)


def test_a_registry_without_handlers_is_refused(engine: Engine, jobs: Jobs) -> None:
    with pytest.raises(WorkerError, match="no handlers"):
        Worker(engine, jobs)


def test_a_worker_on_sqlite_says_one_sentence(jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    with pytest.raises(WorkerError, match="a worker needs PostgreSQL"):
        Worker(create_engine("sqlite://"), jobs)


def test_absent_tables_are_named_with_the_command_to_run(empty_database: str, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    engine = create_engine(empty_database)
    with pytest.raises(SchemaVersionError, match="sa-jobs db upgrade"):
        Worker(engine, jobs).run_until_empty()
    engine.dispose()


def test_a_role_without_permission_ends_the_worker_with_the_privilege_named(
    engine: Engine, jobs: Jobs
) -> None:
    jobs.handler("noop")(lambda: None)
    role = f"role_{engine.url.database}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN"))
        connection.execute(text(f"GRANT SELECT ON sa_jobs_step TO {role}"))
    other = create_engine(engine.url.set(username=role))
    try:
        with pytest.raises(WorkerError, match="permission denied for table sa_jobs"):
            Worker(other, jobs).run_until_empty()
    finally:
        other.dispose()
        with engine.begin() as connection:
            connection.execute(text(f"DROP OWNED BY {role}"))
            connection.execute(text(f"DROP ROLE {role}"))


def test_a_worker_runs_once(engine: Engine, jobs: Jobs) -> None:
    jobs.handler("noop")(lambda: None)
    worker = Worker(engine, jobs)
    worker.run_until_empty()
    with pytest.raises(WorkerError, match="runs once"):
        worker.run()


def test_a_payload_that_is_no_object_is_a_failed_attempt(engine: Engine, jobs: Jobs) -> None:
    jobs.handler("noop", max_attempts=1)(lambda: None)
    with Session(engine) as session, session.begin():
        job_id = enqueue(session, "noop", max_attempts=1).id
        session.execute(text("UPDATE sa_jobs SET payload = '[1]'"))
    run_all(engine, jobs)

    assert status(engine, job_id) == "dead"
    assert "no JSON object" in job(engine, job_id).last_error


def test_a_callable_backoff_that_raises_falls_back(engine: Engine, jobs: Jobs) -> None:
    def broken(attempt: int) -> float:
        raise RuntimeError("no idea")

    @jobs.handler("fails", max_attempts=20, backoff=broken)
    def fails() -> None:
        raise ValueError("why")

    jobs.handler("fixed", backoff=fixed(0))(lambda: None)
    (job_id,) = add(engine, jobs, "fails")
    run_all(engine, jobs)

    # The default policy's first delays may be over before the worker looks whether it may end.
    assert status(engine, job_id) == "ready"
    assert failures(engine, job_id)
