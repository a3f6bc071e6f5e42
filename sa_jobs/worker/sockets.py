"""A connection's socket, as the worker holds it besides the driver."""

from __future__ import annotations

import contextlib
import os
import socket

# A peer that acknowledges nothing is found within about 25 s, whatever the kernel's defaults.
KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3
USER_TIMEOUT_MILLISECONDS = 25_000


class Socket:
    """A second descriptor of a connection's socket.

    The driver may close its own at any instant, and the number may then be another socket's.
    """

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def keep_alive(self) -> None:
        """Let the kernel look for a peer that is gone."""
        if self._socket.family not in (socket.AF_INET, socket.AF_INET6):
            return
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
            ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
            ("TCP_KEEPCNT", KEEPALIVE_PROBES),
            ("TCP_USER_TIMEOUT", USER_TIMEOUT_MILLISECONDS),
        ):
            number = getattr(socket, option, None)  # not every system has each
            if number is not None:
                self._socket.setsockopt(socket.IPPROTO_TCP, number, value)

    def shut_down(self) -> None:
        """End the connection; whoever waits for it in another thread sees that at once."""
        with contextlib.suppress(OSError):  # It has ended already.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this descriptor; the driver's own stays."""
        self._socket.close()
