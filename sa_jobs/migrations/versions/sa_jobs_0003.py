"""Add the archive, and the indexes by which finished jobs are found."""

from __future__ import annotations

from sa_jobs.migrations._ddl import Target, applies, undoes
from sa_jobs.migrations._steps import Step

revision = "sa_jobs_0003"
down_revision = "sa_jobs_0002"
branch_labels = None
depends_on = None

STEP = Step(
    revision,
    down_revision,
    phase="expand",
    min_client="0.1.0",
    released_in="0.1.0",
    summary="Add the archive, and the indexes by which old jobs and failures are found.",
)


def prepare(target: Target) -> None:
    """Build the indexes, on tables that may be large."""
    target.create_index("_finished_idx", "(finished_at) WHERE status IN ('done', 'cancelled')")
    target.create_index("_failures_failed_at_idx", "(failed_at)", on="_failures")


@applies(STEP)
def upgrade(target: Target) -> None:
    """Build the indexes, then create the archive."""
    prepare(target)
    target.run(f"""\
CREATE TABLE {target.table("_archive")} (
    id bigint NOT NULL,
    queue text NOT NULL,
    handler text NOT NULL,
    payload jsonb NOT NULL,
    status text NOT NULL,
    priority smallint NOT NULL,
    tenant text,
    run_at timestamp with time zone NOT NULL,
    scheduled_for timestamp with time zone,
    attempts bigint NOT NULL,
    max_attempts bigint NOT NULL,
    claim_no bigint NOT NULL,
    locked_by text,
    claimed_at timestamp with time zone,
    leased_until timestamp with time zone,
    cancel_requested_at timestamp with time zone,
    idempotency_key text,
    unique_key text,
    result jsonb,
    last_error text,
    meta jsonb NOT NULL,
    created_at timestamp with time zone NOT NULL,
    updated_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    schedule text,
    archived_at timestamp with time zone DEFAULT now() NOT NULL,
    CONSTRAINT "{target.name}_archive_pkey" PRIMARY KEY (id)
)""")


def discard(target: Target) -> None:
    """Drop the indexes."""
    target.drop_index("_failures_failed_at_idx", on="_failures")
    target.drop_index("_finished_idx")


@undoes(STEP)
def downgrade(target: Target) -> None:
    """Drop the archive, with the jobs in it, and the indexes."""
    target.drop_tables("_archive")
    discard(target)
