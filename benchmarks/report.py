"""All rows at once: the table and the plots of docs/performance.md."""

from __future__ import annotations

import datetime as dt
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
import sqlalchemy

from benchmarks import peers, plots, table
from benchmarks.figures import Figure, Result
from benchmarks.peers import Peer
from benchmarks.rows import Row
from benchmarks.server import SETTINGS, open_server

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "performance.md"
BEGIN = "<!-- what follows is written by `python -m benchmarks report` -->"
END = "<!-- the end of what is written -->"


@dataclass
class Report:
    """What was measured so far."""

    version: str = ""
    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def measure(report: Report, name: str, row: Row, *, quick: bool) -> None:
    """Measure a row on a server of its own, and keep what came of it; a failure too."""
    try:
        with open_server(row.settings) as server:
            report.version = server.version
            report.results[name] = row.measure(server, row.quick if quick else row.options())
    except Exception as error:
        # An hour of the other rows is not to be lost.
        report.failures[name] = f"{type(error).__name__}: {error}"


def write(report: Report, measured_peers: list[Peer], folder: Path) -> None:
    """Draw the plots into the folder, and put the figures into its page."""
    drawn = draw(report, measured_peers, folder)
    write_page(folder / PAGE, markdown(report, measured_peers, drawn))


def write_page(page: Path, body: str) -> None:
    """Put the report's text between the two marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} does not have the two lines that the report goes between")
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def draw(report: Report, measured_peers: list[Peer], folder: Path) -> dict[str, str]:
    """Draw what there are figures for, and return the plots' titles by file name."""
    drawn = {}
    if measured_peers:
        plots.throughput(
            folder / "performance-peers.svg", measured_peers, "No-op jobs drained, in one run"
        )
    else:
        plots.throughput(
            folder / "performance-peers.svg",
            peers.DATED,
            f"No-op jobs drained by other queues, {peers.MEASURED_ON}",
        )
    drawn["performance-peers.svg"] = "Throughput of queues"
    if "held_snapshot" in report.results:
        plots.claims(
            folder / "performance-held-snapshot.svg", report.results["held_snapshot"].curves
        )
        drawn["performance-held-snapshot.svg"] = "Claim time under a held snapshot"
    growing = [
        curve
        for name in ("enqueue_growth", "large_table")
        if name in report.results
        for curve in report.results[name].curves
    ]
    if growing:
        plots.growth(folder / "performance-growth.svg", growing)
        drawn["performance-growth.svg"] = "Speed and the size of the table"
    return drawn


def markdown(report: Report, measured_peers: list[Peer], drawn: dict[str, str]) -> str:
    """Return the report: the machine, the table, the plots, the peers, and the notes."""
    figures: list[Figure] = [
        figure for result in report.results.values() for figure in result.figures
    ]
    parts = [
        machine(report.version),
        table.in_markdown([*figures, *peers.figures(measured_peers)]),
        *(f"![{title}]({name})" for name, title in drawn.items()),
        "### Other queues",
    ]
    if measured_peers:
        parts += [
            "Measured in the same run of the peers' harness:",
            peers.in_markdown(measured_peers),
        ]
    else:
        parts.append(
            f"Not measured now. These figures are of {peers.MEASURED_ON}, on another machine or "
            f"under another load ({peers.MACHINE}); there is no ratio to them."
        )
        parts.append(peers.in_markdown(peers.DATED))
    parts.append("### Single runs")
    for name, result in report.results.items():
        if result.notes:
            parts.append("\n".join([f"`{name}`", "", *(f"- {note}" for note in result.notes)]))
    if report.failures:
        parts.append("### Not measured")
        parts.append("\n".join(f"- `{name}`: {why}" for name, why in report.failures.items()))
    return "\n\n".join(parts)


def machine(version: str) -> str:
    """Return what was measured on, in a sentence or two."""
    settings = ", ".join(f"{name}={value}" for name, value in SETTINGS.items())
    today = dt.datetime.now(dt.timezone.utc).date()
    return (
        f"Measured on {today} with {os.cpu_count()} cores ({platform.machine()}), shared by the "
        f"client, the workers and PostgreSQL {version} ({settings}, durable commits); "
        f"Python {platform.python_version()}, SQLAlchemy {sqlalchemy.__version__}, "
        f"psycopg {psycopg.__version__}."
    )
