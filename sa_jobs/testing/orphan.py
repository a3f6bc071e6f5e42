"""Run as a script beside a server: stops it if whoever started both ends without doing so.

It knows that by the end of its standard input. Nothing but the standard library is imported, so
that it starts at once.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

STOPPED = b"stopped"
WAIT_SECONDS = 30.0


def main(pid: int, directory: str) -> None:
    """Wait for standard input to end; unless by STOPPED, stop the server and remove its files."""
    if sys.stdin.buffer.read() == STOPPED:
        return
    try:
        os.kill(pid, signal.SIGQUIT)
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.05)
    except ProcessLookupError:
        pass
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
