"""What the demo shows: live on a terminal, else a plain line now and then."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from sa_jobs.demo.report import Check, Latency, Numbers

PLAIN_LINE_SECONDS = 2.0


class Display:
    """Shows the course of events: what happens, how far things are, and the result."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._live: Live | None = None
        self._started_at = time.monotonic()
        self._shown_at = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = Live(console=self._console, transient=True, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end_progress()

    @property
    def seconds(self) -> float:
        """How long the demo has been running."""
        return time.monotonic() - self._started_at

    def say(self, text: str) -> None:
        """Show what happens."""
        line = Text(f"{self.seconds:5.1f} s  ")
        line.append(text)
        self._console.print(line, soft_wrap=True)

    def progress(self, numbers: Numbers, *, placed: int, orders: int, declined: int) -> None:
        """Show how far things are."""
        shown = {
            "committed": numbers.orders,
            "rolled back": declined,
            "receipts": numbers.receipts,
            "waiting": numbers.waiting,
            "running": numbers.running,
            "retries": numbers.retries,
            "reclaimed": numbers.reclaimed,
            "dead": numbers.dead,
        }
        if self._live is not None:
            self._live.update(self._panel(shown, placed, orders), refresh=True)
        elif time.monotonic() - self._shown_at >= PLAIN_LINE_SECONDS:
            self._shown_at = time.monotonic()
            self.say(", ".join(f"{name} {number}" for name, number in shown.items()))

    def end_progress(self) -> None:
        """Take the live part off the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def result(
        self, numbers: Numbers, waited: Latency, *, declined: int, killed_pid: int, killed_held: int
    ) -> None:
        """Show the numbers in the end."""
        self._console.print()
        for name, value, note in (
            ("orders committed", str(numbers.orders), ""),
            ("orders rolled back", str(declined), "card declined, after the receipt was enqueued"),
            ("receipts", str(numbers.receipts), ""),
            ("retries", str(numbers.retries), "failed attempts that were tried again"),
            (
                "reclaimed",
                str(numbers.reclaimed),
                f"worker {killed_pid} was killed while it held {killed_held}",
            ),
            ("dead", str(numbers.dead), "partners that have closed, after three attempts each"),
            ("pick-up p50", f"{waited.median:.0f} ms", "from due to claimed"),
            ("pick-up p95", f"{waited.p95:.0f} ms", ""),
        ):
            line = Text(f"{name:<20}{value:>8}")
            line.append(f"   {note}" if note else "", "dim")
            self._console.print(line, soft_wrap=True)
        self._console.print()

    def checks(self, checks: list[Check]) -> None:
        """Show what held, and what did not."""
        for check in checks:
            line = Text("ok    " if check.passed else "FAIL  ", "green" if check.passed else "red")
            line.append(check.text, "default")
            if not check.passed:
                line.append(f" ({check.found})", "default")
            self._console.print(line, soft_wrap=True)

    def log(self, name: str, text: str) -> None:
        """Show the end of a process's log."""
        self._console.print()
        self._console.print(Text(f"--- the end of {name}'s log"))
        self._console.print(Text(text or "(empty)"), soft_wrap=True)

    def _panel(self, shown: dict[str, int], placed: int, orders: int) -> Group:
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            f"{self.seconds:5.1f} s",
            ProgressBar(total=orders, completed=placed, width=40),
            f"{placed} of {orders} orders placed",
        )
        numbers = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in shown:
            numbers.add_column(name, justify="right", no_wrap=True)
        numbers.add_row(*map(str, shown.values()))
        return Group(Text(), bar, numbers)
