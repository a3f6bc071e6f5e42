"""What squawk, which knows migrations that stop an application, finds in the scripts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from sa_jobs import migrations
from tests.migrations.schema import CUSTOM, DEFAULT, Host, Place
from tests.support.postgres import OLDEST_MAJOR

STEPS = [step.revision for step in migrations.revisions()]
EACH_STEP = pytest.mark.parametrize(("start", "end"), list(pairwise(STEPS)))

# The rules that a script may break, and why.
EVERYWHERE = {
    # A priority has 16 bits by contract; a wider column would only make the ready index larger.
    "prefer-bigint-over-smallint",
    # What stops others is the wait for a lock, which has its own time-out. A build that is cut off
    # would have to begin again, or leave an invalid index.
    "require-statement-timeout",
}
# The tables are made by the same transaction: nobody else can have a lock on them.
FRESH = {"require-lock-timeout"}
# What a script does unless it is told otherwise, since one transaction is all or nothing.
IN_TRANSACTION = {"require-concurrent-index-creation"}
# The lock of a concurrent build lets reads and writes go on.
CONCURRENT = {"require-lock-timeout"}
# The version table has a varchar.
OF_ALEMBIC = {"prefer-text-field"}
# Where it was stopped between two transactions, a script is written anew, as the page says.
SEVERAL = {"prefer-robust-stmts"}
# Going back is there to drop what the step has made, in one transaction and by a time-out.
BACK = {"ban-drop-table", "ban-drop-column", "require-concurrent-index-deletion"}
# The last step back ends the queue, and its workers are stopped before.
TO_NOTHING = {"ban-drop-function", "require-lock-timeout"}


def rules(script: str) -> set[str]:
    """Return the rules of squawk that a script breaks; what it cannot read counts as one."""
    ended = subprocess.run(
        [
            Path(sys.executable).with_name("squawk"),
            "--reporter=json",
            f"--pg-version={OLDEST_MAJOR}",
        ],
        input=script,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stderr == ""
    return {found["rule_name"] for found in json.loads(ended.stdout)}


def test_it_would_find_a_change_that_stops_writers() -> None:
    script = 'BEGIN; ALTER TABLE "sa_jobs" ADD COLUMN a bigint; CREATE INDEX ON "sa_jobs" (a);'
    assert {"require-lock-timeout", "require-concurrent-index-creation"} <= rules(script)


@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
def test_a_fresh_install(place: Place) -> None:
    assert rules(migrations.script(**place.options)) == EVERYWHERE | FRESH


@EACH_STEP
def test_an_upgrade_in_one_transaction(start: str, end: str) -> None:
    found = rules(migrations.script(end, from_=start))
    assert found <= EVERYWHERE | IN_TRANSACTION


@EACH_STEP
def test_an_upgrade_beside_writers(start: str, end: str) -> None:
    found = rules(migrations.script(end, from_=start, concurrently=True))
    assert found <= EVERYWHERE | CONCURRENT


@EACH_STEP
def test_a_way_back(start: str, end: str) -> None:
    assert rules(migrations.script(start, from_=end)) <= EVERYWHERE | BACK


def test_the_last_way_back() -> None:
    assert rules(migrations.script("base", from_="sa_jobs_0001")) <= EVERYWHERE | BACK | TO_NOTHING


@pytest.mark.parametrize("concurrently", [False, True])
def test_the_whole_chain_of_a_host(concurrently: bool, make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.add_steps(STEPS[0], concurrently=concurrently)
    for start, end in pairwise(STEPS):
        host.add_steps(end, start, concurrently=concurrently)

    found = rules(host.upgrade_script("base:head"))

    assert found == EVERYWHERE | FRESH | OF_ALEMBIC | (SEVERAL if concurrently else set())
