"""Which database a command works on."""

from __future__ import annotations

import os

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from sa_jobs.errors import DatabaseUrlError

ENVIRONMENT = ("SA_JOBS_DATABASE_URL", "DATABASE_URL")
LISTEN_ENVIRONMENT = "SA_JOBS_LISTEN_URL"


def database_url(explicit: str | None) -> URL:
    """Return the URL to connect to: the explicit one, else the first that the environment has.

    The environment is asked for SA_JOBS_DATABASE_URL, then DATABASE_URL. Commands connect with
    psycopg 3: `postgres://`, `postgresql://` and any `postgresql+driver://` are read as
    `postgresql+psycopg://`, so that an application's own URL will do.

    Raises DatabaseUrlError if there is none, or it is no URL of a PostgreSQL database. Its text
    never holds the URL, which may hold a password.
    """
    source, value = "the given URL", explicit
    if not value:
        source, value = next(
            ((name, os.environ[name]) for name in ENVIRONMENT if os.environ.get(name)), ("", "")
        )
    if not value:
        raise DatabaseUrlError(
            f"no database is named: give a URL, or set {' or '.join(ENVIRONMENT)}, "
            "for example postgresql://user@localhost/app"
        )
    return parsed(source, value)


def listen_url(explicit: str | None) -> URL | None:
    """Return the URL to listen on: the explicit one, else SA_JOBS_LISTEN_URL, else None.

    It is read as `database_url` reads its own, and raises the same errors.
    """
    if explicit:
        return parsed("the given URL", explicit)
    value = os.environ.get(LISTEN_ENVIRONMENT)
    return parsed(LISTEN_ENVIRONMENT, value) if value else None


def parsed(source: str, value: str) -> URL:
    """Return a URL as `database_url` reads it; an error calls it by its source."""
    try:
        url = make_url(value.strip())
    except (ArgumentError, ValueError):
        # Neither the cause nor the value may be shown.
        raise DatabaseUrlError(
            f"{source} is not a database URL; it looks like postgresql://user@localhost/app"
        ) from None
    backend, _, driver = url.drivername.partition("+")
    if backend not in ("postgresql", "postgres"):
        raise DatabaseUrlError(f"{source} is for {backend}, and sa-jobs needs PostgreSQL")
    url = url.set(drivername="postgresql+psycopg")
    return _without_asyncpg_options(url) if driver == "asyncpg" else url


def _without_asyncpg_options(url: URL) -> URL:
    query = dict(url.query)
    if "ssl" in query:
        query.setdefault("sslmode", query["ssl"])
    for option in ("ssl", "prepared_statement_cache_size", "prepared_statement_name_func"):
        query.pop(option, None)
    return url.set(query=query)
