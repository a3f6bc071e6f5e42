"""Wake-ups: a LISTEN connection that tells the control loop when a job may have become ready.

A hint only. Polling stays correct without it, and finds what a lost notification meant.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import secrets
import selectors
import socket
import time
from typing import Any

from sqlalchemy import Connection

from sa_jobs import poolers, presence
from sa_jobs.errors import WorkerError
from sa_jobs.models import Tables
from sa_jobs.worker.gates import AGAIN_SECONDS, Gates
from sa_jobs.worker.healing import HealingThread
from sa_jobs.worker.links import Link
from sa_jobs.worker.recovery import LONGEST_DELAY_SECONDS
from sa_jobs.worker.running import GatesOpened, GatesShut, Listening, Mailbox, Woken

logger = logging.getLogger("sa_jobs.worker")

# How long the connection may be silent after the worker has sent a notification to itself.
ECHO_SECONDS = 10.0
# Between two lines that say how often LISTEN was sent.
COUNTED_APART_SECONDS = 60.0


class Wakeup(HealingThread):
    """Listens for notifications of the worker's queues, and posts a wake-up for each.

    Its connection holds the gates open, through which enqueues notify: from when the worker goes to
    sleep until there are too many notifications.

    The first time, it sends one to itself, through `sender`, on a connection such as enqueuers
    have. If that does not arrive, or cannot, as through a transaction pooler, it says so once and
    ends: the worker polls. So it does where the server refuses it for too long, as under a wrong
    password in a URL that is for LISTEN alone. The control loop is told when it has arrived. A
    connection that is quiet for `probe` seconds is asked whether it still lives, since a half-open
    one is quiet too.
    """

    def __init__(
        self,
        link: Link,
        sender: Link,
        mailbox: Mailbox,
        queues: list[str],
        tables: Tables,
        *,
        probe: float,
    ) -> None:
        super().__init__("listen", link, mailbox, longest_wait=LONGEST_DELAY_SECONDS)
        self._sender = sender
        self._hashes = {
            hashlib.sha256(queue.encode()).hexdigest()[: presence.HASH_LENGTH] for queue in queues
        }
        self._tables = tables
        self._gates = Gates(queues, tables)
        self._asked_to_open = False
        self._too_many = False
        self._probe = probe
        self._channel = ""
        self._echo = f"echo {secrets.token_hex(8)}"
        self._echoed = False
        self._counted_at = 0.0
        self.subscriptions = 0
        """How often LISTEN was sent; each time after the first, a connection had been lost."""
        # Ends the wait for the database's socket; one byte does.
        self._interrupt, self._interrupted = socket.socketpair()
        self._interrupt.setblocking(False)
        self._interrupted.setblocking(False)

    def open_gates(self) -> None:
        """Ask the thread to open the gates, as far as they are shut; returns at once."""
        self._asked_to_open = True
        self._stop_waiting()

    def ask_to_end(self) -> None:
        """Ask the thread to stop; returns at once."""
        super().ask_to_end()
        self._stop_waiting()

    def end(self) -> None:
        """Stop listening, and close the connection."""
        super().end()
        self._sender.close()
        self._interrupt.close()
        self._interrupted.close()

    def step(self) -> float:
        """Listen until the connection is lost or the end; or end where nothing would arrive."""
        connection = self._link.connection()
        driver: Any = connection.connection.driver_connection
        # Notifications that come with the answer to a statement go to handlers alone.
        driver.add_notify_handler(lambda notify: self._heard(notify.payload))
        if self._echoed:
            self._subscribe(connection)
        elif not self._try_to_subscribe(connection):
            return self._give_up("its connection is shared by a pooler in transaction mode")
        # Not select(), which takes no descriptor above 1023.
        with selectors.DefaultSelector() as selector:
            selector.register(driver.fileno(), selectors.EVENT_READ)
            selector.register(self._interrupted, selectors.EVENT_READ)
            while not self._ended.is_set():
                if not selector.select(self._patience()):
                    if self._gates.relies:
                        self._asked_to_open = True
                    else:
                        # Whether it lives comes first; an echo that comes with the answer counts.
                        presence.probe(connection)
                    if not self._echoed:
                        return self._give_up("a notification to itself has not arrived")
                with contextlib.suppress(BlockingIOError):
                    self._interrupted.recv(4096)
                driver.pgconn.consume_input()
                while (notify := driver.pgconn.notifies()) is not None:
                    self._heard(notify.extra.decode())
                if not self._ended.is_set():
                    self._work_the_gates(connection)
        return 0.0

    def _patience(self) -> float:
        if not self._echoed:
            return ECHO_SECONDS
        return min(self._probe, AGAIN_SECONDS) if self._gates.relies else self._probe

    def _work_the_gates(self, connection: Connection) -> None:
        if self._too_many:
            self._too_many = False
            self._gates.shut(connection)
            # Whatever was asked for before: the worker looks for jobs, and then asks again.
            self._asked_to_open = False
            self._mailbox.put(GatesShut())
        elif self._asked_to_open:
            self._asked_to_open = False
            if self._gates.open(connection):
                self._mailbox.put(GatesOpened())

    def gave_up(self, error: WorkerError) -> None:
        """Say that the worker polls from now on: it ends for no lack of a hint."""
        self._give_up(f"{error} if it is to listen again")

    def _try_to_subscribe(self, connection: Connection) -> bool:
        """Listen and send the echo, unless the connection is one that others get, too."""
        try:
            sender = self._sender.connection()
            # Before LISTEN is sent, which would stay behind in the pool.
            if poolers.is_shared(connection, sender):
                return False
            # By the sender: what is listened to may be another database by mistake.
            self._channel = presence.channel_name(sender, self._tables)
            self._subscribe(connection)
            presence.notify(sender, self._channel, self._echo)
        finally:
            self._sender.drop()
        return True

    def _subscribe(self, connection: Connection) -> None:
        self._gates.forget()
        presence.listen(connection, self._channel)
        self.works()
        self.subscriptions += 1
        now = time.monotonic()
        if self.subscriptions > 1 and now - self._counted_at > COUNTED_APART_SECONDS:
            self._counted_at = now
            logger.info("listen: subscribed anew, %d times so far", self.subscriptions - 1)
        # What was enqueued before this LISTEN has sent its notification to nobody.
        self._mailbox.put(GatesShut())

    def _heard(self, payload: str) -> None:
        if payload == self._echo:
            self._echoed = True
            self._mailbox.put(Listening())
        elif payload in self._hashes:
            self._too_many |= self._gates.heard_too_many(time.monotonic())
            self._mailbox.put(Woken())

    def _stop_waiting(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._interrupt.send(b"x")

    def _give_up(self, reason: str) -> float:
        logger.warning(
            "listen: no enqueue wakes this worker, since %s: it polls instead; to be woken, give "
            "it a direct URL by --listen-url, SA_JOBS_LISTEN_URL or Worker(listen_engine=)",
            reason,
        )
        self._ended.set()
        return 0.0
