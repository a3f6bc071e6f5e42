"""The benchmarks run: small sizes, and no look at how fast."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest

from benchmarks.__main__ import main
from benchmarks.rows import ROWS
from benchmarks.server import TIMED_STATEMENTS, open_server
from tests.support.workers import ROOT

pytestmark = [pytest.mark.acceptance, pytest.mark.slow]

# The quickest rows, which use most of the package's other files.
SMALL = {
    "enqueue": {"transactions": 20},
    "enqueue_many": {"jobs": 1_000},
    "held_snapshot": {"jobs": 300},
    "storage": {"jobs": 300},
}


def test_the_command_prints_a_figure_beside_its_limit() -> None:
    completed = subprocess.run(
        [sys.executable, "-m", "benchmarks", "drain", "--quick", "--jobs", "300"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    lines = completed.stdout.splitlines()
    assert lines[0].startswith("Measured on ")
    assert lines[2].startswith("drain, 1 worker process, noop ")
    assert "L4, batch 100, 1 connection" in lines[2]
    assert lines[3].strip().startswith("noop: 300 jobs, ")


def test_the_list_names_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [*ROWS, "report", "peers", "hot_functions"]


def test_rows_give_figures() -> None:
    with open_server(TIMED_STATEMENTS) as server:
        for name, sizes in SMALL.items():
            row = ROWS[name]
            result = row.measure(server, dataclasses.replace(row.quick, **sizes))
            assert result.figures, name
            for figure in result.figures:
                assert math.isfinite(figure.value), f"{name}: {figure}"
                assert figure.value > 0, f"{name}: {figure}"
                assert figure.reference is None or figure.reference > 0, f"{name}: {figure}"
