"""The command: `python -m benchmarks NAME`, `report`, `peers`, `hot_functions`, or `--list`."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import hot_functions, peers, report, table
from benchmarks.figures import Result
from benchmarks.rows import ROWS, Row
from benchmarks.server import open_server

_OTHERS = {
    "report": "All of them, into docs/performance.md",
    "peers": "Other queues: their dated figures, or a run of the peers' harness",
    "hot_functions": "Where a worker spends its time in a drain, by py-spy",
}


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    if given.list:
        titles = {name: row.title for name, row in ROWS.items()} | _OTHERS
        for name, title in titles.items():
            print(f"{name:15} {title}")
        return 0
    if given.name is None:
        print("say what to measure; see --list", file=sys.stderr)
        return 2
    others = {"report": _report, "peers": _peers, "hot_functions": _hot_functions}
    return others.get(given.name, _row)(given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure sa-jobs beside the limits of this machine, on a PostgreSQL of its own."
        " SA_JOBS_TEST_SERVER says which: embedded (the default) or system.",
    )
    parser.add_argument("--list", action="store_true", help="show what can be measured, and end")
    names = parser.add_subparsers(dest="name", metavar="NAME")
    for name, row in ROWS.items():
        _add_options(names.add_parser(name, help=row.title, description=row.title), row)
    subparsers = {
        name: names.add_parser(name, help=title, description=title)
        for name, title in _OTHERS.items()
    }
    whole = subparsers["report"]
    whole.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")
    whole.add_argument(
        "--only",
        nargs="*",
        choices=list(ROWS),
        metavar="NAME",
        default=list(ROWS),
        help="these rows; of the others, the page keeps what was measured before",
    )
    whole.add_argument(
        "--folder", type=Path, default=report.DOCS, help="where performance.md and the plots are"
    )
    for parsed in (whole, subparsers["peers"]):
        parsed.add_argument("--peers", type=Path, metavar="PATH", help="the peers' harness")
        parsed.add_argument("--peer-names", nargs="+", default=list(peers.NAMES), metavar="NAME")
        parsed.add_argument("--repetitions", type=int, default=3, help="of the peers' harness")
    functions = subparsers["hot_functions"]
    functions.add_argument("--jobs", type=int, default=50_000)
    functions.add_argument("--concurrency", type=int, default=100)
    functions.add_argument("--handler", default="noop")
    functions.add_argument(
        "--waiting", action="store_true", help="count threads too that wait for their turn"
    )
    return parser


def _add_options(parser: argparse.ArgumentParser, row: Row) -> None:
    """Add an option for each field of the row's options; left out, it is None."""
    for option in dataclasses.fields(row.options):
        parser.add_argument(
            f"--{option.name.replace('_', '-')}",
            type=type(option.default),
            metavar=str(option.default),
            help=f"default: {option.default}",
        )
    parser.add_argument("--quick", action="store_true", help="small sizes: does it work at all?")


def _row(given: argparse.Namespace) -> int:
    row = ROWS[given.name]
    options = row.quick if given.quick else row.options()
    names = [option.name for option in dataclasses.fields(row.options)]
    changes: dict[str, Any] = {
        name: getattr(given, name) for name in names if getattr(given, name) is not None
    }
    with open_server(row.settings) as server:
        print(report.machine(server.version))
        _show(row.measure(server, dataclasses.replace(options, **changes)))
    return 0


def _report(given: argparse.Namespace) -> int:
    measured = report.Report.kept(given.folder)
    for name in given.only:
        print(f"\n{name}: {ROWS[name].title}", flush=True)
        report.measure(measured, name, ROWS[name], quick=given.quick)
        if name in measured.results:
            _show(measured.results[name])
        else:
            print(f"failed: {measured.failures[name]}", flush=True)
        # After each, so that a run which is cut off has written what it measured.
        report.write(measured, given.folder)
    if given.peers is not None:
        measured.peers = _measured_peers(given)
        report.write(measured, given.folder)
    print(f"\nwritten: {given.folder / report.PAGE}")
    return 1 if measured.failures else 0


def _peers(given: argparse.Namespace) -> int:
    measured = _measured_peers(given)
    if measured:
        print(peers.in_markdown(measured))
        print(table.in_columns(peers.figures(measured)))
    else:
        print(f"figures of {peers.MEASURED_ON} ({peers.MACHINE}); --peers PATH measures now")
        print(peers.in_markdown(peers.DATED))
    return 0


def _measured_peers(given: argparse.Namespace) -> list[peers.Peer]:
    if given.peers is None:
        return []
    return peers.measure(given.peers, names=given.peer_names, repetitions=given.repetitions)


def _hot_functions(given: argparse.Namespace) -> int:
    worker = ("--concurrency", str(given.concurrency))
    stacks = hot_functions.record(given.jobs, worker, given.handler, waiting=given.waiting)
    for own, title in ((True, "in the function itself"), (False, "with what it calls")):
        print(f"\n{title}:")
        for name, share in hot_functions.ranking(stacks, own=own)[:15]:
            print(f"  {share:6.1%}  {name}")
    return 0


def _show(result: Result) -> None:
    print(table.in_columns(result.figures))
    for note in result.notes:
        print(f"  {note}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
