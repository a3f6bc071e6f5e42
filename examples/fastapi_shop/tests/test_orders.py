"""What an order enqueues, and what its handlers do, in a transaction that is rolled back."""

import pytest
from httpx import AsyncClient
from shop.jobs import REVIEW_AFTER, ask_for_review, confirm_order, jobs
from shop.models import Mail, Order
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from sa_jobs.testing import assert_enqueued, drain, refute_enqueued, run_job

pytestmark = pytest.mark.anyio

NEW = {"email": "ann@example.org", "product": "teapot"}


async def place_order(client: AsyncClient) -> int:
    response = await client.post("/orders", json=NEW)
    assert response.status_code == 201
    return int(response.json()["id"])


async def test_an_order_enqueues_its_confirmation(
    client: AsyncClient, session: AsyncSession
) -> None:
    order_id = await place_order(client)
    [job] = await assert_enqueued(session, confirm_order, {"order_id": order_id}, count=1)
    assert job.idempotency_key == f"order:{order_id}:confirm"
    await refute_enqueued(session, ask_for_review)


async def test_an_order_that_is_refused_enqueues_nothing(
    client: AsyncClient, session: AsyncSession
) -> None:
    response = await client.post("/orders", json={"product": "teapot"})
    assert response.status_code == 422
    await refute_enqueued(session, confirm_order)


async def test_a_rolled_back_order_takes_its_job_with_it(session: AsyncSession) -> None:
    order = Order(**NEW, quantity=1)
    session.add(order)
    await session.flush()
    await jobs.enqueue(session, confirm_order, {"order_id": order.id})
    await session.rollback()
    await refute_enqueued(session, confirm_order)


async def test_the_confirmation_writes_a_mail_and_asks_for_a_review_later(
    client: AsyncClient, session: AsyncSession
) -> None:
    order_id = await place_order(client)
    assert [one.status for one in await drain(session, jobs)] == ["done"]

    shown = await client.get(f"/orders/{order_id}")
    assert shown.json() == {
        "id": order_id,
        "status": "confirmed",
        "mails": ["Your order of teapot"],
    }
    await assert_enqueued(
        session, ask_for_review, {"order_id": order_id}, queue="mail", delay=REVIEW_AFTER
    )


async def test_a_week_later_the_review_is_asked_for(
    client: AsyncClient, session: AsyncSession
) -> None:
    await place_order(client)
    ran = await drain(session, jobs, advance=REVIEW_AFTER * 2)
    assert [one.job.handler for one in ran] == ["confirm_order", "ask_for_review"]
    mails = await session.scalars(select(Mail.subject).order_by(Mail.id))
    assert list(mails) == ["Your order of teapot", "How is your teapot?"]


async def test_a_confirmation_of_no_order_is_discarded(session: AsyncSession) -> None:
    job = await jobs.enqueue(session, confirm_order, {"order_id": 0})
    ran = await run_job(session, jobs, job)
    assert ran.status == "dead"
    assert "there is no order 0" in (ran.job.last_error or "")


async def test_an_absent_order_is_not_found(client: AsyncClient) -> None:
    assert (await client.get("/orders/0")).status_code == 404
