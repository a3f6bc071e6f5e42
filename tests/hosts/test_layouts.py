"""Hosts of every layout adopt the package with their usual commands, and see nothing else of it."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
import pytest
from sqlalchemy import MetaData, NullPool, create_engine

from sa_jobs import attach
from tests.hosts.application import (
    FLASK_FILES,
    MODELS,
    PLAIN,
    FlaskLayout,
    Layout,
    with_models,
)
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import OURS, THIS_STEP
from tests.migrations.schema import DEFAULT, NAMING_CONVENTION, Place, libpq, objects

pytestmark = pytest.mark.hosts

# What the host does with the tables once they are there.
ENQUEUE = """
    import os
    import models
    import sa_jobs
    from sqlalchemy import create_engine, select
    from sqlalchemy.orm import Session
    engine = create_engine(os.environ["SHOP_DATABASE_URL"])
    with Session(engine) as session:
        (tables, *_) = models.Base.metadata.info["sa_jobs"]
        sa_jobs.enqueue(session, "send", {"invoice": 1}, tables=tables)
        session.commit()
        assert session.scalars(select(tables.Job)).one().payload == {"invoice": 1}
        session.add(models.Invoice())
        session.commit()
"""

FLASK_ENQUEUE = """
    import sa_jobs
    from shop import create_app
    from shop.extensions import db
    with create_app().app_context():
        (tables,) = db.metadata.info["sa_jobs"]
        sa_jobs.enqueue(db.session, "send", {"invoice": 1}, tables=tables)
        db.session.commit()
        assert db.session.scalars(db.select(tables.Job)).one().payload == {"invoice": 1}
"""


@dataclass(frozen=True)
class Kind:
    """A layout, where its queues are, and what its owner does with them."""

    layout: Layout
    places: tuple[Place, ...] = (DEFAULT,)
    program: str = ENQUEUE


ONLINE = "connection=connection, target_metadata=target_metadata\n"


def configured(options: str, models: str = MODELS, **changes: object) -> Layout:
    """Return a layout that gives `context.configure()` more options, online."""
    edit = (ONLINE, f"connection=connection, target_metadata=target_metadata, {options}\n")
    return with_models(PLAIN, models, env=(edit,), **changes)


# Named CHECKs are compared by default in 1.19.0 and 1.19.1, and on request since.
COMPARE = "include_schemas=True, compare_type=True, compare_server_default=True" + (
    ', autogenerate_plugins=["alembic.autogenerate.*", "alembic.ext.checkconstraint_byname"]'
    if OURS.alembic_numbers >= (1, 19, 2)
    else ""
)

CONVENTION = MODELS.replace(
    "    pass\n", f"    metadata = MetaData(naming_convention={NAMING_CONVENTION!r})\n"
).replace("from sqlalchemy.orm", "from sqlalchemy import MetaData\nfrom sqlalchemy.orm")

METADATA_SCHEMA = MODELS.replace("    pass\n", '    metadata = MetaData(schema="shop")\n').replace(
    "from sqlalchemy.orm", "from sqlalchemy import MetaData\nfrom sqlalchemy.orm"
)

TWO_BASES = MODELS.replace(
    "# here\n",
    """\
class Stock(DeclarativeBase):
    pass


class Shelf(Stock):
    __tablename__ = "shelves"
    id: Mapped[int] = mapped_column(primary_key=True)


# here
""",
)

RELATED = MODELS.replace(
    "import DeclarativeBase, Mapped, mapped_column",
    "import DeclarativeBase, Mapped, mapped_column, relationship",
).replace("from sqlalchemy.orm", "from sqlalchemy import ForeignKey\nfrom sqlalchemy.orm")

# The foreign key comes with the tables, in one revision.
FOREIGN_KEY = RELATED + (
    """\
    job_id: Mapped[int | None] = mapped_column(ForeignKey("sa_jobs.id", ondelete="SET NULL"))
    job = relationship("SaJobsJob")
"""
)

RELATE = """
    import os
    import models
    import sa_jobs
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session
    engine = create_engine(os.environ["SHOP_DATABASE_URL"])
    with Session(engine) as session:
        queued = sa_jobs.enqueue(session, "send", {"a": 1})
        session.add(models.Invoice(job_id=queued.id))
        session.commit()
        invoice = session.query(models.Invoice).one()
        assert invoice.job.id == queued.id
        assert invoice.job.payload == {"a": 1}
"""

# As Flask-SQLAlchemy's users write it: classes refer to each other by name.
CLASS_JOB = RELATED + (
    """\
    jobs: Mapped[list["Job"]] = relationship("Job", back_populates="invoice")


class Job(Base):
    __tablename__ = "jobs"
    id: Mapped[int] = mapped_column(primary_key=True)
    invoice_id: Mapped[int] = mapped_column(ForeignKey("invoices.id"))
    invoice: Mapped["Invoice"] = relationship("Invoice", back_populates="jobs")
"""
)

USE_CLASS_JOB = (
    ENQUEUE
    + """\
        session.add(models.Job(invoice=models.Invoice()))
        session.commit()
        assert len(session.query(models.Job).one().invoice.jobs) == 1
"""
)

COLUMNS_OF_BASE = MODELS.replace(
    "    pass\n",
    """\
    created_at: Mapped[datetime.datetime] = mapped_column(server_default=func.now())
    changed_by: Mapped[str | None]
""",
).replace(
    "from sqlalchemy.orm", "import datetime\n\nfrom sqlalchemy import func\nfrom sqlalchemy.orm"
)

DATACLASSES = MODELS.replace(
    "import DeclarativeBase, Mapped,", "import DeclarativeBase, Mapped, MappedAsDataclass,"
)
DATACLASSES = (
    DATACLASSES.replace(
        "class Base(DeclarativeBase)", "class Base(MappedAsDataclass, DeclarativeBase)"
    ).replace("mapped_column(primary_key=True)", "mapped_column(init=False, primary_key=True)")
    + '    note: Mapped[str] = mapped_column(default="")\n'
)

MAIL = Place("queue", "mail")
TWO_QUEUES = 'sa_jobs.attach(Base)\nsa_jobs.attach(Base, schema="queue", name="mail")'

CONNECT = "with connectable.connect() as connection:\n"
BEGIN = (CONNECT, "with connectable.begin() as connection:\n")
ADVISORY = (
    CONNECT,
    CONNECT + '        connection.exec_driver_sql("SELECT pg_advisory_lock(20)")\n',
)
# With a lock that was taken first, Alembic does not know the transaction as its own, and so does
# not commit it: its documentation has the caller do so.
COMMIT = (
    "            context.run_migrations()\n\n\nif context",
    "            context.run_migrations()\n        connection.commit()\n\n\nif context",
)

UTILS = MODELS.replace(
    "# here\n",
    '''\
touch = PGFunction(
    schema="public",
    signature="shop_touch()",
    definition="""RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NEW; END $$""",
)
register_entities([touch], schemas=["public"], entity_types=[PGFunction, PGTrigger])

# here
''',
).replace(
    "from sqlalchemy.orm",
    """\
from alembic_utils.pg_function import PGFunction
from alembic_utils.pg_trigger import PGTrigger
from alembic_utils.replaceable_entity import register_entities
from sqlalchemy.orm""",
)

# The models before Flask-Migrate, which is what imports Alembic.
EARLY_FILES = {
    **FLASK_FILES,
    "shop/__init__.py": """\
        import sys

        from shop import models

        assert "flask_migrate" not in sys.modules

        import os

        from flask import Flask
        from flask_migrate import Migrate

        from shop.extensions import db


        def create_app():
            app = Flask(__name__)
            app.config["SQLALCHEMY_DATABASE_URI"] = os.environ["SHOP_DATABASE_URL"]
            db.init_app(app)
            Migrate(app, db)
            return app
        """,
    "shop/extensions.py": """\
        from flask_sqlalchemy import SQLAlchemy

        db = SQLAlchemy()
        """,
}

KINDS = {
    "async": Kind(Layout(template="async", driver="asyncpg")),
    "async-psycopg": Kind(Layout(template="async")),
    "naming-convention": Kind(with_models(PLAIN, CONVENTION)),
    "include-schemas": Kind(configured(COMPARE)),
    "metadata-list": Kind(
        configured(COMPARE, TWO_BASES, metadata="[models.Stock.metadata, models.Base.metadata]")
    ),
    "foreign-key": Kind(with_models(PLAIN, FOREIGN_KEY), program=RELATE),
    "two-queues": Kind(configured("include_schemas=True", attach=TWO_QUEUES), (DEFAULT, MAIL)),
    "engine-begin": Kind(Layout(env=(BEGIN,))),
    "advisory-lock": Kind(Layout(env=(ADVISORY, COMMIT))),
    "alembic-utils": Kind(with_models(PLAIN, UTILS)),
    "columns-of-base": Kind(with_models(PLAIN, COLUMNS_OF_BASE)),
    "dataclasses": Kind(with_models(PLAIN, DATACLASSES)),
    "class-job": Kind(with_models(PLAIN, CLASS_JOB), program=USE_CLASS_JOB),
    "metadata-schema": Kind(configured("include_schemas=True", METADATA_SCHEMA), (Place("shop"),)),
    "flask-models-first": Kind(FlaskLayout(files=EARLY_FILES), program=FLASK_ENQUEUE),
}

# The template came with Alembic 1.16.
if OURS.alembic_numbers >= (1, 16):
    KINDS["pyproject"] = Kind(Layout(template="pyproject"))
    KINDS["pyproject-async"] = Kind(Layout(template="pyproject_async", driver="asyncpg"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_host_adopts(
    kind: Kind, make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    host = make_host(kind.layout)
    host.adopt()

    source = host.migrate("add job queue")
    host.upgrade()

    for place in kind.places:
        assert (
            f"    sa_jobs.migrations.upgrade({THIS_STEP!r}, from_=None, schema={place.schema!r}, "
            f"name={place.name!r})\n"
        ) in source
        assert f"create_table('{place.name}" not in source
    assert source.count("sa_jobs.migrations.upgrade(") == len(kind.places)
    assert names(empty_database, *kind.places) == names_of_models(another_database, *kind.places)
    host.check()
    host.python(kind.program)

    # The next model of its own comes alone.
    host.add_model()
    source = host.migrate("receipts")
    assert "op.create_table('receipts'" in source
    assert "sa_jobs" not in source
    assert source.count("op.create_") == source.count("op.drop_") == 1

    host.ok("downgrade", "base")
    assert left_over(empty_database) == set()
    host.assert_untouched()


def names(url: str, *places: Place) -> set[str]:
    """Return the names of the constraints, indexes, triggers and functions of some queues."""
    with psycopg.connect(libpq(url)) as connection:
        rows = connection.execute(
            """
            SELECT concat_ws(' ', conrelid::regclass, contype, conname) FROM pg_constraint
            WHERE conrelid::regclass::text ~ %(tables)s
            UNION ALL SELECT concat_ws(' ', tablename, 'index', indexname) FROM pg_indexes
            WHERE tablename ~ %(tables)s
            UNION ALL SELECT concat_ws(' ', tgrelid::regclass, 'trigger', tgname) FROM pg_trigger
            WHERE NOT tgisinternal
            UNION ALL SELECT oid::regprocedure::text FROM pg_proc
            WHERE proname ~ %(tables)s
            """,
            {"tables": "|".join(rf"^\w*\.?{place.name}(_|$)" for place in places)},
        )
        return {name for (name,) in rows}


def names_of_models(url: str, *places: Place) -> set[str]:
    """Return the same names in a database that the models, on their own, have made."""
    metadata = MetaData()
    for place in places:
        attach(metadata, **place.options)
    with create_engine(url, poolclass=NullPool).begin() as connection:
        metadata.create_all(connection)
    found = names(url, *places)
    assert len(found) > 20
    return found


def left_over(url: str) -> set[str]:
    """Return what is in a database but the version table, and the function of alembic-utils."""
    return {name for name in objects(url) if "shop_touch" not in name}
