"""Alembic's environment in a checkout; alembic.ini says how to use it."""

from sa_jobs.migrations.runner import run_env

run_env()
