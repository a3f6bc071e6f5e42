"""The life of a host with the package, on old and new releases of SQLAlchemy and Alembic."""

from __future__ import annotations

import os
import re

import pytest

from tests.hosts.application import FLASK, PLAIN, Layout
from tests.hosts.conftest import MakeHost
from tests.hosts.environments import NEXT_STEP, OURS, THIS_STEP, Environments, Pair
from tests.migrations.schema import marker, objects, pg_dump

pytestmark = pytest.mark.hosts

OLDEST = Pair("2.0.36", "1.13.3")

# Between the corners; Alembic 1.18.0 and 1.20.0 each changed how comparators are called.
BETWEEN = [Pair("2.0.44", "1.16.5"), Pair("2.0.58", "1.18.0"), Pair("2.1.0", "1.20.0")]

# Every change of Alembic's that matters here, with each kind of SQLAlchemy; it takes its time. The
# newest ones are those that the tests themselves were installed with.
MATRIX = [
    Pair(sqlalchemy, alembic)
    for sqlalchemy in dict.fromkeys(("2.0.36", "2.0.58", OURS.sqlalchemy))
    for alembic in dict.fromkeys(("1.13.3", "1.17.2", "1.18.0", "1.19.1", "1.20.0", OURS.alembic))
]

# The two corners run in environments of their own, and those between with the newest one.
PAIRS = [OURS] if OURS == OLDEST else [*BETWEEN, OURS]
if os.environ.get("SA_JOBS_TEST_PAIRS") == "all":
    PAIRS = MATRIX


@pytest.mark.parametrize("layout", [PLAIN, FLASK], ids=["plain", "flask"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_a_host_adopts_upgrades_and_goes_back(
    layout: Layout,
    pair: Pair,
    make_host: MakeHost,
    environments: Environments,
    empty_database: str,
) -> None:
    host = make_host(layout, environment=environments.get(pair=pair))
    host.migrate("invoices")
    host.upgrade()
    host_alone = objects(empty_database)

    host.adopt()
    source = host.migrate("add job queue")
    host.upgrade()

    assert (
        f"sa_jobs.migrations.upgrade({THIS_STEP!r}, from_=None, schema=None, name='sa_jobs')"
        in source
    )
    assert "op." not in source.replace("from alembic import op", "")
    assert len(re.findall(r"(?m)^\w+ \(head\)", host.ok("heads"))) == 1
    assert len(re.findall(r"(?m)^\w+ \(head\)", host.ok("current"))) == 1
    host.check()

    host.add_model()
    source = host.migrate("receipts")
    host.upgrade()
    assert "create_table('receipts'" in source
    assert "sa_jobs" not in source
    assert "drop_table('receipts')" in source
    assert source.count("drop_table") == 1

    # The next release of the package: nothing happens until the host has its revision.
    host = host.in_environment(environments.get("next", pair))
    before = pg_dump(empty_database)
    host.upgrade()
    assert pg_dump(empty_database) == before
    red = host.run("check")
    assert red.code == (1 if layout is FLASK else 255)
    expected = f"('sa_jobs_upgrade', None, 'sa_jobs', '{THIS_STEP}', '{NEXT_STEP}')"
    assert expected in red.out + red.error
    assert f"from_={THIS_STEP!r}" in host.migrate("upgrade job queue")
    host.upgrade()
    assert marker(empty_database) == [NEXT_STEP]
    host.check()

    # And back.
    after = pg_dump(empty_database)
    host.ok("downgrade", *(() if layout is FLASK else ("-1",)))
    assert marker(empty_database) == [THIS_STEP]
    assert pg_dump(empty_database) == before
    host.upgrade()
    host.ok("downgrade", "base")
    assert objects(empty_database) == set()
    host.upgrade()
    assert pg_dump(empty_database) == after
    assert objects(empty_database) > host_alone
    host.assert_untouched()
