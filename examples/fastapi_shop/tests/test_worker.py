"""The development worker, in the lifespan of the application, on data that is committed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
from httpx import ASGITransport, AsyncClient
from shop.app import create_app
from sqlalchemy import URL, Engine, text

pytestmark = pytest.mark.anyio

SECONDS = 60


@asynccontextmanager
async def shop(url: URL, *, worker: bool) -> AsyncIterator[AsyncClient]:
    """Run the application with its lifespan, which the transport alone does not."""
    app = create_app(url, worker=worker)
    async with (
        app.router.lifespan_context(app),
        AsyncClient(transport=ASGITransport(app), base_url="http://shop") as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def _nothing_left(sa_jobs_engine: Engine) -> Iterator[None]:
    """Delete what these tests commit: the others see only what is theirs."""
    yield
    with sa_jobs_engine.begin() as connection:
        connection.execute(text("TRUNCATE orders, mails, sa_jobs, sa_jobs_failures"))


async def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not so within {SECONDS} s"
        await asyncio.sleep(0.1)


def status(engine: Engine, order_id: int) -> str:
    query = text("SELECT status FROM sa_jobs WHERE idempotency_key = :key")
    with engine.connect() as connection:
        key = {"key": f"order:{order_id}:confirm"}
        return str(connection.execute(query, key).scalar_one())


def connections(engine: Engine) -> int:
    """Return how many connections the worker holds."""
    query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'sa-jobs %'")
    with engine.connect() as connection:
        return int(connection.execute(query).scalar_one())


async def place_order(client: AsyncClient) -> int:
    placed = await client.post("/orders", json={"email": "ann@example.org", "product": "teapot"})
    return int(placed.json()["id"])


async def test_the_worker_beside_the_application_confirms_an_order(
    database_url: URL, sa_jobs_engine: Engine
) -> None:
    async with shop(database_url, worker=True) as client:
        order_id = await place_order(client)
        await wait_until(lambda: status(sa_jobs_engine, order_id) == "done")
        shown = (await client.get(f"/orders/{order_id}")).json()
    assert shown == {"id": order_id, "status": "confirmed", "mails": ["Your order of teapot"]}


async def test_the_worker_ends_with_the_application(
    database_url: URL, sa_jobs_engine: Engine
) -> None:
    async with shop(database_url, worker=True):
        await wait_until(lambda: connections(sa_jobs_engine) > 0)
    # The server notices an end a moment later.
    await wait_until(lambda: connections(sa_jobs_engine) == 0)


async def test_without_a_worker_a_job_waits(database_url: URL, sa_jobs_engine: Engine) -> None:
    async with shop(database_url, worker=False) as client:
        order_id = await place_order(client)
    assert status(sa_jobs_engine, order_id) == "ready"
