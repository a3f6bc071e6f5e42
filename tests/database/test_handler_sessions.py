"""Sessions of handlers: a new one for each job, and whatever is done to one harms no later job."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)

from sa_jobs import Jobs, fixed
from sa_jobs.models import DEFAULT_TABLES
from tests.support.looking import job, status
from tests.support.running import run_all


class Base(DeclarativeBase):
    pass


class Note(Base):
    __tablename__ = "notes"
    id: Mapped[int] = mapped_column(primary_key=True)
    content: Mapped[str]


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def host(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


@pytest.fixture
def async_host(host: Engine) -> Iterator[AsyncEngine]:
    engine = create_async_engine(host.url)
    yield engine
    asyncio.run(engine.dispose())


def add(engine: Engine, jobs: Jobs, handler: str, *payloads: dict[str, Any]) -> list[int]:
    with Session(engine) as session, session.begin():
        added = jobs.enqueue_many(session, handler, payloads or [{}])
    return [entry.id for entry in added]


def notes(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(
            connection.execute(text("SELECT content FROM notes ORDER BY content")).scalars()
        )


def bad_sql_swallowed(session: Session) -> None:
    try:
        session.execute(text("SELECT no_such_column"))
    except Exception:
        session.get_transaction()


def lost_connection(session: Session) -> None:
    session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))


def lost_connection_swallowed(session: Session) -> None:
    try:
        lost_connection(session)
    except Exception:
        session.get_transaction()


def close(session: Session) -> None:
    session.add(Note(content="lost"))
    session.flush()
    session.close()


def commit(session: Session) -> None:
    session.add(Note(content="lost"))
    session.commit()


def commit_swallowed(session: Session) -> None:
    session.add(Note(content="kept by the finish"))
    try:
        session.commit()
    except Exception:
        session.get_transaction()


def dirty_objects_and_raise(session: Session) -> None:
    session.add_all([Note(content="lost"), Note(content="lost"), Note(content="lost")])
    raise ValueError("with three dirty objects")


def savepoint_left_open(session: Session) -> None:
    session.begin_nested()
    session.add(Note(content="kept from a savepoint"))


def savepoint_left_open_and_raise(session: Session) -> None:
    session.begin_nested()
    session.add(Note(content="lost"))
    session.flush()
    raise ValueError("with a savepoint open")


def connection_closed(session: Session) -> None:
    session.add(Note(content="lost"))
    session.flush()
    session.connection().close()


def rolled_back(session: Session) -> None:
    session.add(Note(content="lost"))
    session.flush()
    session.rollback()


# Each way to harm the session, and how its own job ends.
HARM = [
    (bad_sql_swallowed, "dead"),
    (lost_connection, "dead"),
    (lost_connection_swallowed, "dead"),
    (close, "dead"),
    (commit, "dead"),
    (commit_swallowed, "done"),
    (dirty_objects_and_raise, "dead"),
    (savepoint_left_open, "done"),
    (savepoint_left_open_and_raise, "dead"),
    (connection_closed, "dead"),
    (rolled_back, "done"),
]
KEPT = ["kept by the finish", "kept from a savepoint"]


def enqueue_each_harm_and_normal_jobs(engine: Engine, jobs: Jobs) -> tuple[list[int], list[int]]:
    """Enqueue each harmful job with three normal ones after it, as one slot runs them."""
    harmful, normal = [], []
    for harm, _ in HARM:
        harmful += add(engine, jobs, "harms", {"how": harm.__name__})
        normal += add(
            engine, jobs, "writes", *[{"content": f"{harm.__name__} {n}"} for n in range(3)]
        )
    return harmful, normal


def check_each_harm_and_normal_jobs(
    engine: Engine, harmful: list[int], normal: list[int], sessions: list[Any]
) -> None:
    ends = [
        (harm.__name__, status(engine, job_id))
        for (harm, _), job_id in zip(HARM, harmful, strict=True)
    ]
    assert ends == [(harm.__name__, end) for harm, end in HARM]
    assert [status(engine, job_id) for job_id in normal] == ["done"] * len(normal)
    written = [job(engine, job_id).payload["content"] for job_id in normal]
    assert notes(engine) == sorted(written + KEPT)
    assert len({id(session) for session in sessions}) == len(sessions) == len(harmful + normal)


def test_a_session_harmed_in_any_way_harms_no_later_job(host: Engine, jobs: Jobs) -> None:
    ways = {harm.__name__: harm for harm, _ in HARM}
    sessions: list[Session] = []

    @jobs.handler("harms", max_attempts=1)
    def harms(how: str, session: Session) -> None:
        sessions.append(session)
        ways[how](session)

    @jobs.handler("writes")
    def writes(content: str, session: Session) -> None:
        sessions.append(session)
        session.add(Note(content=content))

    idle = host.pool.checkedout()  # type: ignore[attr-defined]
    harmful, normal = enqueue_each_harm_and_normal_jobs(host, jobs)
    run_all(host, jobs, concurrency=1)

    check_each_harm_and_normal_jobs(host, harmful, normal, sessions)
    assert host.pool.checkedout() == idle  # type: ignore[attr-defined]


def test_an_async_session_harmed_in_any_way_harms_no_later_job(
    host: Engine, async_host: AsyncEngine, jobs: Jobs
) -> None:
    ways = {harm.__name__: harm for harm, _ in HARM}
    sessions: list[AsyncSession] = []
    own: dict[str, Callable[[AsyncSession], Awaitable[None]]] = {
        "close": AsyncSession.close,
        "commit": AsyncSession.commit,
    }

    @jobs.handler("harms", max_attempts=1)
    async def harms(how: str, session: AsyncSession) -> None:
        sessions.append(session)
        if how in own:
            session.add(Note(content="lost"))
            await session.flush()
            await own[how](session)
        else:
            await session.run_sync(ways[how])

    @jobs.handler("writes")
    async def writes(content: str, session: AsyncSession) -> None:
        sessions.append(session)
        session.add(Note(content=content))

    harmful, normal = enqueue_each_harm_and_normal_jobs(host, jobs)
    run_all(host, jobs, concurrency=1, async_session_factory=async_sessionmaker(async_host))

    check_each_harm_and_normal_jobs(host, harmful, normal, sessions)
    assert async_host.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_cancelled_coroutine_gives_its_connection_back(
    host: Engine, async_host: AsyncEngine, jobs: Jobs
) -> None:
    """Cancelled while it waits for the server, which goes on with the statement."""

    @jobs.handler("slow", timeout=0.3, max_attempts=1)
    async def slow(session: AsyncSession) -> None:
        session.add(Note(content="lost"))
        await session.execute(text("SELECT pg_sleep(60)"))

    @jobs.handler("writes")
    async def writes(content: str, session: AsyncSession) -> None:
        session.add(Note(content=content))

    dead = add(host, jobs, "slow", {}, {})
    done = add(host, jobs, "writes", {"content": "a"}, {"content": "b"})
    run_all(host, jobs, concurrency=1, async_session_factory=async_sessionmaker(async_host))

    assert [status(host, job_id) for job_id in dead] == ["dead"] * 2
    assert [status(host, job_id) for job_id in done] == ["done"] * 2
    assert notes(host) == ["a", "b"]
    assert async_host.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_scoped_session_is_a_new_one_for_each_job(host: Engine, jobs: Jobs) -> None:
    """Also after a handler that used it without asking for it, and left it broken."""
    scoped = scoped_session(sessionmaker(host))
    sessions: list[Session] = []

    @jobs.handler("harms")
    def harms() -> None:
        sessions.append(scoped())
        bad_sql_swallowed(scoped())

    @jobs.handler("writes")
    def writes(content: str, session: Session) -> None:
        assert scoped() is session
        sessions.append(session)
        scoped.add(Note(content=content))

    ids = []
    for number in range(3):
        ids += add(host, jobs, "harms") + add(host, jobs, "writes", {"content": str(number)})
    run_all(host, jobs, concurrency=1, session_factory=scoped)

    assert [status(host, job_id) for job_id in ids] == ["done"] * 6
    assert notes(host) == ["0", "1", "2"]
    assert len({id(session) for session in sessions}) == 6
    assert host.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_an_async_scoped_session_keeps_no_task(
    host: Engine, async_host: AsyncEngine, jobs: Jobs
) -> None:
    scoped = async_scoped_session(async_sessionmaker(async_host), scopefunc=asyncio.current_task)

    @jobs.handler("writes")
    async def writes(content: str, session: AsyncSession) -> None:
        assert scoped() is session
        session.add(Note(content=content))

    add(host, jobs, "writes", {"content": "a"}, {"content": "b"})
    run_all(host, jobs, async_session_factory=scoped)

    assert notes(host) == ["a", "b"]
    assert scoped.registry.registry == {}


def test_an_async_scoped_session_keeps_no_connection_of_a_handler_that_asked_for_none(
    host: Engine, jobs: Jobs
) -> None:
    engine = create_async_engine(host.url, pool_size=1, max_overflow=0, pool_timeout=5)
    scoped = async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    left: list[int] = []

    @jobs.handler("uses", backoff=fixed(60))
    async def uses(fails: bool) -> None:
        left.append(len(scoped.registry.registry))
        await scoped.execute(text("SELECT 1"))
        if fails:
            await scoped.execute(text("SELECT no_such_column"))

    @jobs.handler("uses_in_session")
    async def uses_in_session(session: AsyncSession) -> None:
        await session.execute(text("SELECT 1"))

    ids = add(host, jobs, "uses", *[{"fails": number == 1} for number in range(4)])
    ids += add(host, jobs, "uses_in_session", {}, {})
    run_all(host, jobs, concurrency=1, async_session_factory=scoped)
    asyncio.run(engine.dispose())

    assert [status(host, job_id) for job_id in ids] == ["done", "ready", *["done"] * 4]
    assert left == [0] * 4
    assert scoped.registry.registry == {}


def test_a_session_that_routes_to_two_engines_commits_on_both(host: Engine, jobs: Jobs) -> None:
    other = create_engine(host.url)
    routes: dict[Any, Engine] = {Note: other, DEFAULT_TABLES.Job: host}
    factory = sessionmaker(host, binds=routes)

    @jobs.handler("writes", max_attempts=1)
    def writes(session: Session) -> None:
        session.execute(text("SELECT 1"))
        session.add(Note(content="written by the other engine"))
        session.flush()
        assert session.connection(bind_arguments={"mapper": Note}).engine is other
        assert session.connection().engine is host

    (job_id,) = add(host, jobs, "writes")
    run_all(host, jobs, session_factory=factory)
    other.dispose()

    assert (status(host, job_id), job(host, job_id).last_error) == ("done", None)
    assert notes(host) == ["written by the other engine"]
