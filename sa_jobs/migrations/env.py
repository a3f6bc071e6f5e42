"""Alembic's environment for the steps alone: `script_location = sa_jobs:migrations`."""

from sa_jobs.migrations.runner import run_env

run_env()
