"""The tests' database is made by the shop's own chain, and each test's work is rolled back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flask_migrate
import pytest
from flask import Flask
from flask.testing import FlaskClient
from shop import create_app
from shop.extensions import db
from sqlalchemy import Engine
from sqlalchemy.orm import scoped_session


@pytest.fixture(scope="session")
def sa_jobs_metadata() -> None:
    """Leave the database of `sa_jobs_engine` empty: the migrations make the tables."""


@pytest.fixture(scope="session")
def migrations() -> str:
    """The folder of the shop's chain."""
    return str(Path(__file__).parents[1] / "migrations")


@pytest.fixture(scope="session")
def app(sa_jobs_engine: Engine, migrations: str) -> Iterator[Flask]:
    """The application on a database of the tests' own."""
    app = create_app({"TESTING": True, "SQLALCHEMY_DATABASE_URI": sa_jobs_engine.url})
    with app.app_context():
        flask_migrate.upgrade(migrations)
    yield app
    with app.app_context():
        db.engine.dispose()


@pytest.fixture
def session(app: Flask, monkeypatch: pytest.MonkeyPatch) -> Iterator[scoped_session[Any]]:
    """`db.session` in an application context, and in a transaction that is rolled back.

    What the shop commits ends a savepoint only.
    """
    with app.app_context(), db.engine.connect() as connection:
        transaction = connection.begin()
        monkeypatch.setitem(db.engines, None, connection)
        db.session.configure(join_transaction_mode="create_savepoint")
        yield db.session
        db.session.remove()
        transaction.rollback()


@pytest.fixture
def client(app: Flask, session: scoped_session[Any]) -> FlaskClient:
    """A client of the application, whose requests work in the test's transaction."""
    return app.test_client()
