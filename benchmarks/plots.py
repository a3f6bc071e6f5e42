"""The plots for docs/performance.md, drawn by matplotlib (dependency group `benchmarks`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Curve
from benchmarks.peers import OURSELVES, Peer


def throughput(path: Path, peers: Sequence[Peer], title: str) -> None:
    """Draw how many jobs per second each queue drains with one and with two workers."""
    ordered = sorted(
        (peer for peer in peers if peer.drain is not None), key=lambda peer: peer.drain or 0.0
    )
    figure, axes = _axes(title, height=1.5 + 0.35 * len(ordered))
    places = range(len(ordered))
    for offset, label, values in (
        (0.2, "1 worker process", [peer.drain or 0.0 for peer in ordered]),
        (-0.2, "2 worker processes", [peer.drain_two or 0.0 for peer in ordered]),
    ):
        axes.barh([place + offset for place in places], values, height=0.4, label=label)
    axes.set_yticks(list(places), [peer.name for peer in ordered])
    for text in axes.get_yticklabels():
        text.set_fontweight("bold" if text.get_text() == OURSELVES else "normal")
    axes.set_xlabel("jobs per second")
    axes.legend(loc="lower right")
    _save(figure, path)


def claims(path: Path, curves: Sequence[Curve]) -> None:
    """Draw the server's time per claim over the jobs that were claimed before."""
    figure, axes = _axes("Server time of a claim in a long drain")
    _draw(axes, curves)
    axes.set_xlabel("jobs claimed so far")
    axes.set_ylabel("ms per claim")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(figure, path)


def growth(path: Path, curves: Sequence[Curve]) -> None:
    """Draw rates over the number of rows in the table, relative to the smallest number."""
    figure, axes = _axes("Speed with rows in the table, relative to an empty one")
    _draw(
        axes,
        [
            Curve(curve.label, [(rows, rate / curve.points[0][1]) for rows, rate in curve.points])
            for curve in curves
        ],
        marker="o",
    )
    # So that the empty table has a place too.
    axes.set_xscale("symlog", linthresh=1_000)
    axes.set_xlabel("rows in the table")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower left")
    _save(figure, path)


def _axes(title: str, *, height: float = 4.0) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "sa-jobs"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, height), layout="constrained")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _draw(axes: Any, curves: Sequence[Curve], **style: Any) -> None:
    for curve in curves:
        axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
