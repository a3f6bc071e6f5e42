"""`create_all()` and every way of running the steps make the same schema."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from alembic import command
from sqlalchemy import MetaData, NullPool, create_engine

from sa_jobs import migrations
from sa_jobs.models import attach
from tests.migrations.schema import (
    CASED,
    CUSTOM,
    DEFAULT,
    LONGEST,
    NAMING_CONVENTION,
    Host,
    Place,
    checkout_config,
    create_all,
    execute,
    marker,
    objects,
    pg_dump,
    run_script,
    schemas,
    written,
)

PLACES = [
    pytest.param(DEFAULT, id="default"),
    pytest.param(CUSTOM, id="schema-and-name"),
    pytest.param(CASED, id="capitals"),
    pytest.param(LONGEST, id="longest-name"),
]

MakeHost = Callable[..., Host]


def by_apply(url: str, place: Place, make_host: MakeHost) -> None:
    with create_engine(url, poolclass=NullPool).begin() as connection:
        migrations.apply(connection, **place.options)


def by_checkout(url: str, place: Place, make_host: MakeHost) -> None:
    command.upgrade(checkout_config(url, place), "head")


def by_checkout_script(url: str, place: Place, make_host: MakeHost) -> None:
    config = checkout_config(None, place)
    command.upgrade(config, "head", sql=True)
    run_script(url, written(config))


def by_host(url: str, place: Place, make_host: MakeHost) -> None:
    host = make_host(url, place)
    host.add_steps()
    host.upgrade()


def by_host_script(url: str, place: Place, make_host: MakeHost) -> None:
    host = make_host(url, place)
    host.add_steps()
    run_script(url, host.upgrade_script())


def by_host_with_naming_convention(url: str, place: Place, make_host: MakeHost) -> None:
    host = make_host(url, place)
    host.add_naming_convention()
    host.add_steps()
    host.upgrade()


WAYS = [
    by_apply,
    by_checkout,
    by_checkout_script,
    by_host,
    by_host_script,
    by_host_with_naming_convention,
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_steps_equal_create_all(
    way: Callable[[str, Place, MakeHost], None],
    place: Place,
    make_host: MakeHost,
    empty_database: str,
    another_database: str,
) -> None:
    create_all(another_database, place)

    way(empty_database, place, make_host)

    assert pg_dump(empty_database) == pg_dump(another_database)
    assert marker(empty_database, place) == marker(another_database, place)


@pytest.mark.parametrize("place", PLACES)
def test_create_all_ignores_a_naming_convention(
    place: Place, empty_database: str, another_database: str
) -> None:
    create_all(another_database, place)

    create_all(empty_database, place, MetaData(naming_convention=NAMING_CONVENTION))

    assert pg_dump(empty_database) == pg_dump(another_database)


@pytest.mark.parametrize("place", PLACES)
def test_create_all_may_be_repeated_and_drop_all_leaves_nothing(
    place: Place, empty_database: str
) -> None:
    create_all(empty_database, place)
    before = pg_dump(empty_database)
    create_all(empty_database, place)
    assert pg_dump(empty_database) == before
    assert len(marker(empty_database, place)) == 1

    metadata = MetaData()
    attach(metadata, **place.options)
    with create_engine(empty_database, poolclass=NullPool).begin() as connection:
        metadata.drop_all(connection)
    assert objects(empty_database) == set()


def test_the_schema_of_the_search_path_is_the_same_as_one_that_is_named(
    empty_database: str, another_database: str
) -> None:
    for url in (empty_database, another_database):
        execute(url, "CREATE SCHEMA queue")
    with create_engine(empty_database, poolclass=NullPool).begin() as connection:
        connection.exec_driver_sql("SET LOCAL search_path TO missing, queue, public")
        migrations.apply(connection)

    create_all(another_database, Place("queue", "sa_jobs"))

    assert pg_dump(empty_database) == pg_dump(another_database)


@pytest.mark.parametrize("place", PLACES)
def test_a_script_for_the_way_back_leaves_nothing(
    place: Place, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host(place=place)
    revision = host.add_steps()
    if place.schema:
        execute(empty_database, f'CREATE SCHEMA "{place.schema}"')
    before = pg_dump(empty_database)
    run_script(empty_database, host.upgrade_script())
    assert pg_dump(empty_database) != before

    run_script(empty_database, host.downgrade_script(f"{revision}:base"))

    assert pg_dump(empty_database) == before
    assert {place.schema or "public", "public"} == schemas(empty_database)
