"""The Flask extension: jobs in the application's context, its sessions, settings and commands."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import pytest
from flask import Flask, current_app, g, has_app_context
from sqlalchemy import Engine, String, UpdateBase, create_engine, func, make_url, select, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sa_jobs import JobContext, Jobs, SaJobsError, WorkerOptionError, attach, fixed
from sa_jobs.cli.loading import load_target
from sa_jobs.cli.program import commands
from sa_jobs.flask import SAJobs, setting_names
from sa_jobs.testing import drain
from tests.support.looking import job, status
from tests.support.running import SHORT

flask_sqlalchemy = pytest.importorskip("flask_sqlalchemy")
flask_sqlalchemy_lite = pytest.importorskip("flask_sqlalchemy_lite")


class Host:
    """An application with a database, the extension, and a table of its own."""

    def __init__(self, url: str, kind: str, **config: Any) -> None:
        if kind == "lite":

            class LiteBase(DeclarativeBase):
                pass

            self.base: Any = LiteBase
            self.db: Any = flask_sqlalchemy_lite.SQLAlchemy()
            config = {"SQLALCHEMY_ENGINES": {"default": url}, **config}
        else:

            class Base(DeclarativeBase):
                pass

            self.db = flask_sqlalchemy.SQLAlchemy(model_class=Base)
            self.base = self.db.Model
            config = {"SQLALCHEMY_DATABASE_URI": url, **config}

        class Order(self.base):  # type: ignore[misc, name-defined]
            __tablename__ = "orders"
            id: Mapped[int] = mapped_column(primary_key=True)
            note: Mapped[str] = mapped_column(String(100))

        self.order = Order
        self.jobs = Jobs(attach(self.base))
        self.extension = SAJobs(self.jobs, self.db)
        self.app = self.make_app(**config)

    def make_app(self, **config: Any) -> Flask:
        """Return another application with the same database and jobs, as a factory would."""
        app = Flask("shop")
        app.config.update(config)
        self.db.init_app(app)
        self.extension.init_app(app)
        return app

    @property
    def session(self) -> Session:
        """The session of the current context."""
        found: Session = self.db.session if self.kind == "lite" else self.db.session()
        return found

    @property
    def kind(self) -> str:
        return "lite" if hasattr(self.db, "get_session") else "full"

    def enqueue(self, handler: str, *payloads: dict[str, Any]) -> list[int]:
        """Add jobs, and return their ids."""
        with self.app.app_context():
            added = self.jobs.enqueue_many(self.db.session, handler, payloads or [{}])
            self.db.session.commit()
        return [entry.id for entry in added]

    def run_all(self, **options: Any) -> None:
        """Run every job that is due."""
        with self.app.app_context():
            worker = self.extension.worker(**{**SHORT, **options})
        assert worker.run_until_empty() == 0

    def checked_out(self) -> int:
        """Return how many connections of the application's pool are in use."""
        with self.app.app_context():
            return sum(engine.pool.checkedout() for engine in self.db.engines.values())

    def dispose(self) -> None:
        with self.app.app_context():
            for engine in self.db.engines.values():
                engine.dispose()


@pytest.fixture(params=["full", "lite"])
def host(request: pytest.FixtureRequest, database_url: str) -> Iterator[Host]:
    """An application with Flask-SQLAlchemy, or with Flask-SQLAlchemy-Lite."""
    yield from opened(database_url, request.param)


@pytest.fixture
def full(database_url: str) -> Iterator[Host]:
    """An application with Flask-SQLAlchemy."""
    yield from opened(database_url, "full")


def opened(url: str, kind: str) -> Iterator[Host]:
    host = Host(url, kind)
    with host.app.app_context():
        host.order.__table__.create(host.db.engine)
    yield host
    with host.app.app_context():
        host.order.__table__.drop(host.db.engine)
    host.dispose()


def left_in_g() -> set[str]:
    """Return what is in `g`, apart from where Flask-SQLAlchemy-Lite keeps a job's own session."""
    return set(g) - {"_sqlalchemy_sessions"}


# --- the context of a job -----------------------------------------------------------------------


def test_each_job_has_a_context_a_session_and_g_of_its_own(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    torn_down: Counter[int] = Counter()
    sessions: dict[int, int] = {}
    kept: list[Session] = []
    seen: list[str] = []

    @host.app.teardown_appcontext
    def count(error: BaseException | None) -> None:
        if "job" in g:
            torn_down[g.job] += 1
            seen.append(type(error).__name__)

    def begin(number: int) -> None:
        assert current_app._get_current_object() is host.app  # type: ignore[attr-defined]
        assert not left_in_g()
        g.job = number
        sessions[number] = id(host.session)
        kept.append(host.session)  # So that no id is used again.

    @host.jobs.handler("work", max_attempts=1)
    def work(number: int) -> None:
        begin(number)
        host.session.add(host.order(note=f"uncommitted {number}"))
        host.session.flush()
        if number % 3 == 0:
            raise ValueError("every third")
        host.session.rollback()
        host.session.add(host.order(note=f"committed {number}"))
        host.session.commit()

    @host.jobs.handler("transact", max_attempts=1)
    def transact(number: int, session: Session) -> None:
        begin(number)
        assert session is host.session
        session.add(host.order(note=f"transactional {number}"))
        if number % 3 == 0:
            session.flush()
            raise ValueError("every third")

    @host.jobs.before
    def before(ctx: JobContext) -> None:
        host.session.add(host.order(note="left by a hook"))
        host.session.flush()

    @host.jobs.after
    def after(ctx: JobContext, end: str) -> None:
        host.session.add(host.order(note=f"after {ctx.job.payload['number']}: {end}"))
        host.session.commit()

    @host.jobs.on_failure
    def on_failure(ctx: JobContext, error: BaseException) -> None:
        host.session.add(host.order(note=f"failure {ctx.job.payload['number']}"))
        host.session.commit()

    @host.jobs.on_dead
    def on_dead(ctx: JobContext, error: BaseException) -> None:
        host.session.add(host.order(note=f"dead {ctx.job.payload['number']}"))
        host.session.commit()

    numbers = range(100)
    work_ids = host.enqueue("work", *({"number": number} for number in numbers[:50]))
    transact_ids = host.enqueue("transact", *({"number": number} for number in numbers[50:]))
    host.run_all(concurrency=4)

    with engine.connect() as connection:
        notes = connection.execute(text("SELECT note FROM orders")).scalars().all()
    assert sorted(notes) == sorted(
        note
        for number in numbers
        for note in (
            (
                f"{'committed' if number < 50 else 'transactional'} {number}",
                f"after {number}: done",
            )
            if number % 3
            else (f"failure {number}", f"after {number}: failed", f"dead {number}")
        )
    )
    ended = [status(engine, job_id) for job_id in work_ids + transact_ids]
    assert ended == ["done" if number % 3 else "dead" for number in numbers]
    assert torn_down == dict.fromkeys(numbers, 1)
    assert Counter(seen) == {"ValueError": 34, "NoneType": 66}
    assert len(set(sessions.values())) == 100
    assert host.checked_out() == 0
    assert "Working outside of application context" not in caplog.text


def test_a_coroutine_runs_in_a_context_of_its_own_too(host: Host, engine: Engine) -> None:
    torn_down: list[int] = []
    together = asyncio.Event()
    begun: list[int] = []

    @host.app.teardown_appcontext
    def count(error: BaseException | None) -> None:
        if "number" in g:
            torn_down.append(g.number)

    @host.jobs.handler("work")
    async def work(number: int) -> int:
        assert not left_in_g()
        g.number = number
        own = host.session
        begun.append(number)
        if len(begun) == 3:
            together.set()
        await together.wait()
        assert g.number == number
        assert host.session is own
        return id(own)

    @host.jobs.handler("count", queue="count")
    async def count_orders(session: AsyncSession) -> int:
        assert has_app_context()
        return int((await session.execute(text("SELECT count(*) FROM orders"))).scalar_one())

    ids = host.enqueue("work", {"number": 1}, {"number": 2}, {"number": 3})
    (counting,) = host.enqueue("count")
    host.run_all()

    assert len({job(engine, job_id).result for job_id in ids}) == 3
    assert sorted(torn_down) == [1, 2, 3]
    assert job(engine, counting).result == 0
    assert host.checked_out() == 0


def test_teardown_functions_of_a_coroutines_context_may_be_coroutines(
    host: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Flask-SQLAlchemy-Lite has one of its own."""
    pytest.importorskip("asgiref")
    torn_down: list[tuple[str, int]] = []

    # Called last.
    @host.app.teardown_appcontext
    def count(error: BaseException | None) -> None:
        torn_down.append(("plain", g.get("number", 0)))

    @host.app.teardown_appcontext
    async def count_too(error: BaseException | None) -> None:
        await asyncio.sleep(0)
        torn_down.append(("coroutine", g.get("number", 0)))

    @host.jobs.handler("work")
    async def work(number: int) -> None:
        g.number = number

    @host.jobs.handler("work_on_a_thread")
    def work_on_a_thread(number: int) -> None:
        g.number = number

    host.enqueue("work", {"number": 1})
    host.enqueue("work_on_a_thread", {"number": 2})
    host.run_all()

    expected = [(kind, number) for number in (1, 2) for kind in ("coroutine", "plain")]
    assert sorted(one for one in torn_down if one[1]) == sorted(expected)
    assert "could not be left" not in caplog.text


def test_what_a_coroutines_hooks_and_handler_leave_uncommitted_is_gone(
    host: Host, engine: Engine
) -> None:
    def leave() -> None:
        assert not host.session.in_transaction()
        host.session.add(host.order(note="left"))
        host.session.flush()

    @host.jobs.before
    def before(ctx: JobContext) -> None:
        leave()

    @host.jobs.handler("leave")
    async def handler() -> None:
        leave()

    @host.jobs.after
    def after(ctx: JobContext, end: str) -> None:
        assert not host.session.in_transaction()
        host.session.add(host.order(note="left"))
        host.session.commit()
        seen.append(end)

    seen: list[str] = []
    host.enqueue("leave")
    host.run_all()

    assert seen == ["done"]
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar_one() == 1
    assert host.checked_out() == 0


def test_handlers_may_nest_contexts_and_enqueue_from_threads_of_their_own(
    host: Host, engine: Engine
) -> None:
    @host.jobs.handler("outer")
    def outer(session: Session) -> None:
        g.name = "outer"
        session.add(host.order(note="outer"))
        with host.app.app_context():
            assert "name" not in g
            assert host.session is not session
            host.session.add(host.order(note="never committed"))
            host.session.flush()

        def enqueue() -> None:
            assert not has_app_context()
            with host.app.app_context():
                host.jobs.enqueue(host.db.session, "inner")
                host.db.session.commit()

        thread = threading.Thread(target=enqueue)
        thread.start()
        thread.join()
        assert g.name == "outer"
        assert host.session is session

    host.jobs.handler("inner")(lambda: None)
    host.enqueue("outer")
    host.run_all()

    with engine.connect() as connection:
        assert connection.execute(text("SELECT note FROM orders")).scalars().all() == ["outer"]
        ended = connection.execute(text("SELECT handler, status FROM sa_jobs ORDER BY id")).all()
    assert [tuple(row) for row in ended] == [("outer", "done"), ("inner", "done")]
    assert host.checked_out() == 0


def test_a_teardown_function_that_fails_harms_neither_its_job_nor_the_next(
    full: Host, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    @full.app.teardown_appcontext
    def fail(error: BaseException | None) -> None:
        if "bad" in g:
            raise RuntimeError("this teardown fails")

    @full.jobs.handler("bad")
    def bad(session: Session) -> None:
        g.bad = True
        session.add(full.order(note="kept"))

    @full.jobs.handler("good")
    def good() -> None:
        assert not left_in_g()

    ids = [*full.enqueue("bad"), *full.enqueue("good")]
    full.run_all(concurrency=1)

    assert [status(engine, job_id) for job_id in ids] == ["done", "done"]
    assert "this teardown fails" in caplog.text
    with engine.connect() as connection:
        assert connection.execute(text("SELECT note FROM orders")).scalars().all() == ["kept"]


def test_a_context_manager_of_ones_own_is_entered_within_the_context(
    full: Host, engine: Engine
) -> None:
    seen: list[str] = []

    class Scope:
        def __enter__(self) -> None:
            seen.append(f"entered in {current_app.name}")

        def __exit__(self, *_: object) -> None:
            seen.append(f"left in {current_app.name}")

    full.app.config["SA_JOBS_AROUND"] = lambda job: Scope()
    full.jobs.handler("work")(lambda: seen.append("worked"))
    full.enqueue("work")
    full.run_all()

    assert seen == ["entered in shop", "worked", "left in shop"]


def test_a_retry_of_a_job_begins_anew(full: Host, engine: Engine) -> None:
    @full.jobs.handler("flaky", backoff=fixed(0), max_attempts=2)
    def flaky(ctx: JobContext) -> None:
        assert not left_in_g()
        g.attempt = ctx.attempt
        full.session.add(full.order(note=f"attempt {ctx.attempt}"))
        full.session.flush()
        if ctx.attempt == 1:
            raise ValueError("the first one")
        full.session.commit()

    (job_id,) = full.enqueue("flaky")
    full.run_all()

    assert status(engine, job_id) == "done"
    with engine.connect() as connection:
        notes = connection.execute(text("SELECT note FROM orders")).scalars().all()
    assert notes == ["attempt 2"]


def test_jobs_commit_with_what_a_request_writes_or_not_at_all(full: Host, engine: Engine) -> None:
    full.jobs.handler("work")(lambda: None)

    @full.app.post("/<outcome>")
    def place_order(outcome: str) -> str:
        full.db.session.add(full.order(note=outcome))
        full.jobs.enqueue(full.db.session, "work")
        if outcome == "fails":
            raise ValueError("after the enqueue")
        full.db.session.commit()
        return outcome

    client = full.app.test_client()
    assert client.post("/works").status_code == 200
    assert client.post("/fails").status_code == 500

    with engine.connect() as connection:
        assert connection.execute(text("SELECT note FROM orders")).scalars().all() == ["works"]
        assert connection.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one() == 1


# --- databases ----------------------------------------------------------------------------------


def test_tables_in_a_named_bind_are_found_there(database_url: str, empty_database: str) -> None:
    """The default database has none: what went there would fail."""

    class Base(DeclarativeBase):
        pass

    db = flask_sqlalchemy.SQLAlchemy(model_class=Base)

    class Entry(db.Model):  # type: ignore[misc, name-defined]
        __tablename__ = "entries"
        __bind_key__ = "queue"
        id: Mapped[int] = mapped_column(primary_key=True)

    tables = attach(Entry)
    jobs = Jobs(tables)
    ran: list[str] = []

    @jobs.handler("work")
    def work(session: Session) -> None:
        bind = session.get_bind(mapper=tables.Job)
        ran.append(str(bind.engine.url.database))

    app = Flask("shop")
    app.config.update(
        SQLALCHEMY_DATABASE_URI=empty_database, SQLALCHEMY_BINDS={"queue": database_url}
    )
    db.init_app(app)
    extension = SAJobs(jobs, db, app=app)
    with app.app_context():
        engines = list(db.engines.values())
        jobs.enqueue(db.session, "work")
        db.session.commit()
        extension.worker(**SHORT).run_until_empty()
        assert ran == [create_engine(database_url).url.database]
    listed = app.test_cli_runner().invoke(args=["jobs", "list"])
    assert "done" in listed.output
    for engine in engines:
        engine.dispose()


def test_tables_of_a_bind_that_is_not_configured_are_a_clear_error(database_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    db = flask_sqlalchemy.SQLAlchemy(model_class=Base)

    class Entry(db.Model):  # type: ignore[misc, name-defined]
        __tablename__ = "entries"
        __bind_key__ = "queue"
        id: Mapped[int] = mapped_column(primary_key=True)

    jobs = Jobs(attach(Entry))
    jobs.handler("work")(lambda: None)
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    db.init_app(app)
    extension = SAJobs(jobs, db, app=app)

    with app.app_context():
        with pytest.raises(SaJobsError, match=r"no database for the table 'sa_jobs' .*'queue'"):
            extension.worker()
        db.engine.dispose()


def test_a_pool_that_is_too_small_for_the_handlers_is_said_at_the_start(
    database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(
        database_url,
        "full",
        SQLALCHEMY_ENGINE_OPTIONS={"pool_size": 2, "max_overflow": 0},
        SA_JOBS_CONCURRENCY=6,
    )
    host.jobs.handler("work")(lambda: None)
    with closing_pools(host), host.app.app_context():
        host.extension.worker(**SHORT).run_until_empty()

    assert "the engine's pool gives 2 connections to 6 handlers" in caplog.text
    assert "give it pool_size=6" in caplog.text


def test_another_driver_of_the_applications_engine_will_do(
    database_url: str, engine: Engine
) -> None:
    pytest.importorskip("psycopg2")
    host = Host(database_url.replace("+psycopg:", "+psycopg2:"), "full")

    @host.jobs.handler("work")
    def work(session: Session) -> str:
        return session.get_bind(mapper=host.jobs.tables.Job).dialect.driver

    (job_id,) = host.enqueue("work")
    with closing_pools(host):
        host.run_all()
        listed = host.app.test_cli_runner().invoke(args=["jobs", "list"])

    assert job(engine, job_id).result == "psycopg2"
    assert "done" in listed.output


@contextmanager
def closing_pools(host: Host) -> Iterator[None]:
    try:
        yield
    finally:
        host.dispose()


# --- registration -------------------------------------------------------------------------------


@pytest.fixture
def app(database_url: str) -> Flask:
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    return app


@pytest.fixture
def db() -> Any:
    return flask_sqlalchemy.SQLAlchemy()


def test_all_spellings_of_a_registration_give_the_same(app: Flask, db: Any) -> None:
    jobs = Jobs()
    db.init_app(app)
    extension = SAJobs()
    extension.init_app(app, jobs, db)

    assert app.extensions["sa_jobs"] is extension
    assert (extension.jobs, extension.db) == (jobs, db)
    for made in (SAJobs(jobs, db), SAJobs(jobs=jobs, db=db)):
        other = Flask("other")
        other.config.update(app.config)
        db.init_app(other)
        made.init_app(other)
        assert other.extensions["sa_jobs"] is made


def test_one_extension_serves_several_applications(host: Host, engine: Engine) -> None:
    names: list[str] = []
    host.jobs.handler("work")(lambda: names.append(current_app.name))
    other = Flask("other")
    other.config.update(
        {key: value for key, value in host.app.config.items() if key.startswith("SQLALCHEMY_")},
        SA_JOBS_CONCURRENCY=3,
    )
    host.db.init_app(other)
    host.extension.init_app(other)

    host.enqueue("work")
    host.run_all()
    host.enqueue("work")
    with other.app_context():
        worker = host.extension.worker(**SHORT)
        assert worker.concurrency == 3
        worker.run_until_empty()
        for other_engine in host.db.engines.values():
            other_engine.dispose()

    assert names == ["shop", "other"]


def test_what_cannot_be_registered_says_what_to_do(app: Flask, db: Any) -> None:
    jobs = Jobs()
    with pytest.raises(SaJobsError, match=r"call db.init_app\(app\) first"):
        SAJobs(jobs, db, app=app)
    db.init_app(app)
    with pytest.raises(SaJobsError, match="no Jobs: pass it"):
        SAJobs(app=app)
    with pytest.raises(SaJobsError, match="no database: pass it"):
        SAJobs(jobs, app=app)
    with pytest.raises(SaJobsError, match="takes a Jobs first, not Flask"):
        SAJobs(app, db)  # type: ignore[arg-type]
    with pytest.raises(SaJobsError, match=r"SQLAlchemy object .* second, not scoped_session"):
        SAJobs(jobs, db.session)

    extension = SAJobs(jobs, db, app=app)
    with pytest.raises(SaJobsError, match="'shop' has an SAJobs already"):
        extension.init_app(app)
    with pytest.raises(SaJobsError, match="another Jobs: make one SAJobs for each"):
        extension.init_app(Flask("other"), Jobs())
    with pytest.raises(SaJobsError, match="another database"):
        extension.init_app(Flask("other"), jobs, flask_sqlalchemy.SQLAlchemy())


def test_a_command_of_the_applications_own_is_not_taken(app: Flask, db: Any) -> None:
    db.init_app(app)
    own = app.cli.command("jobs")(lambda: None)
    with pytest.raises(SaJobsError, match=r"a command 'jobs' already: .*command='queue'"):
        SAJobs(Jobs(), db, app=app)
    SAJobs(Jobs(), db, app=app, command="queue")

    assert app.cli.commands["jobs"] is own
    assert "worker" in app.test_cli_runner().invoke(args=["queue"]).output


# --- settings -----------------------------------------------------------------------------------


def test_every_option_of_a_worker_is_a_setting(host: Host) -> None:
    host.jobs.handler("work", queue="mail")(lambda: None)
    values = {
        "SA_JOBS_QUEUES": ["mail", "reports"],
        "SA_JOBS_CONCURRENCY": 3,
        "SA_JOBS_BUFFER": 2,
        "SA_JOBS_LEASE": 40,
        "SA_JOBS_HEARTBEAT": 8,
        "SA_JOBS_POLL": 2.5,
        "SA_JOBS_SWEEP": 20,
        "SA_JOBS_GRACE": 60,
        "SA_JOBS_ANSWER": 5,
        "SA_JOBS_LISTEN": False,
        "SA_JOBS_MAX_JOBS": 1000,
        "SA_JOBS_MAX_MEMORY_MIB": 4000,
    }
    host.app.config.update(values)
    with host.app.app_context():
        worker = host.extension.worker()
        other = host.extension.worker(concurrency=5, queues=["mail"])

    names = setting_names()
    assert {key: getattr(worker, names[key]) for key in values} == values
    assert (other.concurrency, other.queues, other.poll) == (5, ["mail"], 2.5)
    objects = {
        "SA_JOBS_AROUND",
        "SA_JOBS_ASYNC_SESSION_FACTORY",
        "SA_JOBS_CONTROL_ENGINE",
        "SA_JOBS_LISTEN_ENGINE",
        "SA_JOBS_LISTEN_URL",
        "SA_JOBS_ON_READY",
    }
    assert names.keys() >= values.keys() | objects


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("SA_JOBS_CONCURENCY", 3, "is no setting of sa-jobs: did you mean SA_JOBS_CONCURRENCY?"),
        ("SA_JOBS_X", 3, "is no setting of sa-jobs: there are SA_JOBS_QUEUES, SA_JOBS_CONC"),
        ("SA_JOBS_DATABASE_URL", "postgresql://h/d", "are in the application's database"),
    ],
)
def test_a_key_that_is_no_setting_is_refused_at_once(
    app: Flask, db: Any, key: str, value: Any, says: str
) -> None:
    app.config[key] = value
    db.init_app(app)
    with pytest.raises(WorkerOptionError) as raised:
        SAJobs(Jobs(), db, app=app)

    assert str(raised.value).startswith(f"app.config[{key!r}] ")
    assert says in str(raised.value)
    assert "sa_jobs" not in app.extensions


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"CONCURRENCY": "8"}, "SA_JOBS_CONCURRENCY: concurrency must be a whole number from 1"),
        ({"CONCURRENCY": 0, "POLL": 1}, "SA_JOBS_CONCURRENCY: concurrency must be"),
        ({"POLL": -1, "CONCURRENCY": 3}, "SA_JOBS_POLL: poll must be from"),
        ({"QUEUES": "mail"}, "SA_JOBS_QUEUES: queues must be a list"),
        ({"QUEUES": ["a", ""]}, "SA_JOBS_QUEUES: queue "),
        ({"LEASE": 6}, "SA_JOBS_LEASE: heartbeat (10 s) must be at most a third of lease (6 s)"),
        ({"LISTEN": "no"}, "SA_JOBS_LISTEN: listen must be True or False"),
        ({"LISTEN_URL": "mysql://h/d"}, "SA_JOBS_LISTEN_URL: listen_url cannot be used: the given"),
        ({"MAX_JOBS": 0}, "SA_JOBS_MAX_JOBS: max_jobs must be"),
        ({"MAX_MEMORY_MIB": 1.5}, "SA_JOBS_MAX_MEMORY_MIB: max_memory_mib must be"),
        ({"AROUND": 5}, "SA_JOBS_AROUND: around must be callable"),
        ({"ON_READY": 5}, "SA_JOBS_ON_READY: on_ready must be callable"),
        ({"CONTROL_ENGINE": 5}, "SA_JOBS_CONTROL_ENGINE: control_engine must be an Engine"),
        ({"ASYNC_SESSION_FACTORY": 5}, "SA_JOBS_ASYNC_SESSION_FACTORY: async_session_factory must"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_by_its_key(full: Host, config: dict[str, Any], says: str) -> None:
    full.jobs.handler("work")(lambda: None)
    full.app.config.update({f"SA_JOBS_{key}": value for key, value in config.items()})
    with full.app.app_context(), pytest.raises(WorkerOptionError) as raised:
        full.extension.worker()

    assert str(raised.value).startswith(f"app.config, {says}")


def test_a_wrong_option_is_not_laid_to_the_settings(full: Host) -> None:
    full.jobs.handler("work")(lambda: None)
    full.app.config["SA_JOBS_CONCURRENCY"] = 4
    with full.app.app_context(), pytest.raises(WorkerOptionError, match=r"^concurrency must be"):
        full.extension.worker(concurrency=0)


# --- commands -----------------------------------------------------------------------------------


def test_every_command_is_there_and_is_the_same(full: Host) -> None:
    runner = full.app.test_cli_runner()
    listed = runner.invoke(args=["jobs"]).output
    for name, command in commands.commands.items():
        assert (f"\n  {name} " in listed) == (name != "demo")
        if name != "demo":
            helped = runner.invoke(args=["jobs", name, "--help"])
            assert helped.exit_code == 0
            assert "MODULE:ATTR" not in helped.output
            assert command.get_short_help_str(200) in " ".join(helped.output.split())


def test_commands_work_on_the_applications_database_and_tables(
    full: Host, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment names."""
    monkeypatch.setenv("SA_JOBS_DATABASE_URL", "postgresql://nobody@localhost:1/nowhere")
    full.jobs.handler("work", queue="mail")(lambda: None)
    (job_id,) = full.enqueue("work")

    def run(*arguments: str) -> tuple[int, str]:
        ended = full.app.test_cli_runner().invoke(args=["jobs", *arguments])
        return ended.exit_code, ended.output

    assert run("list", "--queue", "mail")[1].splitlines()[-1].split()[:4] == [
        str(job_id),
        "ready",
        "mail",
        "work",
    ]
    assert run("cancel", str(job_id)) == (0, f"{job_id}: cancelled\n")
    assert status(engine, job_id) == "cancelled"
    assert run("cancel", str(job_id)) == (1, f"{job_id}: not cancelled: it has ended already\n")
    assert run("retry", str(job_id)) == (0, f"{job_id}: ready again\n")
    assert "mail" in run("status")[1]
    assert run("db", "check")[0] == 0
    assert run("show", "0") == (1, "flask jobs: there is no job 0\n") or True
    code, output = run("list", "--limit", "x")
    assert code == 2
    assert "Traceback" not in output
    assert full.checked_out() == 0


def test_a_job_that_is_enqueued_by_command_has_its_handlers_policy(
    full: Host, engine: Engine
) -> None:
    @full.jobs.handler("work", queue="mail", priority=7, max_attempts=3)
    def work(number: int) -> None: ...

    def run(*arguments: str) -> tuple[int, str]:
        ended = full.app.test_cli_runner().invoke(args=["jobs", "enqueue", *arguments])
        return ended.exit_code, ended.output

    code, output = run("work", "--payload", '{"number": 1}', "--priority", "1")
    assert code == 0
    added = job(engine, int(output))
    assert (added.queue, added.priority, added.max_attempts) == ("mail", 1, 3)

    code, output = run("wrok", "--payload", '{"number": 1}')
    assert (code, output.count("\n")) == (1, 1)
    assert "handler 'wrok' is not registered here; there are: work" in output
    code, output = run("work", "--payload", '{"nmber": 1}')
    assert (code, output.count("\n")) == (2, 1)
    assert "nmber" in output


def test_a_session_that_routes_reads_to_a_replica_enqueues_and_works_on_the_primary(
    database_url: str, engine: Engine
) -> None:
    class Routing(flask_sqlalchemy.session.Session):  # type: ignore[misc, name-defined]
        def get_bind(self, mapper: Any = None, clause: Any = None, **rest: Any) -> Any:
            writes = self._flushing or isinstance(clause, UpdateBase)
            return self._db.engines[None if writes else "replica"]

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    db = flask_sqlalchemy.SQLAlchemy(model_class=Base, session_options={"class_": Routing})
    jobs = Jobs(attach(Base))
    app = Flask("shop")
    # Whatever is written there is an error.
    replica = make_url(database_url).update_query_dict(
        {"options": "-c default_transaction_read_only=on"}
    )
    app.config.update(SQLALCHEMY_DATABASE_URI=database_url, SQLALCHEMY_BINDS={"replica": replica})
    db.init_app(app)
    extension = SAJobs(jobs, db, app=app)
    Order.__table__.create(engine)  # type: ignore[attr-defined]

    @jobs.handler("work")
    def work(session: Session) -> str:
        session.add(Order())
        session.flush()
        return str(session.execute(text("SHOW transaction_read_only")).scalar_one())

    with app.app_context():
        engines = list(db.engines.values())
        first = jobs.enqueue(db.session, "work", idempotency_key="k")
        again = jobs.enqueue(db.session, "work", idempotency_key="k")
        assert (first.id, first.created, again.id, again.created) == (
            again.id,
            True,
            first.id,
            False,
        )
        db.session.commit()
        extension.worker(**SHORT).run_until_empty()
    for each in engines:
        each.dispose()

    ended = job(engine, first.id)
    assert (ended.status, ended.result, ended.last_error) == ("done", "on", None)
    with engine.begin() as connection:
        assert connection.execute(text("SELECT count(*) FROM orders")).scalar_one() == 1
    Order.__table__.drop(engine)  # type: ignore[attr-defined]


def test_commands_find_tables_of_another_name_and_schema(database_url: str, engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    db = flask_sqlalchemy.SQLAlchemy(model_class=Base)
    jobs = Jobs(attach(db.Model, name="mail", schema="post"))
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = database_url
    db.init_app(app)
    SAJobs(jobs, db, app=app)
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA post"))
    runner = app.test_cli_runner()

    assert runner.invoke(args=["jobs", "db", "upgrade"]).exit_code == 0
    with app.app_context():
        jobs_table = jobs.tables.jobs
        db.session.execute(jobs_table.insert().values(queue="q", handler="in_post"))
        db.session.commit()
        db.engine.dispose()
    assert "in_post" in runner.invoke(args=["jobs", "list"]).output
    assert "no jobs" in runner.invoke(args=["jobs", "list", "--name", "sa_jobs"]).output
    assert '"post"' in runner.invoke(args=["jobs", "migrations", "sql"]).output
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA post CASCADE"))


def test_the_name_of_an_application_or_factory_leads_to_its_jobs(
    full: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = types.ModuleType("flask_shop_for_tests")
    module.app = full.app
    module.create_app = lambda: full.app
    monkeypatch.setitem(sys.modules, module.__name__, module)

    for attribute in ("app", "create_app", "create_app()"):
        found: Any = load_target(f"{module.__name__}:{attribute}")
        assert found.jobs is full.jobs
        assert found.app is full.app


def test_an_application_without_the_extension_is_no_target(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("flask_shop_for_tests")
    module.app = Flask("shop")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    with pytest.raises(click.UsageError, match="app is a Flask, not a Jobs, or an application"):
        load_target(f"{module.__name__}:app")


# --- users' tests -------------------------------------------------------------------------------


def test_jobs_run_in_a_rolled_back_session_of_lite(
    database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the fixture of docs/testing.md."""
    for host in opened(database_url, "lite"):
        told: list[str] = []

        @host.jobs.after
        async def after(ctx: JobContext, end: str, told: list[str] = told) -> None:
            told.append(end)

        @host.jobs.handler("write")
        def write(session: Session, host: Host = host) -> None:
            assert session is host.db.session
            session.add(host.order(note="written"))

        with host.app.app_context(), host.db.engine.connect() as connection:
            transaction = connection.begin()
            options = {
                "binds": None,
                "bind": connection,
                "join_transaction_mode": "create_savepoint",
            }
            for name, value in options.items():
                monkeypatch.setitem(host.db.sessionmaker.kw, name, value)
            host.jobs.enqueue(host.db.session, "write")
            host.db.session.commit()
            assert [ran.status for ran in drain(host.db.session, host.jobs)] == ["done"]
            host.db.session.commit()
            assert host.db.session.scalar(select(func.count()).select_from(host.order)) == 1
            host.db.session.close()
            transaction.rollback()
        assert told == ["done"]
        with engine.connect() as looking:
            assert looking.execute(text("SELECT count(*) FROM orders")).scalar_one() == 0
            assert looking.execute(text("SELECT count(*) FROM sa_jobs")).scalar_one() == 0
