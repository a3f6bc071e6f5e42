"""PgBouncer in front of a server, from the system's package."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from sqlalchemy.engine import make_url

from tests.support.postgres import free_port, give_away, temporary_root, unprivileged
from tests.support.waiting import wait_until

PoolMode = Literal["session", "transaction", "statement"]

# Beside where a shell of root's looks, since Debian puts it among the programs of administrators.
PROGRAM = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")

MISSING = "there is no pgbouncer: install the package of this name"


class PgBouncer:
    """Pools connections to the server of a URL, until the end of the `with` block.

    All clients share `pool_size` connections. The port stays the same over restarts.
    """

    def __init__(
        self,
        database_url: str,
        pool_mode: PoolMode = "transaction",
        *,
        pool_size: int = 4,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._url = make_url(database_url)
        self._settings = {
            "pool_mode": pool_mode,
            "default_pool_size": str(pool_size),
            "listen_addr": "127.0.0.1",
            "auth_type": "trust",
            "auth_file": "users",
            "unix_socket_dir": "",
            "max_client_conn": "200",
            # A server that restarts is tried again at once.
            "server_login_retry": "1",
            **(settings or {}),
        }
        self._port = 0
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> PgBouncer:
        self._directory = Path(tempfile.mkdtemp(prefix="sa-jobs-pool-", dir=temporary_root()))
        give_away(self._directory)
        self._port = free_port()
        url = self._url
        # Users come in without a password, and go on with the one in the URL.
        (self._directory / "users").write_text(f'"{url.username}" "{url.password or ""}"\n')
        lines = [
            "[databases]",
            f"* = host={url.host} port={url.port or 5432}",
            "[pgbouncer]",
            f"listen_port = {self._port}",
            *(f"{name} = {value}" for name, value in self._settings.items()),
        ]
        (self._directory / "pgbouncer.ini").write_text("\n".join(lines) + "\n")
        try:
            self.start()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def url(self) -> str:
        """The URL of the same database, by way of the pool."""
        through = self._url.set(host="127.0.0.1", port=self._port, password=None)
        return through.render_as_string(hide_password=False)

    @property
    def log(self) -> str:
        """What PgBouncer has logged so far."""
        assert self._directory is not None
        return (self._directory / "log").read_text(errors="replace")

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        assert PROGRAM is not None, MISSING
        assert self._directory is not None
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "pgbouncer.ini"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                start_new_session=True,
                **unprivileged(),
            )
        wait_until(self._answers, "PgBouncer takes connections")

    def kill(self) -> None:
        """Let it die; every connection through it is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"PgBouncer ended; its log:\n{self.log}"
        try:
            socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def _close(self) -> None:
        self.kill()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
