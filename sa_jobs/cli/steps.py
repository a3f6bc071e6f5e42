"""Steps as the options of commands name them: one that this package lacks is wrong usage."""

from __future__ import annotations

from collections.abc import Callable

import click

import sa_jobs
from sa_jobs.migrations import revisions

_Callback = Callable[[click.Context, click.Parameter, str | None], str | None]


def known_step(*also: str) -> _Callback:
    """Return a callback for an option that takes a step, or one of the words given."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
        known = [step.revision for step in revisions()]
        if value is not None and value not in also and value not in known:
            raise click.BadParameter(
                f"{value!r} is not a step of sa-jobs {sa_jobs.__version__}, which has "
                f"{', '.join(known)}",
                ctx,
                param,
            )
        return value

    return check
