"""What each kind of fault does, and the times at which a schedule has it done."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import psycopg
from sqlalchemy import NullPool, create_engine, select
from sqlalchemy.exc import DBAPIError

from benchmarks.chaos.application import POISON, jobs
from benchmarks.chaos.database import Database
from benchmarks.chaos.enqueuers import Enqueuers, Order, place
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.schedule import Fault
from sa_jobs.models import DEFAULT_TABLES
from tests.support.faults import hold_snapshot, kill_backends

_jobs = DEFAULT_TABLES.jobs

DELAY_SECONDS = 0.1
# Jobs that one burst of cancels and retries takes on at a time.
_AT_ONCE = 5
# Who retries a job that kills its worker would have it kill two more.
_RETRIED = ("fails", "contested", "contested_failure", "plain", "transactional", "coroutine")


class Faults:
    """Does to the processes and servers of a run what its schedule says, when it says so."""

    def __init__(
        self,
        database: Database,
        fleet: Fleet,
        enqueuers: Enqueuers,
        ledger: Ledger,
        tell: Callable[[str], None],
    ) -> None:
        self._database = database
        self._fleet = fleet
        self._enqueuers = enqueuers
        self._ledger = ledger
        self._tell = tell
        self._threads: list[threading.Thread] = []
        self._ends = threading.Event()
        self.done: Counter[str] = Counter()
        self.errors: list[str] = []

    def run(self, schedule: Sequence[Fault], seconds: float) -> None:
        """Follow the schedule for so many seconds, and wait until each fault is over.

        It ends early when workers die by themselves again and again.
        """
        began = time.monotonic()
        try:
            for fault in schedule:
                if self._wait(began + fault.at):
                    return
                # They overlap: one that lasts must not hold up the next.
                thread = threading.Thread(target=self._do, args=(fault,), name=fault.kind)
                self._threads.append(thread)
                thread.start()
            self._wait(began + seconds)
        finally:
            self._ends.set()
            for thread in self._threads:
                thread.join()

    def _wait(self, until: float) -> bool:
        """Wait, and return whether there is no point in going on."""
        while (left := until - time.monotonic()) > 0:
            if self._fleet.exhausted or self.errors:
                return True
            time.sleep(min(left, 0.2))
        return False

    def _do(self, fault: Fault) -> None:
        target = f" {fault.target}" if fault.kind.endswith("worker") else ""
        client = f" {fault.client}" if fault.kind in ("cut", "silence", "end sessions") else ""
        lasts = f" for {fault.seconds:.1f} s" if fault.seconds else ""
        self._tell(f"{fault.kind}{target}{client}{lasts}")
        try:
            self._act(fault)
            self.done[fault.kind] += 1
        except (DBAPIError, psycopg.Error):
            # The database was away at that moment.
            self.done[f"{fault.kind}, in vain"] += 1
        except Exception as error:
            self.errors.append(f"{fault.kind}: {type(error).__name__}: {error}")

    def _act(self, fault: Fault) -> None:
        database, fleet = self._database, self._fleet
        actions: dict[str, Callable[[], object]] = {
            "kill worker": lambda: fleet.kill(fault.target),
            "freeze worker": lambda: fleet.freeze(
                fault.target, lambda: self._ends.wait(fault.seconds)
            ),
            "drain worker": lambda: fleet.drain(fault.target),
            "kill enqueuer": lambda: self._enqueuers.kill(fault.target),
            "poison job": self._poison,
            "cancels and retries": lambda: self._cancel_and_retry(fault.seconds),
            "end sessions": lambda: kill_backends(database.direct_url, fault.client),
            "cut": lambda: database.proxy.cut(fault.client),
            "silence": lambda: database.proxy.silence(fault.client),
            "delay": lambda: database.delay(DELAY_SECONDS, fault.seconds),
            "refuse": lambda: database.refuse(fault.seconds),
            "held snapshot": lambda: self._hold_snapshot(fault.seconds),
            "fast restart": lambda: database.restart("fast", fault.seconds),
            "immediate restart": lambda: database.restart("immediate", fault.seconds),
            "failover": lambda: database.fail_over(fault.seconds),
        }
        actions[fault.kind]()

    def _poison(self) -> None:
        engine = create_engine(self._database.direct_url, poolclass=NullPool)
        order = Order(f"poison-{time.time_ns()}", POISON, 1, 0.0, False, False)
        place(engine, self._ledger, order)

    def _hold_snapshot(self, seconds: float) -> None:
        with hold_snapshot(self._database.direct_url):
            self._ends.wait(seconds)

    def _cancel_and_retry(self, seconds: float) -> None:
        """Cancel jobs that run or wait, and retry those that are cancelled or dead."""
        engine = create_engine(self._database.direct_url, poolclass=NullPool)
        until = time.monotonic() + seconds
        lives = select(_jobs.c.id).where(_jobs.c.status.in_(("ready", "running")))
        ended = select(_jobs.c.id).where(
            _jobs.c.status.in_(("cancelled", "dead")), _jobs.c.handler.in_(_RETRIED)
        )
        while time.monotonic() < until:
            for statement, what, act in (
                (lives, "cancel", jobs.cancel),
                (ended, "retry", jobs.retry),
            ):
                with engine.connect() as connection:
                    newest = statement.order_by(_jobs.c.updated_at.desc()).limit(_AT_ONCE)
                    ids = list(connection.scalars(newest))
                for job_id in ids:
                    self._ledger.request(job_id, what)
                    with engine.begin() as connection:
                        act(connection, job_id)
            time.sleep(0.02)
