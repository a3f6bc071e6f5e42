"""A small shop: its web application, and its jobs."""

import os
from typing import Any

from flask import Flask

from shop.extensions import db, migrate, sa_jobs
from shop.views import shop


def create_app(config: dict[str, Any] | None = None) -> Flask:
    """Return the application; `config` is for tests."""
    app = Flask(__name__)
    app.config.from_mapping(
        SQLALCHEMY_DATABASE_URI=os.environ.get(
            "DATABASE_URL", "postgresql+psycopg://localhost/flask_shop"
        ),
        PARTNER_URL=None,
        SA_JOBS_CONCURRENCY=4,
    )
    # FLASK_PARTNER_URL, FLASK_SA_JOBS_CONCURRENCY, ...
    app.config.from_prefixed_env()
    app.config.from_mapping(config or {})

    app.register_blueprint(shop)

    db.init_app(app)
    migrate.init_app(app, db)
    sa_jobs.init_app(app)
    return app
