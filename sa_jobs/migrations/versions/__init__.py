"""The steps: real Alembic revisions, immutable once released, and kept for ever."""
