"""The database: a primary and its synchronous standby, behind a proxy that all clients use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from sqlalchemy import create_engine
from sqlalchemy.engine import make_url

from benchmarks.chaos import application
from sa_jobs import migrations
from tests.support.postgres import Cluster, StopMode
from tests.support.proxy import Proxy
from tests.support.standby import Standby

NAME = "chaos"
SETTINGS = {
    # With the SQLSTATE, by which the log is judged.
    "log_line_prefix": "%m [%p] %e %q%u@%d %a ",
    # What a standby that was away for a while must still find.
    "wal_keep_size": "1GB",
}


class Database:
    """The servers, for the `with` block; `outages` are the times in which clients had none.

    Only one fault of the whole database is under way at a time: another waits for its end.
    """

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._primary: Cluster = Cluster(programs, settings=SETTINGS)
        self._standby: Standby | None = None
        self._lock = threading.Lock()
        self._logs: list[str] = []
        self.outages: list[tuple[float, float]] = []
        self.failovers = 0

    def __enter__(self) -> Database:
        self._primary.__enter__()
        try:
            self._primary.create_database(NAME)
            engine = create_engine(self.direct_url)
            migrations.apply(engine)
            application.metadata.create_all(engine)
            engine.dispose()
            self._follow()
            self.proxy = Proxy(self.direct_url)
            self.proxy.__enter__()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.proxy.__exit__(kind, error, trace)
        # Not in the middle of a failover.
        with self._lock:
            self._close()

    @property
    def direct_url(self) -> str:
        """The URL of the database on the primary, past the proxy."""
        return self._primary.url(NAME)

    def url(self, application_name: str) -> str:
        """Return the URL that clients use, by way of the proxy."""
        url = make_url(self.proxy.url).update_query_dict({"application_name": application_name})
        return url.render_as_string(hide_password=False)

    def log(self) -> str:
        """Return the log of every server there was, so far."""
        servers = [self._primary, *([self._standby] if self._standby else [])]
        return "".join([*self._logs, *(server.log() for server in servers)])

    def restart(self, mode: StopMode, seconds: float) -> None:
        """Restart the primary, and leave it down for a while."""
        with self._lock, self._outage():
            self._primary.stop(mode)
            time.sleep(seconds)
            self._primary.start()

    def fail_over(self, seconds: float) -> None:
        """Let the primary die, and the standby take its place; then make it a standby.

        For so many seconds the clients meet the standby while it takes no writes.
        """
        with self._lock:
            standby = self._standby
            assert standby is not None
            with self._outage():
                self.proxy.direct_to(standby.url(NAME))
                self._primary.stop("immediate")
                self.proxy.cut()
                time.sleep(seconds)
                standby.promote()
            self._logs.append(self._primary.log())
            self._primary.close()
            self._primary, self._standby = standby, None
            self.failovers += 1
            self._follow()

    def refuse(self, seconds: float) -> None:
        """Cut all connections, and take no new ones for a while."""
        with self._lock, self._outage():
            self.proxy.refuse()
            self.proxy.cut()
            time.sleep(seconds)
            self.proxy.refuse(False)

    def delay(self, each: float, seconds: float) -> None:
        """Hold back every answer by so many seconds, for a while."""
        with self._lock:
            self.proxy.delay_seconds = each
            time.sleep(seconds)
            self.proxy.delay_seconds = 0.0

    def _follow(self) -> None:
        standby = Standby(self._programs, self._primary)
        standby.__enter__()
        # Known before it can fail, so that it is closed.
        self._standby = standby
        standby.make_synchronous()

    @contextmanager
    def _outage(self) -> Iterator[None]:
        began = time.time()
        try:
            yield
        finally:
            self.outages.append((began, time.time()))

    def _close(self) -> None:
        for server in (self._standby, self._primary):
            if server is not None:
                server.close()
