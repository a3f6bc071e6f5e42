"""Flask: jobs that run in the application's context, `flask jobs`, and settings in its config."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import click
from sqlalchemy import Connection, Engine, create_engine, update
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.orm import Session, scoped_session

from sa_jobs import (
    Around,
    ClaimedJob,
    InvalidJobError,
    Jobs,
    SaJobsError,
    Worker,
    WorkerOptionError,
    dispose_after_fork,
)
from sa_jobs.errors import DatabaseUrlError
from sa_jobs.urls import listen_url

try:
    from flask import Flask, current_app, has_app_context
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'sa_jobs.flask needs Flask: pip install "sa-jobs[flask]"', name=error.name
    ) from error

if TYPE_CHECKING:
    from sa_jobs.cli.application import ApplicationCommands

PREFIX = "SA_JOBS_"
# The application's context and its sessions are this extension's to give.
_OWN_OPTIONS = frozenset({"session_factory"})


class Database(Protocol):
    """What is used of Flask-SQLAlchemy's `SQLAlchemy`, and of Flask-SQLAlchemy-Lite's."""

    @property
    def session(self) -> Any:
        """The session of the current application context, or a registry that gives it."""

    @property
    def engines(self) -> Mapping[Any, Engine]:
        """The engines of the current application, by name."""


class SAJobs:
    """The extension: runs the handlers of `jobs` in an application's context, with its `db`.

    `db` is the `SQLAlchemy` object of Flask-SQLAlchemy or Flask-SQLAlchemy-Lite. One extension may
    serve several applications, which share its Jobs and its `db`; it is in the `extensions` of each
    as "sa_jobs". An application gets the commands `flask jobs`, or of another name by `command`.

    Its workers are configured by `app.config`: SA_JOBS_CONCURRENCY, SA_JOBS_QUEUES and so on, for
    every option of a Worker. Its engines may be used before a server forks: see
    `dispose_after_fork`.
    """

    def __init__(
        self,
        jobs: Jobs | None = None,
        db: Database | None = None,
        *,
        app: Flask | None = None,
        command: str = "jobs",
    ) -> None:
        self._jobs: Jobs | None = None
        self._db: Database | None = None
        self._command = command
        self._take(jobs, db)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, jobs: Jobs | None = None, db: Database | None = None) -> None:
        """Register the extension on an application, after `db`; `jobs` and `db` if not given yet.

        Raises SaJobsError where that cannot be, WorkerOptionError for a setting that no worker has.
        """
        if "sa_jobs" in app.extensions:
            raise SaJobsError(
                f"the application {app.name!r} has an SAJobs already, in "
                "app.extensions['sa_jobs']: initialize it once"
            )
        self._take(jobs, db)
        if app.cli.commands.get(self._command) is not None:
            raise SaJobsError(
                f"the application {app.name!r} has a command {self._command!r} already: name "
                "another one for the jobs, as in SAJobs(jobs, db, command='queue')"
            )
        application = self.application(app)
        application.settings  # noqa: B018  A wrong key is said to every process, also to the web's.
        for engine in application.engines():
            dispose_after_fork(engine)
        app.extensions["sa_jobs"] = self
        app.cli.add_command(_Commands(application, self._command))

    @property
    def jobs(self) -> Jobs:
        """The handlers, and the tables that the jobs are in."""
        if self._jobs is None:
            raise SaJobsError("this SAJobs has no Jobs: pass it, as in SAJobs(jobs, db)")
        return self._jobs

    @property
    def db(self) -> Database:
        """The applications' database."""
        if self._db is None:
            raise SaJobsError("this SAJobs has no database: pass it, as in SAJobs(jobs, db)")
        return self._db

    def application(self, app: Flask) -> JobsInApp:
        """Return the jobs as those of one application."""
        return JobsInApp(app, self.jobs, self.db)

    def worker(self, **options: Any) -> Worker:
        """Return a worker for the current application, by its settings and by these options.

        For programs of your own, and for tests; `flask jobs worker` runs one. It may be run outside
        of the application's context.
        """
        app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        return self.application(app).worker(**options)

    def _take(self, jobs: Jobs | None, db: Database | None) -> None:
        if jobs is not None:
            if not isinstance(jobs, Jobs):
                raise SaJobsError(f"SAJobs takes a Jobs first, not {type(jobs).__name__}")
            if self._jobs not in (None, jobs):
                raise SaJobsError("this SAJobs has another Jobs: make one SAJobs for each")
            self._jobs = jobs
        if db is not None:
            # By its class: the attributes themselves need an application's context.
            if not all(hasattr(type(db), name) for name in ("engines", "init_app")):
                raise SaJobsError(
                    "SAJobs takes the SQLAlchemy object of Flask-SQLAlchemy (3.1 or newer) or "
                    f"Flask-SQLAlchemy-Lite second, not {type(db).__name__}"
                )
            if self._db not in (None, db):
                raise SaJobsError("this SAJobs has another database: make one SAJobs for each")
            self._db = db


@dataclass(frozen=True)
class JobsInApp:
    """The jobs of one application: its engine and settings, and workers that run in its context."""

    app: Flask
    jobs: Jobs
    db: Database

    @property
    def settings(self) -> dict[str, Any]:
        """What `app.config` says of a worker's options; raises WorkerOptionError for others."""
        known = setting_names()
        found = {}
        for key, value in self.app.config.items():
            if not key.startswith(PREFIX):
                continue
            if key == "SA_JOBS_DATABASE_URL":
                raise WorkerOptionError(
                    f"app.config[{key!r}] has no place: the jobs are in the application's database"
                )
            if key not in known:
                hint = _suggestion(key, known)
                raise WorkerOptionError(f"app.config[{key!r}] is no setting of sa-jobs: {hint}")
            found[known[key]] = value
        return found

    def engines(self) -> list[Engine]:
        """Return all engines of the application."""
        with self._context():
            try:
                return list(self.db.engines.values())
            except RuntimeError as error:
                raise SaJobsError(
                    f"the database is not initialized on the application {self.app.name!r}: call "
                    "db.init_app(app) first"
                ) from error

    def engine(self) -> Engine:
        """Return the engine to which `db.session` sends writes to the table of the jobs."""
        tables = self.jobs.tables
        with self._context():
            try:
                bind = self.session().get_bind(mapper=tables.Job, clause=update(tables.jobs))
            except UnboundExecutionError as error:
                raise SaJobsError(
                    f"db.session has no database for the table {tables.jobs.fullname!r} ({error}): "
                    "configure one, or attach the tables to the bind that has them"
                ) from error
        return bind.engine if isinstance(bind, Connection) else bind

    def worker(self, **options: Any) -> Worker:
        """Return a worker by the settings, and by these options where they say something else."""
        settings = {name: value for name, value in self.settings.items() if name not in options}
        engine = self.engine()
        try:
            arguments = _with_listen_engine(settings | options)
            # Said here: what the worker gets is a function of ours.
            inner = arguments.get("around")
            if inner is not None and not callable(inner):
                raise WorkerOptionError(f"around must be callable, or None, not {inner!r}")
            arguments["around"] = self._around(inner)
            arguments["session_factory"] = _Sessions(self, engine)
            _let_coroutines_tear_down(self.app)
            return Worker(engine, self.jobs, **arguments)
        except (WorkerOptionError, InvalidJobError) as error:
            keys = _keys_behind(error, settings)
            if not keys:
                raise
            raise WorkerOptionError(f"app.config, {' or '.join(keys)}: {error}") from error

    def _around(self, inner: Around | None) -> Around:
        """Return what pushes the application's context around a job, and enters `inner` in it."""

        @contextmanager
        def around(job: ClaimedJob) -> Iterator[None]:
            with self.app.app_context(), inner(job) if inner is not None else nullcontext():
                yield

        return around

    def session(self) -> Session:
        """Return `db.session` of the current context, as the session that it stands for."""
        found = self.db.session
        made: Session = found() if isinstance(found, scoped_session) else found
        return made

    def is_current(self) -> bool:
        """Return whether this application's context is the current one."""
        return has_app_context() and current_app._get_current_object() is self.app  # type: ignore[attr-defined]

    def _context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.is_current() else self.app.app_context()


class _Sessions:
    """Gives a handler the session of its job's context.

    As the registry of a scoped_session does, it lets go of what a hook did with that session.
    """

    def __init__(self, application: JobsInApp, engine: Engine) -> None:
        self._application = application
        self._engine = engine

    def __call__(self) -> Session:
        # At the worker's start, when sessions are tried, no context need be there.
        inside = self._application.is_current()
        return self._application.session() if inside else Session(self._engine)

    @property
    def registry(self) -> _Sessions:
        return self

    def clear(self) -> None:
        if self._application.is_current():
            session = self._application.db.session
            # Flask-SQLAlchemy-Lite keeps a closed one, which is as good as new.
            (session.remove if isinstance(session, scoped_session) else session.close)()


def _let_coroutines_tear_down(app: Flask) -> None:
    """Let teardown functions that are coroutines run where an event loop runs already.

    Flask refuses that, and leaves out all teardown functions that come after; Flask-SQLAlchemy-Lite
    has such a one. They run on another thread meanwhile, in the same application context.
    """
    inner: Callable[[Callable[..., Any]], Callable[..., Any]] = app.ensure_sync
    if getattr(inner, "beside_a_loop", False):
        return

    def ensure_sync(function: Callable[..., Any]) -> Callable[..., Any]:
        made = inner(function)
        return made if made is function else _beside_a_loop(made)

    ensure_sync.beside_a_loop = True  # type: ignore[attr-defined]
    app.ensure_sync = ensure_sync  # type: ignore[assignment, method-assign]


def _beside_a_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return function(*args, **kwargs)
        context = contextvars.copy_context()
        with ThreadPoolExecutor(1, thread_name_prefix="sa-jobs-teardown") as thread:
            return thread.submit(context.run, function, *args, **kwargs).result()

    return call


def setting_names() -> dict[str, str]:
    """Return the keys of `app.config` that are settings, and the worker's option that each is."""
    options = [
        parameter.name
        for parameter in inspect.signature(Worker).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in _OWN_OPTIONS
    ]
    return {PREFIX + option.upper(): option for option in [*options, "listen_url"]}


def _suggestion(key: str, known: Iterable[str]) -> str:
    # Without what all of them begin with, which would make all alike.
    names = {name.removeprefix(PREFIX): name for name in known}
    close = difflib.get_close_matches(key.removeprefix(PREFIX), names, n=1)
    return f"did you mean {names[close[0]]}?" if close else f"there are {', '.join(known)}"


def _with_listen_engine(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a worker with an engine in the place of `listen_url`."""
    given = arguments.pop("listen_url", None)
    try:
        url = listen_url(given)
    except DatabaseUrlError as error:
        raise WorkerOptionError(f"listen_url cannot be used: {error}") from error
    return arguments if url is None else {"listen_engine": create_engine(url), **arguments}


def _keys_behind(error: Exception, settings: Mapping[str, Any]) -> list[str]:
    """Return the keys of the settings that an error of a worker's options is about.

    Such an error begins with the option's name; it may also be about two that do not fit together.
    """
    option = str(error).partition(" ")[0]
    keys = [PREFIX + name.upper() for name in settings if name.startswith(option)]
    return keys or [PREFIX + name.upper() for name in settings if f" {name} " in str(error)]


class _Commands(click.Group):
    """`flask jobs`: loads the commands when they are asked for, which a web server never does."""

    def __init__(self, application: JobsInApp, name: str) -> None:
        super().__init__(name=name, help="Work with the application's jobs.")
        self._application = application

    @cached_property
    def _loaded(self) -> ApplicationCommands:
        from sa_jobs.cli.application import ApplicationCommands

        return ApplicationCommands(lambda: self._application, name=self.name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._loaded.list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._loaded.get_command(ctx, cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        return self._loaded.invoke(ctx)
