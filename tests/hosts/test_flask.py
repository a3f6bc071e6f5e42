"""Flask-Migrate with several databases: `SQLALCHEMY_BINDS`."""

from __future__ import annotations

import pytest

from tests.hosts.application import FLASK_FILES, FlaskLayout
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import NEXT_STEP, THIS_STEP, Environments
from tests.hosts.test_chain import MANY_ROWS
from tests.migrations.schema import execute, marker, objects

pytestmark = pytest.mark.hosts

BINDS_FILES = {
    **FLASK_FILES,
    "shop/__init__.py": FLASK_FILES["shop/__init__.py"].replace(
        "db.init_app(app)",
        'app.config["SQLALCHEMY_BINDS"] = {"audit": os.environ["AUDIT_DATABASE_URL"]}\n'
        "            db.init_app(app)",
    ),
    "shop/models.py": """\
        from shop.extensions import db


        class Entry(db.Model):
            __tablename__ = "entries"
            __bind_key__ = "audit"
            id = db.Column(db.Integer, primary_key=True)


        # here


        class Invoice(db.Model):
            __tablename__ = "invoices"
            id = db.Column(db.Integer, primary_key=True)
        """,
}


def binds(attach: str) -> FlaskLayout:
    return FlaskLayout(files=BINDS_FILES, attach=attach, init=("--multidb",))


ENQUEUE = """
    import sa_jobs
    from shop import create_app
    from shop.extensions import db
    with create_app().app_context():
        for metadata in db.metadatas.values():
            for tables in metadata.info.get("sa_jobs", ()):
                sa_jobs.enqueue(db.session, "send", {"invoice": 1}, tables=tables)
        db.session.commit()
        assert db.session.scalars(db.select(tables.Job)).one().payload == {"invoice": 1}
"""


@pytest.mark.parametrize(
    ("attach", "bind"),
    [("sa_jobs.attach(db.Model)", ""), ("sa_jobs.attach(Entry)", "audit")],
    ids=["default-bind", "other-bind"],
)
def test_the_queue_is_in_one_of_the_databases(
    attach: str,
    bind: str,
    make_host: MakeHost,
    environments: Environments,
    empty_database: str,
    another_database: str,
) -> None:
    variables = {"AUDIT_DATABASE_URL": another_database}
    host = make_host(binds(attach), variables=variables)
    url, other = empty_database, another_database
    if bind:
        url, other = other, url
    host.adopt()

    source = host.migrate("add job queue")
    host.upgrade()

    assert source.count("sa_jobs.migrations.upgrade(") == 1
    body = source.partition(f"def upgrade_{bind}():")[2].partition("\ndef ")[0]
    assert "sa_jobs.migrations.upgrade(" in body
    assert marker(url) == [THIS_STEP]
    assert not {name for name in objects(other) if "sa_jobs" in name}
    host.check()
    host.python(ENQUEUE)

    # Only the application knows its databases, so the revision is written by its own command.
    host.command("sa-jobs", "migrations", "check")
    ended = host.environment.command(
        "sa-jobs", "migrations", "new", "--remove", directory=host.directory
    )
    assert ended.code == 1
    assert "let `flask db migrate`" in ended.one_line()

    # The template begins the transactions of all databases itself.
    host = host.in_environment(environments.get("next"))
    host.migrate("upgrade job queue")
    execute(url, MANY_ROWS)
    ended = host.run("upgrade")
    assert ended.code == 1
    assert "must be built CONCURRENTLY" in ended.error.splitlines()[-1]
    assert "Traceback" not in ended.error
    host.command("sa-jobs", "db", "build-indexes", "--database-url", url)
    host.upgrade()
    assert marker(url) == [NEXT_STEP]
    host.check()

    host.ok("downgrade", "base")
    assert objects(url) == objects(other) == set()
    host.assert_untouched()
