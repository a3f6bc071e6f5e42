"""Processes that enqueue: jobs in one transaction with the order that they belong to.

Some transactions are rolled back on purpose, and some place an order of which another process
places a twin at about the same time, whose jobs have the same idempotency keys.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from uuid import uuid4

from sqlalchemy import Engine, create_engine, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from benchmarks.chaos.application import jobs, orders
from benchmarks.chaos.ledger import Ledger

ROOT = Path(__file__).parents[2]

# Of a hundred orders, how many have jobs of this handler.
SHARES = {
    "plain": 18,
    "coroutine": 15,
    "transactional": 20,
    "transactional_coroutine": 15,
    "fails_at_first": 7,
    "snoozes": 5,
    "hurried": 3,
    "contested": 8,
    "contested_failure": 4,
    "fails": 5,
}
ROLLED_BACK = 0.12
WITH_KEYS = 0.15
BULK = 0.05
# How many of the jobs that outlast their lease run at a time, on the average.
SLOW_AT_ONCE = 2.0
SLOW_LEASES = 1.5
SLOW_HANDLERS = ("plain", "coroutine", "transactional", "transactional_coroutine")
SECONDS = (0.002, 0.15)
# How long a name of an order with keys lasts: who places one meanwhile places its twin.
TWIN_SECONDS = 0.5

STOP_SECONDS = 30


@dataclass(frozen=True)
class Order:
    """An order to place: so many jobs of a handler, each of which takes so long."""

    name: str
    handler: str
    jobs: int
    seconds: float
    has_keys: bool
    is_rolled_back: bool


def draw(chance: random.Random, *, slow_share: float, lease: float, twin: str) -> Order:
    """Return an order at random; `twin` is the name of those that have keys."""
    if chance.random() < WITH_KEYS:
        return Order(twin, "transactional", 1, 0.05, True, chance.random() < ROLLED_BACK)
    (handler,) = chance.choices(list(SHARES), list(SHARES.values()))
    rolled_back = chance.random() < ROLLED_BACK
    if handler in SLOW_HANDLERS and chance.random() < slow_share:
        return Order(uuid4().hex, handler, 1, lease * SLOW_LEASES, False, rolled_back)
    number = 5 if chance.random() < BULK else 1
    return Order(uuid4().hex, handler, number, chance.uniform(*SECONDS), False, rolled_back)


def place(engine: Engine, ledger: Ledger, order: Order) -> None:
    """Place an order in a transaction of its own, and note what came of it."""
    token = uuid4().hex
    ledger.transaction_begins(token)
    session = Session(engine)
    ids: list[int] = []
    outcome = "rolled back"
    try:
        ids = _insert(session, token, order)
        if order.is_rolled_back:
            session.rollback()
        else:
            # Once COMMIT is sent, an error does not tell whether it was done.
            outcome = "unknown"
            session.commit()
            outcome = "committed"
    except DBAPIError:
        pass
    finally:
        with contextlib.suppress(DBAPIError):
            session.close()
    ledger.transaction_ends(token, outcome, ids)


def _insert(session: Session, token: str, order: Order) -> list[int]:
    session.execute(insert(orders).values(token=token, name=order.name, jobs=order.jobs))
    payloads = [
        {"order": order.name, "number": number, "seconds": order.seconds}
        for number in range(order.jobs)
    ]
    if order.has_keys:
        return [
            jobs.enqueue(
                session,
                order.handler,
                payload,
                idempotency_key=f"{order.name}:{payload['number']}",
            ).id
            for payload in payloads
        ]
    if len(payloads) == 1:
        return [jobs.enqueue(session, order.handler, payloads[0]).id]
    return [added.id for added in jobs.enqueue_many(session, order.handler, payloads)]


class Enqueuers:
    """So many enqueuing processes; one that was killed is started again."""

    def __init__(
        self, number: int, url: str, ledger_url: str, *, seed: str, rate: float, lease: float
    ) -> None:
        self._commands = [
            [
                *(sys.executable, "-m", __name__),
                *("--url", url),
                *("--ledger-url", ledger_url),
                *("--seed", f"{seed}/{position}"),
                *("--rate", str(rate / number)),
                *("--lease", str(lease)),
                *("--slow-share", str(SLOW_AT_ONCE / (rate * lease * SLOW_LEASES))),
            ]
            for position in range(number)
        ]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Enqueuers:
        try:
            for command in self._commands:
                self._processes.append(self._started(command))
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
        self._close()

    def _close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def kill(self, target: int) -> None:
        """Kill one in the middle of whatever it does, and start another in its place."""
        position = target % len(self._processes)
        process = self._processes[position]
        process.kill()
        process.wait()
        self._processes[position] = self._started(self._commands[position])

    def stop(self) -> list[int]:
        """Let each end its transaction, and return the exit codes."""
        for process in self._processes:
            process.terminate()
        return [process.wait(STOP_SECONDS) for process in self._processes]

    @staticmethod
    def _started(command: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Place orders until SIGTERM.")
    parser.add_argument("--url", required=True)
    parser.add_argument("--ledger-url", required=True)
    parser.add_argument("--seed", required=True)
    parser.add_argument("--rate", type=float, required=True, help="orders per second")
    parser.add_argument("--lease", type=float, required=True, help="seconds")
    parser.add_argument("--slow-share", type=float, required=True)
    given = parser.parse_args()

    ends = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ends.set())
    chance = random.Random(given.seed)
    engine = create_engine(given.url, pool_pre_ping=True)
    ledger = Ledger(given.ledger_url)
    while not ends.wait(chance.expovariate(given.rate)):
        twin = f"twin-{int(time.time() / TWIN_SECONDS)}"
        order = draw(chance, slow_share=given.slow_share, lease=given.lease, twin=twin)
        place(engine, ledger, order)


if __name__ == "__main__":
    main()
