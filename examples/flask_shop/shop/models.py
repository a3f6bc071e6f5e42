"""The shop's tables. Those of the queue are attached beside them, in `extensions`."""

import datetime as dt

from sqlalchemy import Date, DateTime, ForeignKey, Text, func
from sqlalchemy.orm import Mapped, mapped_column

from shop.extensions import Base


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str] = mapped_column(Text)
    product: Mapped[str] = mapped_column(Text)
    cents: Mapped[int]
    placed_at: Mapped[dt.datetime] = mapped_column(
        DateTime(timezone=True), server_default=func.now()
    )
    paid_at: Mapped[dt.datetime | None] = mapped_column(DateTime(timezone=True))


class Mail(Base):
    """A mail that was sent. A real shop would hand it to its mail server."""

    __tablename__ = "mails"

    id: Mapped[int] = mapped_column(primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey("orders.id"))
    subject: Mapped[str] = mapped_column(Text)


class Report(Base):
    """What was sold on a day."""

    __tablename__ = "reports"

    day: Mapped[dt.date] = mapped_column(Date, primary_key=True)
    orders: Mapped[int]
    cents: Mapped[int]
