"""The extensions, which the application factory initializes."""

from flask_migrate import Migrate
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy.orm import DeclarativeBase

from sa_jobs import Jobs, attach
from sa_jobs.flask import SAJobs


class Base(DeclarativeBase):
    """The base of the models."""


db = SQLAlchemy(model_class=Base)
migrate = Migrate()
registry = Jobs(attach(Base))
sa_jobs = SAJobs(registry, db)
