"""What a handler's signature says: which parameters the worker injects, which the payload fills."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy.orm import Session, scoped_session

from sa_jobs.context import ClaimedJob, JobContext
from sa_jobs.errors import HandlerError, InvalidJobError, InvalidJobTypeError, PayloadMisfitError
from sa_jobs.payloads import Parameter, PayloadTypes
from sa_jobs.payloads.misfit import listed

# Annotations that exist for the type checker only can be told by name alone.
_BY_NAME = {"JobContext": "context", "Session": "session", "AsyncSession": "async_session"}
_NAME = re.compile(
    r"\s*(?:None\s*\|\s*|(?:typing\.)?Optional\[)?(?:\w+\.)*(?P<name>\w+)(?:\]|\s*\|\s*None)?\s*"
)


@dataclass(frozen=True)
class Signature:
    """The parameters of a handler. `session` and `context` name those that the worker fills.

    `types` says what the payload's JSON values stand for; None if they are all plain.
    """

    is_coroutine: bool
    context: str | None
    session: str | None
    required: frozenset[str]
    optional: frozenset[str]
    any_key: bool
    types: PayloadTypes | None = field(default=None, compare=False)

    def check_keys(self, handler: str, keys: Iterable[str]) -> None:
        """Raise InvalidJobError if a payload with these keys cannot be passed to the handler."""
        given = set(keys)
        missing = self.required - given
        extra = set() if self.any_key else given - self.required - self.optional
        injected = given & {self.context, self.session}
        if not (missing or extra or injected):
            return
        problems = [
            f"{what} {listed(sorted(names, key=str))}"
            for what, names in (("lacks", missing), ("has", extra | injected))
            if names
        ]
        raise InvalidJobError(
            f"the payload for handler {handler!r} {' and '.join(problems)}: its keys are the "
            f"handler's parameters {', '.join(sorted(self.required | self.optional)) or '(none)'}"
        )

    def arguments(self, job: ClaimedJob) -> dict[str, Any]:
        """Return a job's payload as arguments for the handler, or raise PayloadMisfitError."""
        try:
            payload = job.payload
            self.check_keys(job.handler, payload)
            if self.types is not None:
                self.types.decode(payload, job.payload_text)
        except (InvalidJobError, InvalidJobTypeError) as error:
            raise PayloadMisfitError(
                f"the payload of job {job.id} does not fit handler {job.handler!r} as it is here: "
                f"{error}"
            ) from None
        return payload


def read_signature(function: Callable[..., Any], handler: str) -> Signature:
    """Return what the function's signature says, or raise HandlerError with the way out."""
    where = f"handler {handler!r}"
    target: Any = inspect.unwrap(function)
    while isinstance(target, functools.partial):
        target = inspect.unwrap(target.func)
    call = target if inspect.isroutine(target) else getattr(target, "__call__", target)  # noqa: B004
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise HandlerError(f"{where} is a generator: calling it would run nothing; use a function")
    # The callable itself decides, not what it wraps: a wrapper may await it, or not.
    is_coroutine = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )
    injected: dict[str, str] = {}
    required: set[str] = set()
    optional: set[str] = set()
    taken: list[Parameter] = []
    rest: Parameter | None = None
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        raise HandlerError(
            f"{where} has no signature to read ({error}): wrap it in a function"
        ) from None
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            rest = Parameter(name, parameter.annotation)
            continue
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            raise HandlerError(
                f"{where}: parameter {name!r} is positional, but payload keys are passed by name: "
                "make it an ordinary or keyword-only parameter"
            )
        role = _role(parameter.annotation, call)
        if role is None:
            (required if parameter.default is parameter.empty else optional).add(name)
            taken.append(Parameter(name, parameter.annotation, parameter.default))
        elif role in injected:
            raise HandlerError(
                f"{where}: parameters {injected[role]!r} and {name!r} both ask for the {role}: "
                "one handler gets one"
            )
        else:
            injected[role] = name
    if is_coroutine and "session" in injected:
        raise HandlerError(
            f"{where} is a coroutine but asks for a Session, which would block the event loop: "
            "annotate AsyncSession, or make it a plain function"
        )
    if not is_coroutine and "async_session" in injected:
        raise HandlerError(
            f"{where} is a plain function but asks for an AsyncSession, which it cannot await: "
            "annotate Session, or make it async"
        )
    types = PayloadTypes(handler, call, taken, rest)
    return Signature(
        is_coroutine=is_coroutine,
        context=injected.get("context"),
        session=injected.get("session") or injected.get("async_session"),
        required=frozenset(required),
        optional=frozenset(optional),
        any_key=rest is not None,
        types=types or None,
    )


def _role(annotation: Any, function: Any) -> str | None:
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if isinstance(annotation, str):
        # Each by itself: one name that does not exist at run time must not hide the others.
        try:
            annotation = eval(annotation, getattr(function, "__globals__", {}))
        except Exception:
            found = _NAME.fullmatch(annotation)
            return _BY_NAME.get(found["name"]) if found else None
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _role(typing.get_args(annotation)[0], function)
    if origin is typing.Union or origin is types.UnionType:
        # `Session | None = None` lets a test call the handler without one.
        roles = {
            _role(member, function)
            for member in typing.get_args(annotation)
            if member is not types.NoneType
        }
        return roles.pop() if len(roles) == 1 else None
    if not isinstance(annotation, type):
        annotation = typing.get_origin(annotation)
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, JobContext):
        return "context"
    if issubclass(annotation, (Session, scoped_session)):
        return "session"
    if any(
        parent.__module__.startswith("sqlalchemy.ext.asyncio") and parent.__name__ == "AsyncSession"
        for parent in annotation.__mro__
    ):
        return "async_session"
    return None
