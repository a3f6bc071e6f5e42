"""The steps that this package ships, in order."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import sa_jobs
from sa_jobs.errors import MigrationError


@dataclass(frozen=True)
class Step:
    """A migration step, as its file declares it.

    `phase` is "expand" where clients of the release before go on working on the new tables, and
    "contract" where only clients of `min_client` or newer do. `released_in` is the first release
    that has the step.
    """

    revision: str
    down_revision: str | None
    phase: Literal["expand", "contract"]
    min_client: str
    released_in: str
    summary: str


@cache
def _modules() -> tuple[Any, ...]:
    from sa_jobs.migrations import versions

    # Ids are numbered, so their order as text is the chain's; a test holds the chain to that.
    names = sorted(module.name for module in pkgutil.iter_modules(versions.__path__))
    return tuple(import_module(f"{versions.__name__}.{name}") for name in names)


@cache
def revisions() -> tuple[Step, ...]:
    """Return the steps of the installed package, oldest first."""
    return tuple(module.STEP for module in _modules())


def module_of(step: Step) -> Any:
    """Return the module that holds the step's upgrade() and downgrade()."""
    return _modules()[position(step.revision)]


def position(revision: str | None) -> int:
    """Return the place of a step in the chain, -1 for none; raise MigrationError if unknown."""
    if revision is None:
        return -1
    steps = revisions()
    for index, step in enumerate(steps):
        if step.revision == revision:
            return index
    raise MigrationError(
        f"sa-jobs {sa_jobs.__version__} has no step {revision!r} (its newest is "
        f"{steps[-1].revision!r}): install the release of sa-jobs that this step came with"
    )
