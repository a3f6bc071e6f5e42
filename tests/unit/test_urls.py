"""Which database a command works on."""

from __future__ import annotations

import pytest
from sqlalchemy import create_engine

from sa_jobs.errors import DatabaseUrlError
from sa_jobs.urls import database_url, listen_url


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SA_JOBS_DATABASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("SA_JOBS_LISTEN_URL", raising=False)


def rendered(explicit: str | None) -> str:
    return database_url(explicit).render_as_string(hide_password=False)


@pytest.mark.parametrize(
    "scheme",
    [
        "postgres",
        "postgresql",
        "postgresql+psycopg",
        "postgresql+psycopg2",
        "postgresql+psycopg_async",
        "postgresql+asyncpg",
        "postgresql+pg8000",
        "postgres+asyncpg",
    ],
)
def test_any_driver_is_read_as_psycopg(scheme: str) -> None:
    url = database_url(f"{scheme}://user:p%40ss@host:5433/app?application_name=a")
    assert url.render_as_string(hide_password=False) == (
        "postgresql+psycopg://user:p%40ss@host:5433/app?application_name=a"
    )
    assert url.password == "p@ss"
    create_engine(url)


def test_the_order_is_explicit_then_ours_then_the_applications(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://host/theirs")
    assert database_url(None).database == "theirs"
    monkeypatch.setenv("SA_JOBS_DATABASE_URL", "postgres://host/ours")
    assert database_url(None).database == "ours"
    assert database_url("").database == "ours"
    assert database_url("postgres://host/explicit").database == "explicit"
    monkeypatch.setenv("SA_JOBS_DATABASE_URL", "")
    assert database_url(None).database == "theirs"


def test_options_that_only_asyncpg_knows_become_libpqs() -> None:
    url = "postgresql+asyncpg://host/app?ssl=require&prepared_statement_cache_size=0&host=other"
    assert rendered(url) == "postgresql+psycopg://host/app?host=other&sslmode=require"


def test_without_any_the_error_says_what_to_set() -> None:
    with pytest.raises(DatabaseUrlError, match="SA_JOBS_DATABASE_URL or DATABASE_URL"):
        database_url(None)


@pytest.mark.parametrize("url", ["mysql://u:secret@host/app", "sqlite:///secret", "u:secret@host"])
def test_another_kind_of_url_is_refused_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DatabaseUrlError, match=r"^the given URL is") as raised:
        database_url(url)
    assert "secret" not in str(raised.value)
    assert raised.value.__suppress_context__ or raised.value.__context__ is None

    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(DatabaseUrlError, match=r"^DATABASE_URL is"):
        database_url(None)


def test_a_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(DatabaseUrlError, match="not a database URL"):
        database_url("postgresql://host:port/app")


def test_the_url_to_listen_on_comes_from_the_option_then_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert listen_url(None) is None
    monkeypatch.setenv("SA_JOBS_LISTEN_URL", "postgres://h/from_the_environment")
    assert str(listen_url(None)) == "postgresql+psycopg://h/from_the_environment"
    assert str(listen_url("postgresql://h/given")) == "postgresql+psycopg://h/given"


def test_a_url_to_listen_on_that_is_none_is_named_without_what_it_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SA_JOBS_LISTEN_URL", "mysql://me:secret@h/d")
    with pytest.raises(DatabaseUrlError, match="SA_JOBS_LISTEN_URL is for mysql") as caught:
        listen_url(None)
    assert "secret" not in str(caught.value)
