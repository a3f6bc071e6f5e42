"""Enqueue in sessions as applications have them: routed, bound, two-phase, in fixtures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from flask import Flask
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import (
    Connection,
    Engine,
    MetaData,
    NullPool,
    create_engine,
    event,
    func,
    insert,
    literal,
    select,
    text,
    update,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sa_jobs import (
    InvalidJobTypeError,
    Row,
    attach,
    cancel,
    enqueue,
    enqueue_from_select,
    enqueue_many,
    presence,
    retry,
)
from sa_jobs.models import DEFAULT_TABLES, Job
from tests.support.jobs import all_jobs, claim, job


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    note: Mapped[str] = mapped_column(default="")


@pytest.fixture
def host(engine: Engine) -> Engine:
    """The engine of an application with a table of its own beside the queue's."""
    Base.metadata.create_all(engine)
    return engine


def test_what_enqueue_returns_outlives_the_session(host: Engine) -> None:
    with Session(host, expire_on_commit=True) as session:
        enqueued = enqueue(session, "send")
        session.commit()
    assert enqueued.id > 0
    assert enqueued.created


def test_pending_objects_are_flushed_before_the_job(host: Engine) -> None:
    with Session(host, autoflush=False) as session:
        order = Order()
        session.add(order)
        assert enqueue_from_select(session, "send", select(Order.id)) == 1
        session.commit()
        assert session.scalars(select(Job.payload)).one() == {"id": order.id}


def test_a_select_of_a_mapped_class_gives_its_columns(host: Engine) -> None:
    with Session(host) as session:
        session.add(Order(id=7, note="soon"))
        assert enqueue_from_select(session, "send", select(Order)) == 1
        assert session.scalars(select(Job.payload)).one() == {"id": 7, "note": "soon"}


def test_an_orm_object_is_no_payload(host: Engine) -> None:
    with Session(host) as session:
        order = Order()
        session.add(order)
        with pytest.raises(InvalidJobTypeError, match=r"payload\['order'\].*Order.*pass its id"):
            enqueue(session, "send", {"order": order})
        session.commit()
        assert session.scalars(select(Order.id)).all() == [order.id]


def test_a_hosts_failing_commit_hook_is_none_of_ours(host: Engine, connection: Connection) -> None:
    with Session(host) as session:

        @event.listens_for(session, "after_commit")
        def fail(session: Session) -> None:
            raise RuntimeError("the host's own")

        enqueue(session, "send")
        with pytest.raises(RuntimeError, match="the host's own"):
            session.commit()
    assert len(all_jobs(connection)) == 1


def test_nothing_is_seen_outside_the_usual_rollback_fixture(
    host: Engine, connection: Connection
) -> None:
    with host.connect() as outer:
        transaction = outer.begin()
        with Session(outer, join_transaction_mode="create_savepoint") as session:
            first = enqueue(session, "send", idempotency_key="k")
            session.commit()
            assert enqueue(session, "send", idempotency_key="k").id == first.id
            session.rollback()
            assert session.scalars(select(Job.id)).all() == [first.id]
        transaction.rollback()
    assert all_jobs(connection) == []


def test_an_engines_own_json_serializer_changes_nothing(
    database_url: str, connection: Connection
) -> None:
    engine = create_engine(
        database_url,
        json_serializer=lambda value: json.dumps(["broken", str(value)]),
        json_deserializer=lambda text: "broken",
    )
    with Session(engine) as session:
        enqueue(session, "send", {"a": [1, "é"]})
        enqueue_many(session, "send", [{"a": 2}])
        enqueue_from_select(session, "send", select(literal(3).label("a")))
        enqueue(session, "send", {"a": 0}, unique_key="k")
        enqueue(session, "send", {"a": 4}, unique_key="k", on_conflict="replace")
        session.commit()
    with engine.connect() as claiming:
        assert [one.payload for one in claim(claiming, 4)] == [
            {"a": [1, "é"]},
            {"a": 2},
            {"a": 3},
            {"a": 4},
        ]
    engine.dispose()
    assert [row.payload for row in all_jobs(connection)][1:] == [{"a": 2}, {"a": 3}, {"a": 4}]


Operation = Callable[[Session], Any]


def every_operation(session: Session) -> None:
    """Call each operation, on the path with the most statements."""
    first = enqueue(session, "send", idempotency_key="k")
    assert enqueue(session, "send", idempotency_key="k").id == first.id
    enqueue(session, "send", idempotency_key="k", on_conflict="replace")
    many = enqueue_many(session, "send", [Row(idempotency_key="k"), {}])
    assert [result.created for result in many] == [False, True]
    assert enqueue_from_select(session, "send", select(func.now().label("at"))) == 1
    assert cancel(session, first.id) == "cancelled"
    assert cancel(session, first.id) == "final"
    assert retry(session, first.id) == "ready"
    assert retry(session, first.id) == "refused"


@pytest.fixture
def replica(engine: Engine, database_url: str) -> Iterator[Engine]:
    """An engine whose role may only read, as on a replica."""
    role = make_url(database_url).database
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role} LOGIN SUPERUSER"))
        connection.execute(text(f"ALTER ROLE {role} SET default_transaction_read_only = on"))
    url = make_url(database_url).set(username=role)
    replica = create_engine(url, poolclass=NullPool)
    yield replica
    replica.dispose()
    with engine.begin() as connection:
        connection.execute(text(f"DROP ROLE {role}"))


def test_a_session_that_routes_reads_to_a_replica_enqueues_on_the_primary(
    host: Engine, replica: Engine, connection: Connection
) -> None:
    with replica.connect() as reading:
        assert reading.execute(text("SHOW transaction_read_only")).scalar() == "on"

    class RoutingSession(Session):
        def get_bind(self, mapper: Any = None, **arguments: Any) -> Engine:
            clause = arguments.get("clause")
            writes = self._flushing or getattr(clause, "is_dml", False)
            return host if writes else replica

    with RoutingSession() as session:
        session.add(Order())
        session.flush()
        assert session.scalars(select(Order.id)).all() == [], "it is read from elsewhere"
        every_operation(session)
        session.commit()
    assert len(all_jobs(connection)) == 3


@pytest.mark.parametrize("key", [Job, DEFAULT_TABLES.jobs], ids=["by class", "by table"])
def test_a_session_with_binds_enqueues_where_the_jobs_are(
    host: Engine, connection: Connection, key: Any
) -> None:
    elsewhere = create_engine("sqlite://")
    Base.metadata.create_all(elsewhere)
    with Session(binds={Order: elsewhere, key: host}) as session:
        session.add(Order())
        every_operation(session)
        session.commit()
    with elsewhere.connect() as other:
        assert other.execute(select(func.count()).select_from(Order)).scalar() == 1
    elsewhere.dispose()
    assert len(all_jobs(connection)) == 3


def test_a_session_without_a_bind_for_the_jobs_says_so(host: Engine) -> None:
    with Session(binds={Order: host}) as session, pytest.raises(UnboundExecutionError, match="Job"):
        enqueue(session, "send")


def test_what_is_no_session_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a Session, scoped_session or Connection"):
        enqueue("postgresql://", "send")  # type: ignore[call-overload]


def test_a_two_phase_session_can_be_prepared(host: Engine, connection: Connection) -> None:
    if connection.execute(text("SHOW max_prepared_transactions")).scalar() == "0":
        pytest.skip("the server has max_prepared_transactions = 0")
    sleeping = insert(DEFAULT_TABLES.sleepers).values(
        queue="default", asleep_until=text("now() + interval '1 hour'")
    )
    connection.execute(sleeping)
    connection.commit()
    with Session(host, twophase=True) as session:
        session.add(Order())
        every_operation(session)
        session.prepare()
        session.commit()
    with host.connect() as two_phase:
        transaction = two_phase.begin_twophase()
        enqueue(two_phase, "send")
        transaction.prepare()
        transaction.commit()
    assert len(all_jobs(connection)) == 4


def test_nested_flushes_are_avoided_by_the_connection(host: Engine, connection: Connection) -> None:
    """In an event of a flush, the connection that the event gives is the one to enqueue on."""

    @event.listens_for(Order, "after_insert")
    def send_receipt(mapper: Any, connection: Connection, order: Order) -> None:
        enqueue(connection, "send", {"order": order.id})

    try:
        with Session(host) as session:
            order = Order()
            session.add(order)
            session.commit()
            assert [row.payload for row in all_jobs(connection)] == [{"order": order.id}]
    finally:
        event.remove(Order, "after_insert", send_receipt)


def test_a_key_that_another_transaction_took_and_gave_up_is_free(
    host: Engine, connection: Connection
) -> None:
    with Session(host) as session:
        enqueue(session, "send", idempotency_key="k")
        session.rollback()
        assert enqueue(session, "send", idempotency_key="k").created
        session.commit()
    assert len(all_jobs(connection)) == 1


def test_a_flask_application_enqueues_in_the_bind_that_has_the_tables(
    database_url: str, connection: Connection
) -> None:
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
    app.config["SQLALCHEMY_BINDS"] = {"jobs": database_url}
    db = SQLAlchemy()
    db.init_app(app)

    class Purchase(db.Model):  # type: ignore[name-defined,misc]
        id = db.Column(db.Integer, primary_key=True)

    with app.app_context():
        tables = attach(db.metadatas["jobs"]) if "jobs" in db.metadatas else None
        assert tables is not None
        db.create_all(bind_key=None)
        db.session.add(Purchase())
        enqueued = enqueue(db.session, "send", {"a": 1}, idempotency_key="k", tables=tables)
        again = enqueue(db.session, "send", idempotency_key="k", tables=tables)
        db.session.commit()
        assert again.id == enqueued.id
        db.session.remove()
        for engine in db.engines.values():
            engine.dispose()
    assert job(connection, enqueued.id).payload == {"a": 1}


def test_a_flask_model_base_can_carry_the_tables(empty_database: str) -> None:
    app = Flask("shop")
    app.config["SQLALCHEMY_DATABASE_URI"] = empty_database
    db = SQLAlchemy()
    tables = attach(db.Model)
    db.init_app(app)
    with app.app_context():
        db.create_all()
        enqueued = enqueue(db.session, "send", tables=tables)
        db.session.commit()
        found = db.session.get(tables.Job, enqueued.id)
        assert found is not None
        assert found.handler == "send"
        db.session.remove()
        db.engine.dispose()


def test_an_async_session_is_flushed_and_routed_too(
    host: Engine, database_url: str, connection: Connection
) -> None:
    async def place_order() -> int:
        engine = create_async_engine(make_url(database_url).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine) as session:
            order = Order()
            session.add(order)
            await enqueue_from_select(session, "send", select(Order.id))
            order_id = order.id
            await session.commit()
        await engine.dispose()
        return order_id

    order_id = asyncio.run(place_order())
    assert [row.payload for row in all_jobs(connection)] == [{"id": order_id}]


def test_the_mapped_class_reads_and_changes_jobs(host: Engine) -> None:
    with sessionmaker(host)() as session:
        enqueued = enqueue(session, "send", {"a": 1})
        found = session.scalars(select(Job).where(Job.id == enqueued.id)).one()
        assert (found.handler, found.payload) == ("send", {"a": 1})
        session.execute(update(Job).values(tenant="t"))
        session.refresh(found)
        assert found.tenant == "t"


@pytest.mark.parametrize(("schema", "place"), [(None, "tenant_a"), ("shared", "Tenant_A")])
def test_every_operation_follows_a_schema_translate_map(
    empty_database: str, schema: str | None, place: str
) -> None:
    real = MetaData()
    attach(real, schema=place)
    tables = attach(MetaData(), schema=schema)
    engine = create_engine(
        empty_database,
        poolclass=NullPool,
        execution_options={"schema_translate_map": {schema: place}},
    )
    with create_engine(empty_database, poolclass=NullPool).begin() as connection:
        real.create_all(connection)
    listener = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with listener, Session(engine) as session:
        presence.listen(listener, presence.channel_name(listener, tables))
        session.execute(presence.sleep(tables), {"queues": ["q"], "seconds": 60.0, "enough": 30.0})
        first = enqueue(session, "send", queue="q", unique_key="a", tables=tables)
        session.commit()
        same = enqueue(
            session,
            "send",
            {"n": 1},
            queue="q",
            unique_key="a",
            on_conflict="replace",
            tables=tables,
        )
        session.commit()
        assert same.id == first.id
        assert cancel(session, first.id, tables=tables) == "cancelled"
        assert retry(session, first.id, tables=tables) == "ready"
        session.commit()
        rows = [Row({"n": 2}, unique_key="c"), Row({"n": 3}, unique_key="b")]
        many = enqueue_many(session, "send", rows, tables=tables)
        query = select(literal(4).label("n"), literal("d").label("sa_jobs_unique_key"))
        assert enqueue_from_select(session, "send", query, tables=tables) == 1
        session.commit()
        found = session.scalars(select(tables.Job.payload).order_by(tables.Job.id)).all()
        assert found == [{"n": 1}, {"n": 2}, {"n": 3}, {"n": 4}]
        assert many[0].id < many[1].id
        # The trigger's for the insert, and ours for the replacement and the retry.
        driver: Any = listener.connection.driver_connection
        assert len(list(driver.notifies(timeout=20, stop_after=3))) == 3
    engine.dispose()
