"""What a job carries beside its payload: a few JSON values that are not the handler's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sa_jobs import jsontext
from sa_jobs.errors import InvalidJobError, InvalidJobTypeError

Meta = Mapping[str, Any]

MAX_META_BYTES = 10_000
# Where a heartbeat stores what the handler reports.
PROGRESS = "progress"


def meta_text(meta: Any) -> str:
    """Return a job's meta as JSON text, or raise the error that names what is wrong with it."""
    if not isinstance(meta, Mapping):
        raise InvalidJobTypeError(f"meta must be a dict of JSON values, not {type(meta).__name__}")
    if PROGRESS in meta:
        raise InvalidJobError(
            f"meta has the key {PROGRESS!r}, where ctx.progress() stores its value: name it "
            "otherwise"
        )
    return jsontext.dumps(dict(meta), what="meta", max_bytes=MAX_META_BYTES)


def meta_of(text: str) -> dict[str, Any]:
    """Return a job's meta from its JSON text; what plain SQL has written there may be no object."""
    meta = jsontext.loads(text)
    return meta if isinstance(meta, dict) else {}
