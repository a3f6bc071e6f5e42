"""`python -m benchmarks.chaos`: a short run holds, and no process is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from benchmarks.chaos.run import WORKERS
from benchmarks.chaos.schedule import KINDS, schedule
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
SECONDS = 20.0
SEED = "195"  # In so short a time, one of few that bring every kind of fault.
MARK = "SA_JOBS_TEST_CHAOS"

pytestmark = [pytest.mark.acceptance, pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def mark() -> Iterator[str]:
    """A text in the environment of a run, which its processes inherit: none may outlive it."""
    mark = uuid4().hex
    yield mark
    left = processes(mark)
    for process in left:
        process.kill()
    assert not left


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue  # It is gone, or another user's.
    return found


def start(mark: str, output: Path, *options: str) -> subprocess.Popen[bytes]:
    server = os.environ.get("SA_JOBS_TEST_SERVER") or "embedded"
    command = [sys.executable, "-m", "benchmarks.chaos", "--server", server, *options]
    with output.open("wb") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )


def test_a_short_run_holds(mark: str, tmp_path: Path) -> None:
    """The machine runs other tests at the same time, so restarts may be late."""
    faults = schedule(SEED, SECONDS, workers=WORKERS, lease=3.0)
    assert {fault.kind for fault in faults} == set(KINDS)
    output = tmp_path / "output"
    run = start(mark, output, f"--seconds={SECONDS:g}", f"--seed={SEED}", "--allowance=20")
    code = run.wait(300)
    text = output.read_text()
    assert code == 0, text
    assert "Everything holds." in text


def test_ctrl_c_ends_a_run_and_all_its_processes(mark: str, tmp_path: Path) -> None:
    output = tmp_path / "output"
    run = start(mark, output, "--seconds=60", f"--seed={SEED}")
    wait_until(lambda: output.read_text().count(" s  ") > 2, "there are faults", seconds=120)
    assert len(processes(mark)) > 6
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 1
    assert output.read_text().rstrip().endswith("interrupted: everything that it started has ended")
