"""The servers' log: which of its errors the faults explain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

DEADLOCK = "40P01"

# As `database.SETTINGS` has it written: time, [pid], SQLSTATE, and of sessions user@database name.
_LINE = re.compile(
    r"^\S+ \S+ \S+ \[\d+\] (?P<state>\w{5}) (?P<session>.*?)"
    r"(?P<level>ERROR|FATAL|PANIC):  (?P<message>.*)$"
)

EXPECTED = {
    "57P01": "the sessions were ended, the server was stopped, or the standby was promoted",
    "57P02": "the server crashed: immediate restart, or the primary of a failover",
    "57P03": "somebody connected while the server started or stopped",
    "25006": "somebody wrote to the standby before it was promoted",
    "08006": "a connection was lost: a process was killed, the proxy cut it, or the primary died",
}
"""The SQLSTATEs of errors that the faults bring about, and by what."""

# A worker gives up a statement on which no answer comes, and has the server cancel it. And so a
# server calls it that is stopped while it authenticates a client.
_UNAUTHENTICATED = "canceling authentication due to timeout"
_CANCELLED, _WORKER = "57014", re.compile(r"\S+@\S+ sa-jobs \w+$")


@dataclass(frozen=True)
class Entry:
    """An ERROR, FATAL or PANIC line; `session` is empty for the server's own processes."""

    state: str
    session: str
    level: str
    message: str

    @property
    def is_expected(self) -> bool:
        """Whether a fault explains it."""
        if self.level == "PANIC":
            return False
        if self.state == _CANCELLED:
            return self.message == _UNAUTHENTICATED or _WORKER.match(self.session) is not None
        return self.state in EXPECTED


def entries(log: str) -> Iterator[Entry]:
    """Yield the errors of a log."""
    for line in log.splitlines():
        found = _LINE.match(line)
        if found is not None:
            yield Entry(found["state"], found["session"].strip(), found["level"], found["message"])


def unexpected(log: str) -> list[Entry]:
    """Return the errors that no fault explains, but for deadlocks, which are counted apart."""
    return [entry for entry in entries(log) if not entry.is_expected and entry.state != DEADLOCK]


def deadlocks(log: str) -> list[Entry]:
    """Return the deadlocks."""
    return [entry for entry in entries(log) if entry.state == DEADLOCK]
