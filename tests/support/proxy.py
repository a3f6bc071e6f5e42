"""A TCP proxy in front of a server that can cut connections, go silent, and be slow.

It runs on threads of its own and listens on 127.0.0.1. Silence is the worst of the three: the
proxy's own kernel goes on to acknowledge what it is sent, as a NAT does that lost a connection's
other half, so that neither keepalives nor TCP_USER_TIMEOUT notice.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType

from sqlalchemy.engine import make_url

_CHUNK = 1 << 16
_LOOK_SECONDS = 0.2


class Proxy:
    """Forwards connections to the server of a URL, until the end of the `with` block.

    Methods that take `having` act on the connections on which the client has sent this text, as an
    application name; without it, on all.
    """

    def __init__(self, database_url: str) -> None:
        self._url = make_url(database_url)
        self._server = (str(self._url.host), int(self._url.port or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._connections: list[_Connection] = []
        self._refusing = False
        self._closed = threading.Event()
        self.delay_seconds = 0.0
        """How long each piece of what the server answers is held back."""

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        _shut_down(self._listener)
        self.cut()

    @property
    def url(self) -> str:
        """The URL of the same database, by way of this proxy."""
        port = self._listener.getsockname()[1]
        through = self._url.set(host="127.0.0.1", port=port)
        return through.render_as_string(hide_password=False)

    def direct_to(self, database_url: str) -> None:
        """Take new connections to another server; those that there are stay where they are."""
        url = make_url(database_url)
        self._server = (str(url.host), int(url.port or 5432))

    def cut(self, having: str = "") -> int:
        """Reset connections, on both sides, and return how many."""
        return self._apply(_Connection.cut, having)

    def silence(self, having: str = "") -> int:
        """Swallow from now on what either side of the connections sends; return how many."""
        return self._apply(_Connection.silence, having)

    def refuse(self, refusing: bool = True) -> None:
        """Reset every new connection at once, or take them again."""
        self._refusing = refusing

    def count(self, having: str = "") -> int:
        """Return how many connections are open and not silenced."""
        return len([c for c in self._having(having) if not c.silent])

    def _apply(self, action: Callable[[_Connection], None], having: str) -> int:
        chosen = self._having(having)
        for connection in chosen:
            action(connection)
        return len(chosen)

    def _having(self, text: str) -> list[_Connection]:
        with self._lock:
            self._connections = [c for c in self._connections if not c.ended.is_set()]
            return [c for c in self._connections if text.encode() in c.sent]

    def _accept(self) -> None:
        with self._listener:
            self._accept_all()

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self._refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._server, timeout=10)
            except OSError:
                _reset(client)
                continue
            connection = _Connection(self, client, server)
            with self._lock:
                self._connections.append(connection)
            threading.Thread(target=connection.run, name="proxied", daemon=True).start()


class _Connection:
    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self.sent = b""
        self.silent = False
        self.ended = threading.Event()

    def cut(self) -> None:
        # Closed by their own thread alone: another socket may get the number of one that is closed,
        # and a thread that still reads from it would take that one's data.
        self.ended.set()
        for side in (self._client, self._server):
            _shut_down(side)

    def silence(self) -> None:
        self.silent = True

    def run(self) -> None:
        try:
            for side in (self._client, self._server):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with selectors.DefaultSelector() as selector:
                selector.register(self._client, selectors.EVENT_READ, self._server)
                selector.register(self._server, selectors.EVENT_READ, self._client)
                while not self.ended.is_set():
                    for key, _ in selector.select(_LOOK_SECONDS):
                        if not self._forward(key.fileobj, key.data):
                            return
        except (OSError, ValueError):
            pass  # One side is gone, or was cut.
        finally:
            self.ended.set()
            for side in (self._client, self._server):
                _reset(side)

    def _forward(self, source: object, target: socket.socket) -> bool:
        assert isinstance(source, socket.socket)
        piece = source.recv(_CHUNK)
        if source is self._client:
            if len(self.sent) < _CHUNK:  # Enough to tell the connections apart.
                self.sent += piece
        elif self._proxy.delay_seconds:
            time.sleep(self._proxy.delay_seconds)
        if self.silent:
            if not piece:
                # This side has given up; the other is not told.
                self.ended.wait(_LOOK_SECONDS)
            return True
        if not piece:
            return False
        target.sendall(piece)
        return True


def _reset(side: socket.socket) -> None:
    try:
        side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        side.close()
    except OSError:
        pass


def _shut_down(side: socket.socket) -> None:
    with contextlib.suppress(OSError):
        side.shutdown(socket.SHUT_RDWR)
