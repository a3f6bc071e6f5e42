"""A streaming standby of a private cluster, which can take its place."""

from __future__ import annotations

import time
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

from tests.support.postgres import Cluster

NAME = "standby"

SYNCHRONOUS_SECONDS = 60
PROMOTION_SECONDS = 60


class Standby(Cluster):
    """A copy of a running cluster that follows it, until it is promoted and is a primary itself.

    Entering the `with` block copies the primary's data and starts to follow. `bin_directory` and
    the settings must be those of the primary.
    """

    def __init__(self, bin_directory: Path, primary: Cluster) -> None:
        super().__init__(bin_directory, settings=primary.settings)
        self._primary = primary

    def make_synchronous(self) -> None:
        """Let the primary acknowledge a commit only when this standby has it too."""
        self._primary.configure(synchronous_standby_names=NAME)
        self._wait_for(
            self._primary,
            "SELECT count(*) = 1 FROM pg_stat_replication"
            f" WHERE application_name = '{NAME}' AND sync_state = 'sync' AND state = 'streaming'",
            SYNCHRONOUS_SECONDS,
        )

    def promote(self) -> None:
        """Make it a primary, which nobody follows, and wait until it takes writes."""
        with _connect(self) as connection:
            connection.execute(f"SELECT pg_promote(wait_seconds => {PROMOTION_SECONDS})")
        self._wait_for(self, "SELECT NOT pg_is_in_recovery()", PROMOTION_SECONDS)

    def _make_data(self) -> None:
        self._run_program(
            "pg_basebackup",
            f"--pgdata={self.data_directory}",
            "--host=127.0.0.1",
            f"--port={self._primary.port}",
            "--username=postgres",
            "--wal-method=stream",
            "--checkpoint=fast",
            "--no-sync",
        )
        (self.data_directory / "standby.signal").touch()
        self._write_settings(
            {
                "primary_conninfo": (
                    f"host=127.0.0.1 port={self._primary.port} user=postgres"
                    f" application_name={NAME}"
                ),
                # A primary that was restarted waits with its commits for the standby.
                "wal_retrieve_retry_interval": "200ms",
                # Copied from the primary; once promoted it would wait for a standby of its own.
                "synchronous_standby_names": "",
            }
        )

    @staticmethod
    def _wait_for(cluster: Cluster, question: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        with _connect(cluster) as connection:
            while connection.execute(question).fetchone() != (True,):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not within {seconds:g} s: {question}; {cluster.log()}")
                time.sleep(0.02)


def _connect(cluster: Cluster) -> psycopg.Connection[tuple[object, ...]]:
    url = make_url(cluster.url()).set(drivername="postgresql")
    return psycopg.connect(url.render_as_string(hide_password=False), autocommit=True)
