"""The command: `python -m benchmarks.chaos --minutes N --seed S`."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from benchmarks.chaos.run import PERIODS, WORKERS, Run, chaos
from benchmarks.chaos.schedule import KINDS
from benchmarks.chaos.verdict import Line, holds
from tests.support.postgres import embedded_bin, system_bin

REASONS_SHOWN = 10
REASON_LENGTH = 400

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    given = _arguments()
    programs = embedded_bin() if given.server == "embedded" else system_bin()
    if programs is None:
        sys.exit(f"there is no {given.server} PostgreSQL")
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    with ExitStack() as stack:
        if given.logs is None:
            logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            logs = given.logs
            logs.mkdir(parents=True, exist_ok=True)
        run = Run(
            seconds=given.seconds or given.minutes * 60,
            seed=given.seed,
            periods=PERIODS[given.periods],
            workers=given.workers,
            concurrency=given.concurrency,
            enqueuers=given.enqueuers,
            rate=given.rate,
            kinds=tuple(given.only or KINDS),
            programs=programs,
            logs=logs,
            allowance=given.allowance,
        )
        try:
            lines = chaos(run)
        except KeyboardInterrupt:
            sys.exit("interrupted: everything that it started has ended")
    sys.exit(report(lines))


def report(lines: Sequence[Line]) -> int:
    """Print the table and the reasons against it, and return the exit code."""
    width = max(len(line.what) for line in lines)
    print()
    for line in lines:
        bound = f"must be {line.must}" if line.must else ""
        mark = "  <-- FAILS" if line.reasons else ""
        print(f"  {line.what:{width}}  {line.found:>10}  {bound}{mark}".rstrip())
    for line in lines:
        for reason in line.reasons[:REASONS_SHOWN]:
            print(f"\n{line.what.strip()}: {reason[:REASON_LENGTH]}", end="")
        if len(line.reasons) > REASONS_SHOWN:
            print(f"\n{line.what.strip()}: and {len(line.reasons) - REASONS_SHOWN} more", end="")
    print("\nEverything holds." if holds(lines) else "\n\nThe verdict: FAILED")
    return 0 if holds(lines) else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Once: nothing shall interrupt what ends the processes.
    for ignored in _SIGNALS:
        signal.signal(ignored, signal.SIG_IGN)
    raise KeyboardInterrupt


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for how long faults come")
    parser.add_argument("--seconds", type=float, help="the same, for short runs")
    parser.add_argument("--seed", default="1", help="the same seed gives the same faults")
    parser.add_argument(
        "--periods",
        choices=list(PERIODS),
        default="short",
        help="the workers' lease, heartbeat, ...: short (3 s, 1 s, ...) or their defaults",
    )
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--enqueuers", type=int, default=3)
    parser.add_argument("--rate", type=float, default=20.0, help="orders per second, of all")
    parser.add_argument(
        "--only",
        action="append",
        choices=KINDS,
        metavar="KIND",
        help=f"a kind of fault, in place of all; may be given again: {', '.join(KINDS)}",
    )
    parser.add_argument(
        "--allowance",
        type=float,
        default=0.0,
        help="by how many seconds what is promised in seconds may be late, on a machine that has "
        "other things to do",
    )
    parser.add_argument("--server", choices=["embedded", "system"], default="embedded")
    parser.add_argument("--logs", type=Path, help="a directory for the logs, which is kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
