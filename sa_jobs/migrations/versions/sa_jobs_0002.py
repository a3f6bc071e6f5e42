"""Add the schedules and the settings of queues."""

from __future__ import annotations

from sa_jobs.migrations._ddl import Target, applies, undoes
from sa_jobs.migrations._steps import Step

revision = "sa_jobs_0002"
down_revision = "sa_jobs_0001"
branch_labels = None
depends_on = None

STEP = Step(
    revision,
    down_revision,
    phase="expand",
    min_client="0.1.0",
    released_in="0.1.0",
    summary="Add the schedules, the jobs they make, and the settings of queues.",
)


def prepare(target: Target) -> None:
    """Add the column and its index, which hold one job for each time that a schedule names."""
    target.alter(f"ALTER TABLE {target.table()} ADD COLUMN IF NOT EXISTS schedule text")
    target.create_index(
        "_schedule_idx",
        "(schedule, scheduled_for) WHERE schedule IS NOT NULL",
        unique=True,
    )


@applies(STEP)
def upgrade(target: Target) -> None:
    """Add the two tables, and to the jobs what is prepared."""
    prepare(target)
    target.run(f"""\
CREATE TABLE {target.table("_queues")} (
    queue text NOT NULL,
    paused_at timestamp with time zone,
    tenant_limit bigint,
    running_limit bigint,
    rate_limit bigint,
    rate_period interval,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "{target.name}_queues_pkey" PRIMARY KEY (queue),
    CONSTRAINT "{target.name}_queues_rate_check"
        CHECK ((rate_limit IS NULL) = (rate_period IS NULL))
)""")
    target.run(f"""\
CREATE TABLE {target.table("_schedules")} (
    name text NOT NULL,
    cron text,
    every interval,
    timezone text DEFAULT 'UTC' NOT NULL,
    handler text NOT NULL,
    queue text NOT NULL,
    payload jsonb DEFAULT '{{}}' NOT NULL,
    priority smallint DEFAULT 0 NOT NULL,
    max_attempts bigint DEFAULT 20 NOT NULL,
    tenant text,
    misfire text DEFAULT 'coalesce' NOT NULL,
    grace interval,
    paused_at timestamp with time zone,
    disabled_at timestamp with time zone,
    next_due_at timestamp with time zone,
    last_due_at timestamp with time zone,
    created_at timestamp with time zone DEFAULT now() NOT NULL,
    updated_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "{target.name}_schedules_pkey" PRIMARY KEY (name),
    CONSTRAINT "{target.name}_schedules_cadence_check"
        CHECK ((cron IS NULL) <> (every IS NULL)),
    CONSTRAINT "{target.name}_schedules_misfire_check"
        CHECK (misfire IN ('skip', 'coalesce', 'all'))
)""")


def discard(target: Target) -> None:
    """Drop the column, with its index."""
    target.alter(f"ALTER TABLE {target.table()} DROP COLUMN IF EXISTS schedule")


@undoes(STEP)
def downgrade(target: Target) -> None:
    """Drop the two tables, and what is prepared."""
    target.drop_tables("_schedules", "_queues")
    discard(target)
