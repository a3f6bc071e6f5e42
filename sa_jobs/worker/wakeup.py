"""Wake-ups: a LISTEN connection that tells the control loop when a job may have become ready.

A hint only. Polling stays correct without it, and finds what a lost notification meant.
"""

from __future__ import annotations

import hashlib
import selectors
import socket
from typing import Any

from sa_jobs import presence
from sa_jobs.models import Tables
from sa_jobs.worker.healing import HealingThread
from sa_jobs.worker.links import Link
from sa_jobs.worker.recovery import LONGEST_DELAY_SECONDS
from sa_jobs.worker.running import Mailbox, Woken


class Wakeup(HealingThread):
    """Listens for notifications of the worker's queues, and posts one wake-up for each burst.

    A connection that is quiet for `probe` seconds is asked whether it still lives, since a
    half-open one is quiet too.
    """

    def __init__(
        self, link: Link, mailbox: Mailbox, queues: list[str], tables: Tables, *, probe: float
    ) -> None:
        super().__init__("listen", link, mailbox, longest_wait=LONGEST_DELAY_SECONDS)
        self._hashes = {
            hashlib.sha256(queue.encode()).hexdigest()[: presence.HASH_LENGTH] for queue in queues
        }
        self._tables = tables
        self._probe = probe
        # Lets end() interrupt the wait for the database's socket.
        self._interrupt, self._interrupted = socket.socketpair()

    def ask_to_end(self) -> None:
        """Ask the thread to stop; returns at once."""
        super().ask_to_end()
        self._interrupt.send(b"x")

    def end(self) -> None:
        """Stop listening, and close the connection."""
        super().end()
        self._interrupt.close()
        self._interrupted.close()

    def step(self) -> float:
        """Listen until the connection is lost or the end."""
        connection = self._link.connection()
        driver: Any = connection.connection.driver_connection
        # Notifications that come with the answer to a statement go to handlers alone.
        driver.add_notify_handler(lambda notify: self._heard(notify.payload))
        presence.listen(connection, self._tables)
        self.works()
        # What was enqueued before this LISTEN has sent its notification to nobody.
        self._mailbox.put(Woken())
        # Not select(), which takes no descriptor above 1023.
        with selectors.DefaultSelector() as selector:
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._interrupted, selectors.EVENT_READ)
            while not self._ended.is_set():
                if not selector.select(self._probe):
                    presence.probe(connection)
                    continue
                driver.pgconn.consume_input()
                while (notify := driver.pgconn.notifies()) is not None:
                    self._heard(notify.extra.decode())
        return 0.0

    def _heard(self, queue_hash: str) -> None:
        if queue_hash in self._hashes:
            self._mailbox.put(Woken())
