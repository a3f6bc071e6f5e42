"""What can be registered as a hook, and what is refused with the way out."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from sa_jobs import Enqueuing, HookError, JobContext, Jobs
from sa_jobs.hooks import AttemptEnd, name_of

KINDS = ("before", "after", "on_failure", "on_dead", "on_enqueue")


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_a_hook_stays_the_function_that_it_is(jobs: Jobs) -> None:
    def before(ctx: JobContext) -> None: ...

    async def after(ctx: JobContext, end: AttemptEnd) -> None: ...

    def on_enqueue(enqueuing: Enqueuing) -> None: ...

    assert jobs.before(before) is before
    assert jobs.after(after) is after
    assert jobs.on_failure(print) is print
    assert jobs.on_dead(print) is print
    assert jobs.on_enqueue(on_enqueue) is on_enqueue


def test_registries_do_not_share_hooks(jobs: Jobs) -> None:
    jobs.before(print)
    assert jobs.hooks.before == [print]
    assert Jobs().hooks.before == []


def test_only_a_worker_s_hooks_cost_a_worker_something(jobs: Jobs) -> None:
    jobs.on_enqueue(print)
    assert not jobs.hooks.around_attempts
    jobs.on_dead(print)
    assert jobs.hooks.around_attempts


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_called_is_refused(jobs: Jobs, kind: str) -> None:
    with pytest.raises(HookError, match=f"the {kind} hook must be a function, not 'sentry'"):
        getattr(jobs, kind)("sentry")


@pytest.mark.parametrize(
    ("kind", "takes"),
    [
        ("before", r"\(ctx\)"),
        ("after", r"\(ctx, end\)"),
        ("on_failure", r"\(ctx, error\)"),
        ("on_dead", r"\(ctx, error\)"),
        ("on_enqueue", r"\(jobs\)"),
    ],
)
def test_a_function_with_other_parameters_is_refused(jobs: Jobs, kind: str, takes: str) -> None:
    def hook(one: Any, two: Any, three: Any) -> None: ...

    with pytest.raises(HookError, match=rf"the {kind} hook \S+\.hook must take {takes}: missing"):
        getattr(jobs, kind)(hook)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_refused_with_the_way_out(jobs: Jobs, kind: str) -> None:
    def generator(*_: Any) -> Iterator[None]:
        yield

    async def asynchronous(*_: Any) -> AsyncIterator[None]:
        yield

    for hook in (generator, asynchronous):
        with pytest.raises(HookError, match=r"is a generator: .* Worker\(around=\)"):
            getattr(jobs, kind)(hook)


def test_a_coroutine_is_refused_where_nobody_awaits_it(jobs: Jobs) -> None:
    async def on_enqueue(enqueuing: Enqueuing) -> None: ...

    class Callable:
        async def __call__(self, enqueuing: Enqueuing) -> None: ...

    for hook in (on_enqueue, Callable()):
        with pytest.raises(HookError, match="nobody could await it there: use a plain function"):
            jobs.on_enqueue(hook)  # type: ignore[type-var]


def test_messages_name_a_hook_by_its_module_and_name() -> None:
    class Reporter:
        def __call__(self, ctx: JobContext) -> None: ...

    assert name_of(KINDS.index).endswith("tuple.index")
    assert name_of(Reporter()).endswith(
        "test_hooks.test_messages_name_a_hook_by_its_module_and_name.<locals>.Reporter"
    )
    assert name_of(functools.partial(print)) == "functools.partial"
