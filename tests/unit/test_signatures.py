"""What a handler's signature says: what the worker injects, and what the payload must hold."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Optional

import pytest
from sqlalchemy import orm
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, scoped_session

from sa_jobs import JobContext
from sa_jobs.errors import HandlerError, InvalidJobError
from sa_jobs.signatures import Signature, read_signature
from tests.unit import plain_annotations


class MySession(Session):
    pass


class MyAsyncSession(AsyncSession):
    pass


class MyContext(JobContext):
    pass


def read(function: Callable[..., Any]) -> Signature:
    return read_signature(function, "h")


def everything(invoice_id: int, session: Session, ctx: JobContext, note: str = "") -> None: ...


async def coroutine(invoice_id: int, session: AsyncSession, ctx: JobContext) -> None: ...


@pytest.mark.parametrize("function", [everything, plain_annotations.everything])
def test_a_function_is_given_its_session_and_context(function: Callable[..., Any]) -> None:
    assert read(function) == Signature(
        is_coroutine=False,
        context="ctx",
        session="session",
        required=frozenset({"invoice_id"}),
        optional=frozenset({"note"}),
        any_key=False,
    )


@pytest.mark.parametrize("function", [coroutine, plain_annotations.coroutine])
def test_a_coroutine_is_given_its_session_and_context(function: Callable[..., Any]) -> None:
    signature = read(function)
    assert signature.is_coroutine
    assert (signature.context, signature.session) == ("ctx", "session")
    assert signature.required == {"invoice_id"}


def by_subclass(db: MySession) -> None: ...
def by_module(db: orm.Session) -> None: ...
def by_scoped_session(db: scoped_session[Session]) -> None: ...
def by_annotated(db: Annotated[Session, "ours"]) -> None: ...
def by_optional(db: Optional[Session] = None) -> None: ...  # noqa: UP045
def by_union(db: Session | None = None) -> None: ...
def by_both(db: Annotated[Session | None, "ours"] = None) -> None: ...
def by_reference(db: Optional["Session"] = None) -> None: ...  # noqa: UP037, UP045
def by_keyword(*, db: Session) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        by_subclass,
        by_module,
        by_scoped_session,
        by_annotated,
        by_optional,
        by_union,
        by_both,
        by_reference,
        by_keyword,
        plain_annotations.by_annotated,
        plain_annotations.by_optional,
        plain_annotations.by_union,
        plain_annotations.by_reference,
    ],
)
def test_a_session_may_be_asked_for_in_other_words(function: Callable[..., Any]) -> None:
    signature = read(function)
    assert signature.session == "db"
    assert not signature.required | signature.optional


def context_by_subclass(job: MyContext) -> None: ...
def context_by_union(job: JobContext | None = None) -> None: ...


@pytest.mark.parametrize("function", [context_by_subclass, context_by_union])
def test_a_context_may_be_asked_for_in_other_words(function: Callable[..., Any]) -> None:
    assert read(function).context == "job"


def test_an_async_session_may_be_a_subclass() -> None:
    async def function(db: MyAsyncSession) -> None: ...

    # The name is local, so that it does not exist where annotations are evaluated.
    function.__annotations__["db"] = MyAsyncSession
    assert read(function).session == "db"


def annotated_with(**annotations: str) -> Callable[..., Any]:
    def function(db: Any, amount: Any) -> None: ...

    function.__annotations__.update(annotations)
    return function


@pytest.mark.parametrize(
    "annotation",
    [
        "checker_only.Session",
        "checker_only.Session | None",
        "None | checker_only.Session",
        "Optional[checker_only.Session]",
        "typing.Optional[checker_only.Session]",
    ],
)
def test_a_name_that_only_the_type_checker_imports_is_told_by_its_last_part(
    annotation: str,
) -> None:
    signature = read(annotated_with(db=annotation, amount="checker_only.Money"))
    assert signature.session == "db"
    assert signature.required == {"amount"}


@pytest.mark.parametrize(
    "annotation", ["checker_only.Sessions", "list[checker_only.Session]", "SessionLike", "1 +"]
)
def test_another_unknown_name_is_a_payload_key(annotation: str) -> None:
    assert read(annotated_with(db=annotation)).required == {"db", "amount"}


def test_a_name_that_does_not_exist_does_not_hide_the_others() -> None:
    signature = read(annotated_with(db="Session", amount="DoesNotExist"))
    assert signature.session == "db"


def test_a_parameter_without_annotation_is_a_payload_key() -> None:
    def function(session, ctx):  # type: ignore[no-untyped-def]
        ...

    assert read(function).required == {"session", "ctx"}


def test_any_key_fits_a_handler_that_takes_them_all() -> None:
    def function(a: int, **rest: Any) -> None: ...

    signature = read(function)
    assert signature.any_key
    signature.check_keys("h", {"a", "b", "c"})


class Mailer:
    def send(self, address: str, session: Session) -> None: ...

    def __call__(self, address: str, ctx: JobContext) -> None: ...

    @staticmethod
    async def asend(address: str, ctx: JobContext) -> None: ...


def test_a_bound_method_does_not_ask_for_self() -> None:
    signature = read(Mailer().send)
    assert (signature.session, signature.required) == ("session", frozenset({"address"}))


def test_an_object_that_can_be_called_is_read_like_a_function() -> None:
    signature = read(Mailer())
    assert (signature.context, signature.required) == ("ctx", frozenset({"address"}))


def test_a_static_coroutine_is_a_coroutine() -> None:
    assert read(Mailer.asend).is_coroutine


def test_a_decorated_function_is_read_through_its_wrapper() -> None:
    @functools.wraps(everything)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return everything(*args, **kwargs)

    assert read(wrapper) == read(everything)


def test_a_partial_function_keeps_its_annotations_and_lacks_nothing_that_it_binds() -> None:
    signature = read(functools.partial(everything, note="x", invoice_id=1))
    assert (signature.session, signature.context) == ("session", "ctx")
    assert signature.required == frozenset()


def test_a_partial_coroutine_is_a_coroutine() -> None:
    assert read(functools.partial(coroutine, invoice_id=1)).is_coroutine


def sync_asks_async(db: AsyncSession) -> None: ...
async def async_asks_sync(db: Session) -> None: ...
async def async_asks_scoped(db: scoped_session[Session]) -> None: ...
def asks_twice(one: Session, two: Session) -> None: ...
def asks_two_contexts(one: JobContext, two: JobContext) -> None: ...
def positional_only(a: int, /) -> None: ...
def var_positional(*a: int) -> None: ...
def generator(a: int) -> Iterator[int]:
    yield a


async def async_generator(a: int) -> AsyncIterator[int]:
    yield a


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (sync_asks_async, "annotate Session, or make it async"),
        (async_asks_sync, "annotate AsyncSession, or make it a plain function"),
        (async_asks_scoped, "annotate AsyncSession"),
        (asks_twice, "parameters 'one' and 'two' both ask for the session"),
        (asks_two_contexts, "parameters 'one' and 'two' both ask for the context"),
        (positional_only, "parameter 'a' is positional"),
        (var_positional, "parameter 'a' is positional"),
        (generator, "is a generator"),
        (async_generator, "is a generator"),
        (functools.partial(generator, a=1), "is a generator"),
        (dict.update, "'h'"),
        (type, "'h'"),
    ],
)
def test_a_function_that_cannot_be_run_is_refused_with_the_way_out(
    function: Callable[..., Any], problem: str
) -> None:
    with pytest.raises(HandlerError) as caught:
        read(function)
    assert "handler 'h'" in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ((), "lacks 'invoice_id'"),
        (("invoice_id", "nota"), "has 'nota'"),
        (("note", "x", "y"), "lacks 'invoice_id' and has 'x', 'y'"),
        (("invoice_id", "session"), "has 'session'"),
        (("invoice_id", "ctx"), "has 'ctx'"),
    ],
)
def test_a_payload_that_does_not_fit_is_refused(keys: tuple[str, ...], problem: str) -> None:
    with pytest.raises(InvalidJobError) as caught:
        read(everything).check_keys("send", keys)
    assert f"the payload for handler 'send' {problem}:" in str(caught.value)
    assert "invoice_id, note" in str(caught.value) or "'invoice_id', 'note'" in str(caught.value)


@pytest.mark.parametrize("keys", [("invoice_id",), ("invoice_id", "note")])
def test_a_payload_that_fits_is_taken(keys: tuple[str, ...]) -> None:
    read(everything).check_keys("send", keys)


def test_an_injected_name_is_no_payload_key_even_where_any_key_fits() -> None:
    def function(session: Session, **rest: Any) -> None: ...

    with pytest.raises(InvalidJobError, match="has 'session'"):
        read(function).check_keys("h", {"session"})
