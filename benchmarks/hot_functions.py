"""Where a worker spends its time in a drain: the functions that py-spy finds it in."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from benchmarks.draining import Progress, wait_on
from benchmarks.server import open_server
from benchmarks.starts import Starts
from benchmarks.worker import running_workers

_RATE = 500


def record(
    jobs: int, worker_options: Sequence[str], handler: str, *, waiting: bool = False
) -> list[str]:
    """Drain jobs, and return the worker's stacks: frames, the outermost first, and a count.

    Sampled are the threads that hold the interpreter's lock, with `waiting` also those that are
    awake and want it.
    """
    program = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which(
        "py-spy"
    )
    if program is None:
        sys.exit("there is no py-spy: install the dependency group `benchmarks`")
    with open_server() as server, tempfile.TemporaryDirectory() as directory:
        database = server.fresh()
        filled = database.fill(jobs, handler)
        database.analyze()
        output = Path(directory) / "stacks"
        with (
            Starts.make(jobs) as starts,
            running_workers(database, starts, worker_options) as workers,
            database.connect() as connection,
        ):
            wait_on(workers, starts.any_begun)
            profiler = subprocess.Popen(
                [
                    program,
                    "record",
                    f"--pid={workers[0].pid}",
                    f"--rate={_RATE}",
                    "--format=raw",
                    f"--output={output}",
                    "--duration=3600",
                    *([] if waiting else ["--gil"]),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            wait_on(workers, Progress(connection, filled).all_finished, every=0.1, seconds=600)
            profiler.send_signal(signal.SIGINT)
            _, errors = profiler.communicate()
        if not output.exists():
            sys.exit(f"py-spy wrote nothing: {errors}")
        return output.read_text().splitlines()


def ranking(stacks: Iterable[str], *, own: bool) -> list[tuple[str, float]]:
    """Return the functions and their shares of the samples, the largest first.

    With `own` a sample counts for the innermost function alone, else for each one in the stack;
    then functions that have no time but that of one other are left out.
    """
    counts: Counter[str] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    total = 0
    for stack in stacks:
        frames, _, number = stack.rpartition(" ")
        names = [_without_line(frame) for frame in frames.split(";")]
        total += int(number)
        for name in {names[-1]} if own else set(names):
            counts[name] += int(number)
        for call in set(pairwise(names)):
            calls[call] += int(number)
    pass_on = {caller for (caller, _), count in calls.items() if count == counts[caller]}
    return [
        (name, count / total) for name, count in counts.most_common() if own or name not in pass_on
    ]


def _without_line(frame: str) -> str:
    """Return "function (file)" of "function (file:line)"."""
    place, _, line = frame.rpartition(":")
    return f"{place})" if line.rstrip(")").isdecimal() else frame
