"""What `import sa_jobs` gives, and what it does not load."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
import types
from typing import Any

import pytest

import sa_jobs
import sa_jobs.testing


def run(code: str, *options: str) -> None:
    """Run code in a Python of its own, where nothing is loaded yet; warnings are errors."""
    result = subprocess.run(
        [sys.executable, "-W", "error", *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def public_things() -> list[tuple[str, Any]]:
    things: list[tuple[str, Any]] = []
    for module, name in [(m, name) for m in (sa_jobs, sa_jobs.testing) for name in m.__all__]:
        value = getattr(module, name)
        things.append((name, value))
        if inspect.isclass(value):
            things += [
                (f"{name}.{attribute}", member)
                for attribute, member in vars(value).items()
                if not attribute.startswith("_")
                and isinstance(member, (types.FunctionType, property, classmethod, staticmethod))
            ]
    return things


@pytest.mark.parametrize("module", [sa_jobs, sa_jobs.testing])
def test_all_is_sorted_and_whole(module: Any) -> None:
    assert module.__all__ == sorted(module.__all__)
    here = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    # A function hides the file of its name.
    assert here == set(module.__all__)


@pytest.mark.parametrize(
    ("name", "value"), public_things(), ids=[name for name, _ in public_things()]
)
def test_a_public_name_has_a_docstring_of_its_own(name: str, value: Any) -> None:
    text = getattr(value, "__doc__", None)
    assert text, name
    if inspect.isclass(value):
        assert not text.startswith(f"{value.__name__}("), f"{name}: a dataclass wrote its own"
        assert not any(text == getattr(parent, "__doc__", None) for parent in value.__mro__[1:])
    assert text.strip().splitlines()[0].endswith((".", ":"))


def test_every_error_of_ours_has_one_base() -> None:
    errors = [getattr(sa_jobs, name) for name in sa_jobs.__all__ if name.endswith("Error")]
    assert all(issubclass(error, sa_jobs.SaJobsError) for error in errors)


def test_the_testing_kit_loads_no_pytest_and_no_asyncio_of_sqlalchemy() -> None:
    run("""
        import sys, sa_jobs.testing
        unwanted = {"pytest", "psycopg", "sqlalchemy.ext.asyncio"}
        assert not unwanted & sys.modules.keys()
    """)


def test_importing_the_package_loads_nothing_that_it_does_not_need() -> None:
    run("""
        import sys, sqlalchemy.orm
        before = set(sys.modules)  # SQLAlchemy 2.0 itself loads greenlet
        import sa_jobs
        unwanted = {
            "alembic", "click", "flask", "greenlet", "opentelemetry", "psycopg", "psycopg2", "rich"
        }
        loaded = sys.modules.keys() - before
        assert not unwanted & loaded, unwanted & loaded
        assert "sqlalchemy.ext.asyncio" not in sys.modules
    """)


def test_the_plugin_for_pytest_loads_nothing_before_a_fixture_is_used() -> None:
    run("""
        import sys, pytest
        before = set(sys.modules)
        import sa_jobs_pytest
        loaded = {name.partition(".")[0] for name in sys.modules.keys() - before}
        assert loaded == {"sa_jobs_pytest"}, loaded
    """)


def test_enqueueing_loads_no_asyncio_of_sqlalchemy() -> None:
    run("""
        import sys
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session
        from sa_jobs import enqueue
        from sa_jobs.models import metadata
        engine = create_engine("sqlite://")
        metadata.create_all(engine)
        with Session(engine) as session:
            assert enqueue(session, "send").created
        engine.dispose()
        assert "sqlalchemy.ext.asyncio" not in sys.modules
    """)


def test_the_package_works_where_greenlet_is_not_installed() -> None:
    run("""
        import sys
        sys.modules["greenlet"] = None  # importing it fails from now on
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session
        from sa_jobs import Jobs, cancel, enqueue_many
        from sa_jobs.models import metadata
        jobs = Jobs()

        @jobs.handler
        def send(a: int) -> None: ...

        @jobs.handler
        async def send_later(a: int) -> None: ...

        engine = create_engine("sqlite://")
        metadata.create_all(engine)
        with Session(engine) as session:
            one = jobs.enqueue(session, send, {"a": 1})
            enqueue_many(session, "send", [{"a": 2}])
            assert cancel(session, one.id) == "cancelled"
        engine.dispose()
    """)


def test_the_command_line_loads_no_asyncio_of_sqlalchemy() -> None:
    run("""
        import sys, sa_jobs.cli
        assert "sqlalchemy.ext.asyncio" not in sys.modules
    """)


def test_the_flask_extension_loads_no_commands_until_they_are_asked_for() -> None:
    pytest.importorskip("flask_sqlalchemy")
    run("""
        import sys
        from flask import Flask
        from flask_sqlalchemy import SQLAlchemy
        from sa_jobs import Jobs
        from sa_jobs.flask import SAJobs
        app, db = Flask("shop"), SQLAlchemy()
        app.config["SQLALCHEMY_DATABASE_URI"] = "sqlite://"
        db.init_app(app)
        SAJobs(Jobs(), db, app=app)
        assert "sa_jobs.cli" not in sys.modules
        assert "worker" in app.test_cli_runner().invoke(args=["jobs"]).output
        assert "sa_jobs.cli" in sys.modules
    """)
