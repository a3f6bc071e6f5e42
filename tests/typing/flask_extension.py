"""The Flask extension as users write it. Checked by mypy, never run."""

from __future__ import annotations

from typing import Any

import flask_sqlalchemy
import flask_sqlalchemy_lite
from flask import Flask
from sqlalchemy import Engine
from typing_extensions import assert_type

from sa_jobs import Enqueued, Jobs, Worker, attach, dispose_after_fork, enqueue
from sa_jobs.flask import SAJobs

db = flask_sqlalchemy.SQLAlchemy()
lite = flask_sqlalchemy_lite.SQLAlchemy()
jobs = Jobs(attach(db.Model))
extension = SAJobs(jobs, db)
later = SAJobs(command="queue")


def create_app(config: dict[str, Any]) -> Flask:
    app = Flask(__name__)
    app.config |= config
    db.init_app(app)
    extension.init_app(app)
    later.init_app(Flask("other"), jobs, lite)
    SAJobs(jobs, lite, app=app)
    return app


def use(app: Flask, engine: Engine) -> None:
    with app.app_context():
        assert_type(enqueue(db.session, "send"), Enqueued)
        assert_type(enqueue(lite.session, "send"), Enqueued)
        assert_type(extension.worker(concurrency=1), Worker)
    assert_type(extension.jobs, Jobs)
    dispose_after_fork(engine)


def what_the_checker_refuses(app: Flask) -> None:
    SAJobs(db, jobs)  # type: ignore[arg-type]
    SAJobs(jobs, db.session)  # type: ignore[arg-type]
    extension.init_app(jobs)  # type: ignore[arg-type]
