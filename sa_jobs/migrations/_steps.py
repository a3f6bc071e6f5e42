"""The steps that this package ships, in order."""

from __future__ import annotations

import pkgutil
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, Literal

import sa_jobs
from sa_jobs.errors import StepNotFoundError


@dataclass(frozen=True)
class Step:
    """A migration step, as its file declares it.

    `phase` is "expand" where clients of the release before go on working on the new tables, and
    "contract" where only clients of `min_client` or newer do. `min_client` is the oldest release
    that may work on tables that have this step and those before it. `released_in` is the first
    release that has the step.
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


def position(revision: Any) -> int:
    """Return the place of a step in the chain, -1 for none; raise StepNotFoundError if unknown."""
    if revision is None:
        return -1
    steps = revisions()
    if not isinstance(revision, str):
        raise StepNotFoundError(
            f"{revision!r} is no step of sa-jobs: it has {', '.join(s.revision for s in steps)}"
        )
    for index, step in enumerate(steps):
        if step.revision == revision:
            return index
    newest = steps[-1].revision
    if is_id(revision) and revision > newest:
        raise StepNotFoundError(
            f"the step {revision!r} needs a newer sa-jobs (installed {sa_jobs.__version__}, whose "
            f"newest step is {newest!r}): run `pip install --upgrade sa-jobs`"
        )
    raise StepNotFoundError(
        f"sa-jobs {sa_jobs.__version__} has no step {revision!r} (its newest is {newest!r})"
    )


def is_id(text: Any) -> bool:
    """Return whether this could be a step's id, of whatever release."""
    return isinstance(text, str) and re.fullmatch(r"sa_jobs_\d{4}", text) is not None


def is_version(text: str) -> bool:
    """Return whether this is a release's version, as far as releases are compared."""
    return re.match(r"\d+(\.\d+)*", text) is not None


def is_at_least(version: str, oldest: str) -> bool:
    """Return whether a release is `oldest` or newer; a pre-release counts as its release."""
    return _numbers(version) >= _numbers(oldest)


def _numbers(version: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", version)
    if numbers is None:
        raise ValueError(f"{version!r} is no version")
    # So that 1.0 and 1.0.0 are the same.
    return tuple(int(part) for part in re.sub(r"(\.0+)+$", "", numbers[0]).split("."))
