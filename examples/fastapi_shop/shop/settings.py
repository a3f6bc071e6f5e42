"""What the environment says."""

import os

from sqlalchemy import URL, make_url

DEFAULT_URL = "postgresql://localhost/fastapi_shop"


def database_url() -> URL:
    """Return DATABASE_URL for psycopg, whose one name serves sync and async engines."""
    url = make_url(os.environ.get("DATABASE_URL", DEFAULT_URL))
    return url.set(drivername="postgresql+psycopg")


def runs_worker() -> bool:
    """Return whether the application is to run a worker beside itself, for development."""
    return os.environ.get("SHOP_WORKER", "0") == "1"
