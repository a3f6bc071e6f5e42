"""add job queue"""

import sa_jobs.migrations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    sa_jobs.migrations.upgrade("sa_jobs_0003", from_=None, schema=None, name="sa_jobs")


def downgrade() -> None:
    sa_jobs.migrations.downgrade(None, from_="sa_jobs_0003", schema=None, name="sa_jobs")
