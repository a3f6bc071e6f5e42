"""The registry of handlers: names, policies, and what it refuses before any SQL."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from sa_jobs import HandlerError, InvalidJobError, InvalidJobTypeError, Jobs, UnknownHandlerError
from sa_jobs.backoff import fixed
from sa_jobs.job_options import handler_name


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


def test_a_handler_stays_callable_and_is_the_same_function(jobs: Jobs) -> None:
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert jobs.handler("add")(add) is add
    assert add(2) == 3


def test_a_handler_is_called_like_its_function_by_default(jobs: Jobs) -> None:
    @jobs.handler
    def one() -> None: ...

    @jobs.handler()
    def two() -> None: ...

    assert jobs.names == ["one", "two"]


def test_a_handler_is_found_by_its_name_and_by_its_function(jobs: Jobs) -> None:
    @jobs.handler("mail.send")
    def send() -> None: ...

    assert jobs[send] is jobs["mail.send"]
    assert [handler.function for handler in jobs] == [send]
    assert len(jobs) == 1


def test_a_policy_is_kept(jobs: Jobs) -> None:
    backoff = fixed(3)

    @jobs.handler(
        queue="mail",
        priority=-7,
        max_attempts=3,
        backoff=backoff,
        timeout=dt.timedelta(minutes=1),
    )
    def send() -> None: ...

    handler = jobs["send"]
    assert (handler.queue, handler.priority, handler.max_attempts) == ("mail", -7, 3)
    assert handler.backoff is backoff
    assert handler.timeout == 60.0


def test_a_taken_name_is_refused(jobs: Jobs) -> None:
    @jobs.handler("send")
    def first() -> None: ...

    with pytest.raises(HandlerError, match="handler 'send' is registered already"):

        @jobs.handler("send")
        def second() -> None: ...

    assert jobs["send"].function is first


def test_a_refused_handler_leaves_its_name_free(jobs: Jobs) -> None:
    with pytest.raises(HandlerError):
        jobs.handler("send")(lambda *args: None)
    jobs.handler("send")(lambda: None)
    assert jobs.names == ["send"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"queue": ""}, InvalidJobError),
        ({"queue": None}, InvalidJobTypeError),
        ({"priority": 40_000}, InvalidJobError),
        ({"max_attempts": 0}, InvalidJobError),
        ({"timeout": -1}, InvalidJobError),
        ({"timeout": 0}, InvalidJobError),
        ({"timeout": "60"}, InvalidJobTypeError),
        ({"backoff": 5}, HandlerError),
    ],
)
def test_a_policy_that_cannot_be_is_refused(
    jobs: Jobs, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        jobs.handler("send", **options)(lambda: None)
    assert jobs.names == []


@pytest.mark.parametrize("name", ["x" * 201, "a\nb", "a\x00b"])
def test_a_name_that_cannot_be_stored_is_refused(jobs: Jobs, name: str) -> None:
    with pytest.raises(InvalidJobError, match="handler"):
        jobs.handler(name)(lambda: None)


def test_what_cannot_be_called_is_refused(jobs: Jobs) -> None:
    with pytest.raises(HandlerError, match="must be a function, not 5"):
        jobs.handler(5)  # type: ignore[call-overload]


class Mailer:
    def send(self, address: str) -> None: ...


def test_a_bound_method_can_be_a_handler(jobs: Jobs) -> None:
    mailer = Mailer()
    jobs.handler("send")(mailer.send)
    assert jobs[mailer.send].signature.required == {"address"}


def test_the_bare_functions_take_a_registered_function(jobs: Jobs) -> None:
    @jobs.handler("mail.send")
    def send() -> None: ...

    assert handler_name(send) == "mail.send"


@pytest.mark.parametrize("handler", [len, Mailer().send, 5, None, b"send"])
def test_the_bare_functions_refuse_what_is_not_registered(handler: Any) -> None:
    with pytest.raises(InvalidJobTypeError, match="must be a name or a registered function"):
        handler_name(handler)


@pytest.fixture
def session() -> Session:
    """A session that can reach no database: every call below must be refused before it tries."""
    return Session()


@pytest.fixture
def receipts() -> Jobs:
    jobs = Jobs()

    @jobs.handler("send_receipt")
    def send_receipt(invoice_id: int, note: str = "") -> None: ...

    return jobs


@pytest.mark.parametrize("handler", ["send_recipt", "SEND_RECEIPT", "send_receipt ", len])
def test_an_unknown_handler_is_refused_with_those_that_exist(
    receipts: Jobs, session: Session, handler: Any
) -> None:
    with pytest.raises(UnknownHandlerError, match="there are: send_receipt"):
        receipts.enqueue(session, handler, {"invoice_id": 1})
    with pytest.raises(UnknownHandlerError):
        receipts.enqueue_many(session, handler, [{"invoice_id": 1}])
    with pytest.raises(UnknownHandlerError):
        receipts.enqueue_from_select(session, handler, select(1))


@pytest.mark.parametrize("payload", [None, {}, {"note": "x"}, {"invoice_id": 1, "nota": 2}])
def test_a_payload_that_does_not_fit_the_signature_is_refused(
    receipts: Jobs, session: Session, payload: Any
) -> None:
    with pytest.raises(InvalidJobError, match="the payload for handler 'send_receipt"):
        receipts.enqueue(session, "send_receipt", payload)


def test_a_payload_that_does_not_fit_is_named_by_its_row(receipts: Jobs, session: Session) -> None:
    with pytest.raises(InvalidJobError, match=r"row 1.* lacks 'invoice_id'"):
        receipts.enqueue_many(session, "send_receipt", [{"invoice_id": 1}, {}])


@pytest.mark.parametrize("payload", [5, "invoice_id", ["invoice_id"], {"invoice_id"}])
def test_a_payload_that_is_no_mapping_is_refused(
    receipts: Jobs, session: Session, payload: Any
) -> None:
    with pytest.raises((InvalidJobError, InvalidJobTypeError)):
        receipts.enqueue(session, "send_receipt", payload)


def test_a_callable_that_is_not_hashable_is_refused_whole() -> None:
    class Callable:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self) -> None: ...

    jobs = Jobs()
    with pytest.raises(HandlerError, match="not hashable"):
        jobs.handler("odd")(Callable())

    assert jobs.names == []
