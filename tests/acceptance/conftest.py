"""A database with the queue's tables and those of the acceptance tests' application."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from tests.acceptance.app import metadata


@pytest.fixture
def app_database(database_url: str, engine: Engine) -> str:
    """The URL of a database that the application's workers can work on."""
    metadata.create_all(engine)
    return database_url
