"""The rows of the table: one file for each, with its options, its quick sizes, and `measure`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import Result
from benchmarks.rows import (
    drain,
    drain_two,
    enqueue,
    enqueue_growth,
    enqueue_many,
    gated_notify,
    heartbeats,
    held_snapshot,
    idle_poll,
    large_table,
    late_commits,
    pick_up,
    priority,
    storage,
    unknown_handler,
    worker_memory,
)
from benchmarks.server import Server


@dataclass(frozen=True)
class Row:
    """A row: a dataclass of options (its defaults are the full sizes), quick ones, how to measure.

    `settings` are the server's, on top of those of every measurement.
    """

    title: str
    options: type[Any]
    quick: Any
    measure: Callable[[Server, Any], Result]
    settings: Mapping[str, str] = field(default_factory=dict)


def _row(module: Any) -> Row:
    return Row(
        title=module.__doc__.splitlines()[0],
        options=module.Options,
        quick=module.QUICK,
        measure=module.measure,
        settings=getattr(module, "SETTINGS", {}),
    )


ROWS: dict[str, Row] = {
    module.__name__.rpartition(".")[2]: _row(module)
    for module in (
        drain,
        drain_two,
        enqueue,
        enqueue_many,
        pick_up,
        held_snapshot,
        large_table,
        idle_poll,
        priority,
        late_commits,
        unknown_handler,
        storage,
        heartbeats,
        worker_memory,
        gated_notify,
        enqueue_growth,
    )
}
