"""Handlers whose annotations are evaluated at definition, and not postponed."""

from typing import Annotated, Optional

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sa_jobs import JobContext


def everything(invoice_id: int, session: Session, ctx: JobContext, note: str = "") -> None: ...


async def coroutine(invoice_id: int, session: AsyncSession, ctx: JobContext) -> None: ...


def by_annotated(db: Annotated[Session, "ours"]) -> None: ...


def by_optional(db: Optional[Session] = None) -> None: ...  # noqa: UP045


def by_union(db: Session | None = None) -> None: ...


def by_reference(db: Optional["Session"] = None) -> None: ...
