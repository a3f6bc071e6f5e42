"""The shop's chain of revisions makes what its models and sa-jobs need."""

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine


def test_the_chain_is_complete(sa_jobs_engine: Engine, chain: Config) -> None:
    with sa_jobs_engine.connect() as connection:
        chain.attributes["connection"] = connection
        # Raises CommandError if autogenerate would add anything.
        command.check(chain)
