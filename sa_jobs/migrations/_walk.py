"""The way from one step to another, on the tables of one place."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from sa_jobs.errors import MigrationError
from sa_jobs.migrations._ddl import Target
from sa_jobs.migrations._place import place_options
from sa_jobs.migrations._refusals import refusals
from sa_jobs.migrations._steps import Step, module_of, position, revisions


def up(target: Target, to: str, from_: str | None) -> tuple[Step, ...]:
    """Run the steps up to `to` that the tables lack (offline: those after `from_`)."""
    steps = revisions()
    last = last_position(to)
    start = position(from_)
    if target.online:
        newest = target.position()
        if newest < start:
            raise MigrationError(
                f"this revision expects the tables of {target} at {from_} or later, and they are "
                f"{'at ' + steps[newest].revision if newest >= 0 else 'absent'}: run the "
                "revision of your chain that brings them there"
            )
        start = newest
    elif start >= 0:
        target.refuse_tables_elsewhere()
    target = replace(target, fresh=start < 0)
    pending = steps[start + 1 : last + 1]
    # Of tables in use, indexes may be built outside the transaction: no savepoint then.
    with target.savepoint() if target.fresh else nullcontext(target) as within:
        for step in pending:
            module_of(step).upgrade(within)
    return pending


def down(target: Target, to: str | None, from_: str | None) -> tuple[Step, ...]:
    """Undo the steps after `to` that the tables have (offline: those from `from_` down)."""
    steps = revisions()
    last = position(None if to == "base" else to)
    start = position(from_)
    if target.online:
        start = target.position()
        if start < last:
            raise MigrationError(
                f"the tables of {target} are not at {to} or later, so there is nothing to go "
                "back from: bring them there by `sa-jobs db upgrade"
                f"{place_options(target.schema, target.name)} --to {to}`, and run this again"
            )
    elif start > last:
        target.refuse_tables_elsewhere()
    undone = steps[last + 1 : start + 1][::-1]
    with target.savepoint() as within:
        # An upgrade that never came may have been prepared; of dropped tables nothing stays.
        if target.online and last >= 0:
            for step in steps[:start:-1]:
                _discard(within, step)
        for step in undone:
            module_of(step).downgrade(within)
    return undone


def prepare(target: Target, to: str) -> tuple[Step, ...]:
    """Build the indexes of the steps up to `to` that the tables lack, and return these steps."""
    last = last_position(to)
    newest = target.position()
    if newest < 0:
        raise MigrationError(
            f"there are no tables of {target} here: the steps that make them make the indexes too"
        )
    steps = revisions()[newest + 1 : last + 1]
    pending = tuple(step for step in steps if hasattr(module_of(step), "prepare"))
    for step in pending:
        what = f"the step {step.revision} cannot be prepared on {target}"
        with refusals(what, target.schema, fresh=False):
            module_of(step).prepare(target)
    return pending


def _discard(target: Target, step: Step) -> None:
    module: Any = module_of(step)
    if hasattr(module, "discard"):
        what = f"what was prepared for {step.revision} cannot be dropped on {target}"
        with refusals(what, target.schema, fresh=False):
            module.discard(target)


def last_position(to: str) -> int:
    """Return the place in the chain of the last step to run."""
    if to is None or to == "base":
        raise MigrationError(
            f"to={to!r} means no tables, which is the way back, downgrade() or revert(): "
            f"say to='head', or a step up to {revisions()[-1].revision!r}"
        )
    return len(revisions()) - 1 if to == "head" else position(to)
