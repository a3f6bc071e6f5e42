"""The arithmetic and the tables of the benchmarks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hot_functions, peers, quantiles, report, table
from benchmarks.figures import Curve, Figure, Result, Target
from benchmarks.rows import ROWS


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert quantiles.percentile(values, 0.5) == 50.0
    assert quantiles.percentile(values, 0.99) == 99.0
    assert quantiles.percentile(values, 0.07) == 7.0
    assert quantiles.percentile(values, 1.0) == 100.0
    assert quantiles.percentile([3.0], 0.0) == 3.0
    with pytest.raises(ValueError, match="no values"):
        quantiles.percentile([], 0.5)


def test_ratios_are_taken_side_by_side() -> None:
    # The third pair was measured while the disk was slow.
    assert quantiles.median_ratio([90.0, 95.0, 9.0], [100.0, 100.0, 10.0]) == 0.9
    with pytest.raises(ValueError, match="shorter"):
        quantiles.median_ratio([1.0, 2.0], [1.0])


def test_a_rate_between_two_shares_of_the_jobs() -> None:
    times = [0.1 * number for number in range(50)] + [5.0 + number for number in range(51)]
    assert quantiles.rate_between(times, 0.0, 0.1) == pytest.approx(10.0)
    assert quantiles.rate_between(times, 0.9, 1.0) == pytest.approx(1.0)
    with pytest.raises(ValueError, match="too few"):
        quantiles.rate_between([1.0], 0.0, 0.1)


@pytest.mark.parametrize(
    ("target", "reached"),
    [
        (Target(">=", 0.6), True),
        (Target(">=", 0.7), False),
        (Target("<=", 0.6), True),
        (Target("<=", 0.5), False),
        (Target(">=", 60.0, "value"), True),
        (Target(">=", 61.0, "value"), False),
        (None, None),
    ],
)
def test_a_target_is_for_the_ratio_or_the_value(
    target: Target | None, reached: bool | None
) -> None:
    figure = Figure("drain", 60.0, "jobs/s", "L4", 100.0, target=target)
    assert figure.ratio == 0.6
    assert figure.reached is reached


def test_a_ratio_of_its_own_goes_before_that_of_the_medians() -> None:
    assert Figure("drain", 60.0, "jobs/s", "L4", 100.0, 0.55).ratio == 0.55


def test_a_target_for_a_ratio_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="needs a reference"):
        Figure("drain", 60.0, "jobs/s", target=Target(">=", 0.6))


def test_numbers_have_the_digits_that_mean_something() -> None:
    written = [table.number(value) for value in (45_123.4, 100.0, 99.94, 1.5, 0.0123, 0.0)]
    assert written == ["45,123", "100", "99.9", "1.50", "0.0123", "0"]


def test_the_same_figures_in_columns_and_in_markdown() -> None:
    figures = [
        Figure("drain", 45_000.0, "jobs/s", "L4", 72_000.0, target=Target(">=", 0.6)),
        Figure("pick-up, p50", 0.91, "ms", target=Target("<=", 0.8, "value")),
    ]
    assert table.in_columns(figures) == (
        "what                 figure  measured beside it          ratio       target  reached\n"
        "drain         45,000 jobs/s  L4                  72,000   0.62   >= 0.600 x  yes\n"
        "pick-up, p50       0.910 ms                                     <= 0.800 ms  no"
    )
    assert table.in_markdown(figures).splitlines()[2:] == [
        "| drain | 45,000 jobs/s | L4 | 72,000 | 0.62 | >= 0.600 x | yes |",
        "| pick-up, p50 | 0.910 ms |  |  |  | <= 0.800 ms | no |",
    ]


def test_every_row_can_be_made_small() -> None:
    for name, row in ROWS.items():
        assert row.title.endswith("."), name
        full, quick = row.options(), row.quick
        assert type(full) is type(quick), name
        assert full != quick, name
        kinds = {type(getattr(full, option.name)) for option in dataclasses.fields(full)}
        assert kinds <= {int, str}, f"{name}: the command can only take numbers and words"


def record(peer: str, workload: str, **values: Any) -> str:
    return json.dumps({"peer": peer, "wl": workload, **values})


def test_a_run_of_the_peers_harness_becomes_figures() -> None:
    lines = [
        *(record("graphile", "W3", rate=rate, wal_job=1_000.0) for rate in (30e3, 34e3, 32e3)),
        record("graphile", "W3", rate=1.0, complete=False),
        record("graphile", "W1", rate=1_200.0),
        record("pgqueuer_asyncpg", "W3", rate=20e3),
        record("pgqueuer_asyncpg", "W1", rate=2_300.0),
        record("sa_jobs", "W3", rate=48e3, wal_job=1_200.0),
        record("sa_jobs", "W1", rate=2_300.0),
        record("sa_jobs", "W4", p50=0.7, p99=1.4),
    ]
    measured = peers.summary([json.loads(line) for line in lines])
    assert [(peer.name, peer.drain) for peer in measured] == [
        ("graphile", 32e3),
        ("pgqueuer_asyncpg", 20e3),
        ("sa_jobs", 48e3),
    ]
    found = [
        (figure.what, figure.against, figure.ratio, figure.reached)
        for figure in peers.figures(measured)
    ]
    assert found == [
        ("drain, 1 worker", "graphile", 1.5, True),
        ("drain, 1 worker", "pgqueuer_asyncpg", 2.4, True),
        ("enqueue one", "pgqueuer_asyncpg", 1.0, True),
        ("WAL per job", "graphile", 1.2, True),
    ]


def test_without_our_own_run_there_is_no_figure() -> None:
    assert peers.figures(peers.DATED) == []


def test_the_report_goes_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / report.PAGE
    page.write_text(f"# Before\n\n{report.BEGIN}\n\nold\n\n{report.END}\n\n## After\n")
    measured = report.Report()
    measured.results["drain"] = Result([Figure("drain", 45_000.0, "jobs/s")], ["a note"])
    measured.on["drain"] = report.machine("18.6")
    measured.failures["storage"] = "OSError: the disk is full"
    body = report.markdown(measured, {"plot.svg": "A plot"})
    report.write_page(page, body)
    text = page.read_text()
    assert text.startswith(f"# Before\n\n{report.BEGIN}\n\nMeasured on ")
    assert text.endswith(f"{report.END}\n\n## After\n")
    assert "old" not in text
    for part in (
        "| drain | 45,000 jobs/s |",
        "![A plot](plot.svg)",
        "- a note",
        "- `storage`: OSError: the disk is full",
        "| graphile | 1,189 |",
        f"These figures are of {peers.MEASURED_ON}",
    ):
        assert part in text
    report.write_page(page, body)
    assert page.read_text() == text


def test_rows_that_were_measured_one_by_one_stand_in_one_report(tmp_path: Path) -> None:
    measured = report.Report()
    target = Target("<=", 1.0, "value")
    curves = [Curve("claims", [(1.0, 0.5), (2.0, 0.5)])]
    measured.results["storage"] = Result([Figure("size", 400.0, "B", target=target)])
    measured.results["drain"] = Result([Figure("drain", 45e3, "jobs/s", "L4", 72e3)], ["x"], curves)
    measured.on = {"storage": "There and then.", "drain": "Here and now."}
    measured.failures["priority"] = "OSError: the disk is full"
    measured.peers = list(peers.DATED[:2])
    measured.keep(tmp_path)
    kept = report.Report.kept(tmp_path)
    assert kept == measured
    text = report.markdown(kept, {})
    assert text.startswith("`drain`: Here and now.\n\n`storage`: There and then.\n\n")
    assert text.index("| drain |") < text.index("| size |")


def test_nothing_is_kept_of_rows_that_are_gone(tmp_path: Path) -> None:
    measured = report.Report({"gone": Result([])}, {"lost": "why"}, {"gone": "where"})
    measured.keep(tmp_path)
    assert report.Report.kept(tmp_path) == report.Report()
    assert report.Report.kept(tmp_path / "elsewhere") == report.Report()


def test_the_page_has_the_marks() -> None:
    text = (report.DOCS / report.PAGE).read_text()
    assert text.index(report.BEGIN) < text.index(report.END)


def test_stacks_are_ranked_by_function() -> None:
    stacks = [
        "main (a.py:9);run (a.py:1);claim (b.py:5) 6",
        "main (a.py:9);run (a.py:2);claim (b.py:7) 2",
        "main (a.py:9);run (a.py:3) 2",
    ]
    both = [("run (a.py)", 1.0), ("claim (b.py)", 0.8)]
    assert hot_functions.ranking(stacks, own=True) == [("claim (b.py)", 0.8), ("run (a.py)", 0.2)]
    assert hot_functions.ranking(stacks, own=False) == both
