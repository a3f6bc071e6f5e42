"""The shop's tables, and beside them those of sa-jobs."""

from sqlalchemy import ForeignKey
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import sa_jobs


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    product: Mapped[str]
    quantity: Mapped[int]
    status: Mapped[str] = mapped_column(default="new")


class Mail(Base):
    """Stands for the mail server of a real shop."""

    __tablename__ = "mails"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    recipient: Mapped[str]
    subject: Mapped[str]


tables = sa_jobs.attach(Base)
