"""The shop's HTTP server, as a process: prints its port, and serves until SIGTERM."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

from werkzeug.serving import make_server

from sa_jobs.demo.shop import create_app
from sa_jobs.urls import database_url


def main() -> None:
    """Serve the shop of the database that the environment names, on a free port."""
    signal.signal(signal.SIGTERM, _end)
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = make_server("127.0.0.1", 0, create_app(database_url(None)), threaded=True)
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
