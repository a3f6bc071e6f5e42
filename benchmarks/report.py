"""All rows at once: the table and the plots of docs/performance.md.

What was measured is kept beside the page, in performance.json, so that rows can be measured one by
one: those that are not measured again stay as they are.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg
import sqlalchemy

from benchmarks import peers, plots, table
from benchmarks.figures import Curve, Figure, Result, Target
from benchmarks.peers import Peer
from benchmarks.rows import ROWS, Row
from benchmarks.server import SETTINGS, open_server

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "performance.md"
KEPT = "performance.json"
BEGIN = "<!-- what follows is written by `python -m benchmarks report` -->"
END = "<!-- the end of what is written -->"


@dataclass
class Report:
    """What was measured so far, and `on` what, by the names of the rows."""

    results: dict[str, Result] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    on: dict[str, str] = field(default_factory=dict)
    peers: list[Peer] = field(default_factory=list)

    @classmethod
    def kept(cls, folder: Path) -> Report:
        """Return what is kept in a folder; of rows that there are no longer, nothing."""
        file = folder / KEPT
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        names = [name for name in ROWS if name in found.get("results", {})]
        return cls(
            {name: _result(found["results"][name]) for name in names},
            {name: why for name, why in found.get("failures", {}).items() if name in ROWS},
            {name: found["on"][name] for name in names},
            [Peer(**peer) for peer in found.get("peers", [])],
        )

    def keep(self, folder: Path) -> None:
        """Write it all into a folder."""
        text = json.dumps(dataclasses.asdict(self), indent=1, ensure_ascii=False)
        (folder / KEPT).write_text(text + "\n", encoding="utf-8")


def _result(kept: dict[str, Any]) -> Result:
    figures = [
        Figure(**{**figure, "target": Target(**figure["target"]) if figure["target"] else None})
        for figure in kept["figures"]
    ]
    curves = [
        Curve(curve["label"], [(x, y) for x, y in curve["points"]]) for curve in kept["curves"]
    ]
    return Result(figures, kept["notes"], curves)


def measure(report: Report, name: str, row: Row, *, quick: bool) -> None:
    """Measure a row on a server of its own, in place of what there is of it; a failure too."""
    for kept in (report.results, report.failures, report.on):
        kept.pop(name, None)
    try:
        with open_server(row.settings) as server:
            version = server.version
            report.results[name] = row.measure(server, row.quick if quick else row.options())
            report.on[name] = machine(version) + (" Small sizes (--quick)." if quick else "")
    except Exception as error:
        # An hour of the other rows is not to be lost.
        report.failures[name] = f"{type(error).__name__}: {error}"


def write(report: Report, folder: Path) -> None:
    """Keep the figures in the folder, draw the plots there, and put all of it into its page."""
    report.keep(folder)
    write_page(folder / PAGE, markdown(report, draw(report, folder)))


def write_page(page: Path, body: str) -> None:
    """Put the report's text between the two marks of a page."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} does not have the two lines that the report goes between")
    page.write_text(f"{before}{BEGIN}\n\n{body}\n\n{END}{after}", encoding="utf-8")


def draw(report: Report, folder: Path) -> dict[str, str]:
    """Draw what there are figures for, and return the plots' titles by file name."""
    drawn = {}
    if report.peers:
        plots.throughput(
            folder / "performance-peers.svg", report.peers, "No-op jobs drained, in one run"
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


def markdown(report: Report, drawn: dict[str, str]) -> str:
    """Return the report: the machine, the table, the plots, the peers, and the notes."""
    names = [name for name in ROWS if name in report.results]
    figures = [figure for name in names for figure in report.results[name].figures]
    machines: dict[str, list[str]] = {}
    for name in names:
        machines.setdefault(report.on[name], []).append(f"`{name}`")
    parts = [
        *(
            where if len(machines) == 1 else f"{', '.join(rows)}: {where}"
            for where, rows in machines.items()
        ),
        table.in_markdown([*figures, *peers.figures(report.peers)]),
        *(f"![{title}]({name})" for name, title in drawn.items()),
        "### Other queues",
    ]
    if report.peers:
        parts += [
            "Measured in one run of the peers' harness:",
            peers.in_markdown(report.peers),
        ]
    else:
        parts.append(
            f"Not measured now. These figures are of {peers.MEASURED_ON}, on another machine or "
            f"under another load ({peers.MACHINE}); there is no ratio to them."
        )
        parts.append(peers.in_markdown(peers.DATED))
    parts.append("### Single runs")
    for name in names:
        notes = report.results[name].notes
        if notes:
            parts.append("\n".join([f"`{name}`", "", *(f"- {note}" for note in notes)]))
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
