"""A worker inside the web process, for development: `SHOP_WORKER=1 uvicorn --reload ...`."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy.ext.asyncio import AsyncEngine

from sa_jobs import Worker
from shop.jobs import jobs

logger = logging.getLogger(__name__)


@asynccontextmanager
async def development_worker(engine: AsyncEngine) -> AsyncIterator[None]:
    """Run a worker on a thread of its own for the block, and let it drain at the end.

    It makes its own connections from the engine: asynchronous ones belong to one event loop, and
    the worker has another one than the web server.
    """
    worker = Worker(engine, jobs, queues=["default", "mail"], concurrency=2, grace=5)

    def run() -> None:
        try:
            worker.run()
        except Exception:
            # Such as absent tables. The application itself goes on.
            logger.exception("the development worker has ended")

    thread = threading.Thread(target=run, name="development-worker")
    thread.start()
    try:
        yield
    finally:
        worker.stop()
        await asyncio.to_thread(thread.join)
