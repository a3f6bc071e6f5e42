"""One worker process, as its supervisor sees it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence

from sa_jobs.supervisor.lifeline import AT_ONCE, GRACE, SERVES, VARIABLE
from sa_jobs.worker.interruptions import STOP_SIGNALS

_GRACE = re.compile(GRACE + rb"(.+)\n")


class Child:
    """A process that runs `command`, with a lifeline; raises OSError if it cannot be started.

    It is a new program, not a fork of this one, so that it shares no socket, lock or thread with
    anybody, and runs the code that is installed when it starts.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self.lifeline, theirs = socket.socketpair()
        try:
            self.lifeline.setblocking(False)
            # Blocked until it has handlers for them: none is lost, and none ends it half-way.
            with _blocked_signals():
                self._process = subprocess.Popen(
                    command,
                    env={**os.environ, VARIABLE: str(theirs.fileno())},
                    pass_fds=[theirs.fileno()],
                )
        except BaseException:
            self.lifeline.close()
            raise
        finally:
            theirs.close()
        self.started_at = time.monotonic()
        self.has_served = False
        # How many seconds its drain may take, when it has said so.
        self.grace: float | None = None
        self._said = b""

    @property
    def pid(self) -> int:
        """The process id, which is nobody else's until `ended()`."""
        return self._process.pid

    def listen(self) -> bool:
        """Read what it says, and return whether it may say more."""
        try:
            while said := self.lifeline.recv(64):
                self._said += said
                self.has_served = self.has_served or SERVES in said
                if found := _GRACE.search(self._said):
                    self.grace = float(found[1])
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def drain(self) -> None:
        """Ask it to drain."""
        os.kill(self.pid, signal.SIGTERM)

    def end_at_once(self) -> None:
        """Ask it to end at once."""
        with contextlib.suppress(OSError):
            self.lifeline.send(AT_ONCE)

    def kill(self) -> None:
        """End it; it can do nothing about that."""
        os.kill(self.pid, signal.SIGKILL)

    def ended(self, code: int) -> None:
        """Note how it ended: its exit code, or the number of a signal, negative."""
        self.listen()
        self.lifeline.close()
        self._process.returncode = code


def how_it_ended(code: int) -> str:
    """Return how a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (unless somebody sent it, memory ran out)" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
