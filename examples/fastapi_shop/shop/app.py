"""The web application: `uvicorn --factory shop.app:create_app`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import URL, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from shop.jobs import confirm_order, jobs
from shop.models import Mail, Order
from shop.settings import database_url, runs_worker
from shop.worker import development_worker


class NewOrder(BaseModel):
    email: str
    product: str
    quantity: int = 1


class OrderView(BaseModel):
    id: int
    status: str
    mails: list[str]


async def get_session(request: Request) -> AsyncIterator[AsyncSession]:
    async with request.app.state.sessions() as session:
        yield session


DatabaseSession = Annotated[AsyncSession, Depends(get_session)]


def create_app(url: URL | None = None, *, worker: bool | None = None) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine = create_async_engine(database_url() if url is None else url)
        app.state.sessions = async_sessionmaker(engine, expire_on_commit=False)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(engine.dispose)
            if runs_worker() if worker is None else worker:
                await stack.enter_async_context(development_worker(engine))
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/orders", status_code=201)
    async def place_order(new: NewOrder, session: DatabaseSession) -> OrderView:
        order = Order(**new.model_dump())
        session.add(order)
        await session.flush()
        await jobs.enqueue(
            session,
            confirm_order,
            {"order_id": order.id},
            idempotency_key=f"order:{order.id}:confirm",
        )
        # The order and its job, or neither.
        await session.commit()
        return OrderView(id=order.id, status=order.status, mails=[])

    @app.get("/orders/{order_id}")
    async def show_order(order_id: int, session: DatabaseSession) -> OrderView:
        order = await session.get(Order, order_id)
        if order is None:
            raise HTTPException(404, f"there is no order {order_id}")
        mails = await session.scalars(
            select(Mail.subject).where(Mail.order_id == order_id).order_by(Mail.id)
        )
        return OrderView(id=order.id, status=order.status, mails=list(mails))

    return app
