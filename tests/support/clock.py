"""Processes whose clock is wrong, by way of the system's libfaketime, where it is installed."""

from __future__ import annotations

from pathlib import Path

_ON_PATH = Path(__file__).with_name("shifted")


def library() -> Path | None:
    """Return the library that shifts a process's clock, None if it is not installed."""
    # The one for programs with threads.
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return found[0] if found else None


def shifted_by(seconds: float) -> dict[str, str]:
    """Return the environment of a process whose wall clock is off; its monotonic clock is not.

    Nothing if it is not off at all, or the library is not installed.
    """
    path = library()
    if path is None or not seconds:
        return {}
    return {
        "LD_PRELOAD": str(path),
        "PYTHONPATH": str(_ON_PATH),
        "FAKETIME": f"{seconds:+g}s",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        # What releases before 0.9.9 read.
        "DONT_FAKE_MONOTONIC": "1",
    }
