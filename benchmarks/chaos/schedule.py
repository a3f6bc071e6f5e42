"""Which fault comes when: pure, so that the same seed gives the same schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass

ROLES = ("claim", "heartbeat", "sweep", "listen")
"""The roles of a worker's own connections."""

OWN_CLIENTS = tuple(f"sa-jobs {role}" for role in ROLES)
CLIENTS = (*OWN_CLIENTS, "chaos handler", "chaos enqueuer")
"""The application names that sessions are picked by."""

# How often each comes, against the others.
WEIGHTS = {
    "kill worker": 6,
    "freeze worker": 3,
    "drain worker": 3,
    "kill enqueuer": 1,
    "poison job": 1,
    "cancels and retries": 3,
    "end sessions": 5,
    "cut": 3,
    "silence": 2,
    "delay": 2,
    "refuse": 2,
    "held snapshot": 1,
    "fast restart": 2,
    "immediate restart": 2,
    "failover": 2,
}
KINDS = tuple(WEIGHTS)

# Of these there is one at a time, and then the rest gets some seconds to heal.
_OF_THE_DATABASE = ("delay", "refuse", "fast restart", "immediate restart", "failover")
_LULL_SECONDS = 2.5

_GAP_SECONDS = (0.4, 3.0)
_SECONDS = {
    "cancels and retries": (1.0, 2.0),
    "delay": (2.0, 4.0),
    "refuse": (1.0, 3.0),
    "held snapshot": (4.0, 10.0),
    "fast restart": (0.0, 1.0),
    "immediate restart": (0.0, 1.0),
    # For how long the clients meet a server that takes no writes.
    "failover": (0.5, 1.5),
}
# In leases: the worker must have lost its jobs when it goes on.
_FREEZE_LEASES = (1.3, 1.8)
_MINUTES_PER_FAILOVER = 2.0


@dataclass(frozen=True)
class Fault:
    """One fault: when it begins, after so many seconds, and how long it lasts.

    `target` is the number of a process, `client` the application name of sessions.
    """

    at: float
    kind: str
    seconds: float
    target: int
    client: str


def schedule(
    seed: str,
    seconds: float,
    *,
    workers: int,
    lease: float,
    kinds: tuple[str, ...] = KINDS,
) -> list[Fault]:
    """Return the faults of a run, in the order of their times; all are over when the run is.

    Every kind comes once before any comes again, so far as the time goes. At least one worker is
    never frozen; and there are no more than a few failovers, since each makes a new standby.
    """
    chance = random.Random(f"{seed}/{seconds:g}/{workers}/{lease:g}/{','.join(kinds)}")
    failovers = max(1, int(seconds / 60 / _MINUTES_PER_FAILOVER))
    first = list(kinds)
    chance.shuffle(first)
    faults: list[Fault] = []
    frozen_until = [0.0] * workers
    calm_at = 0.0
    now = 0.0
    while (now := now + chance.uniform(*_GAP_SECONDS)) < seconds:
        kind = first.pop(0) if first else _draw(chance, kinds)
        target = chance.randrange(workers)
        # How long others wait for an answer that does not come is for the application to say.
        client = chance.choice(OWN_CLIENTS if kind == "silence" else CLIENTS)
        lasts = chance.uniform(*_SECONDS.get(kind, (0.0, 0.0)))
        at = now
        if kind in _OF_THE_DATABASE:
            at = max(now, calm_at)
        elif kind == "freeze worker":
            lasts = lease * chance.uniform(*_FREEZE_LEASES)
            if sum(until > at for until in frozen_until) >= workers - 1:
                continue
            while frozen_until[target] > at:
                target = (target + 1) % workers
        if at + lasts > seconds or (kind == "failover" and not failovers):
            continue
        if kind in _OF_THE_DATABASE:
            calm_at = at + lasts + _LULL_SECONDS
            failovers -= kind == "failover"
        elif kind == "freeze worker":
            frozen_until[target] = at + lasts
        faults.append(Fault(round(at, 3), kind, round(lasts, 3), target, client))
    return sorted(faults, key=lambda fault: fault.at)


def _draw(chance: random.Random, kinds: tuple[str, ...]) -> str:
    (kind,) = chance.choices(kinds, [WEIGHTS[kind] for kind in kinds])
    return kind
