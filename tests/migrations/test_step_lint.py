"""Rules that every step keeps, since host files name it for ever."""

from __future__ import annotations

import ast
import hashlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from alembic import command
from alembic.script import ScriptDirectory

import sa_jobs
from sa_jobs import ddl, migrations
from sa_jobs.migrations import Step, _steps
from sa_jobs.migrations._steps import is_at_least
from tests.migrations.schema import CUSTOM, DEFAULT, Place, checkout_config, written

FILES = sorted(Path(_steps._modules()[0].__file__).parent.glob("sa_jobs_*.py"))
each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
each_step = pytest.mark.parametrize("step", migrations.revisions(), ids=lambda step: step.revision)


def test_the_chain_is_one_line_in_the_order_of_the_ids() -> None:
    steps = migrations.revisions()
    assert [step.revision for step in steps] == [file.stem for file in FILES]
    assert [step.down_revision for step in steps] == [None, *(s.revision for s in steps[:-1])]


def test_alembic_sees_the_same_chain_under_our_label() -> None:
    script = ScriptDirectory.from_config(checkout_config(None))
    seen = [revision.revision for revision in script.walk_revisions("base", "sa_jobs@head")]
    assert seen[::-1] == [step.revision for step in migrations.revisions()]
    assert script.get_heads() == [seen[0]]


def test_the_models_stand_for_the_newest_step() -> None:
    assert migrations.revisions()[-1].revision == ddl.STEP


@each_step
def test_ids_are_ours_and_fit_alembics_column(step: Step) -> None:
    assert re.fullmatch(r"sa_jobs_\d{4}", step.revision)
    assert len(step.revision) <= 32


@each_step
def test_steps_say_what_they_are(step: Step) -> None:
    assert step.phase in ("expand", "contract")
    assert re.fullmatch(r"\d+\.\d+\.\d+", step.min_client)
    assert re.fullmatch(r"\d+\.\d+\.\d+", step.released_in)
    assert re.fullmatch(r"[A-Z].*\.", step.summary)


@each_file
def test_steps_import_nothing_that_changes(file: Path) -> None:
    """A step must do the same for ever: no models, no statements, no constants of ours."""
    imported = [
        node.module if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    ]
    assert set(imported) <= {
        "__future__",
        "sa_jobs.migrations._ddl",
        "sa_jobs.migrations._steps",
    }


@each_file
def test_sources_hold_nothing_that_reads_as_a_parameter(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert "%" not in node.value
            assert not re.search(r"(?<![:\w]):\w", node.value)


@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
def test_scripts_hold_nothing_that_reads_as_a_parameter(place: Place) -> None:
    for run, target in ((command.upgrade, "head"), (command.downgrade, "head:base")):
        config = checkout_config(None, place)
        run(config, target, sql=True)
        script = written(config)
        assert "%" not in script
        assert not re.search(r"(?<![:\w]):\w", script)


def test_a_worker_that_checks_the_tables_does_not_load_alembic() -> None:
    program = "import sys, sa_jobs.migrations as m; m.revisions(); print('alembic' in sys.modules)"
    printed = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert printed == "False\n"


RELEASED = {
    name: digest
    for digest, name in (
        line.split()
        for line in Path(__file__).with_name("released_steps.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
}


def test_released_steps_have_not_changed() -> None:
    here = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in FILES}
    changed = [name for name, digest in RELEASED.items() if here.get(name) != digest]
    assert not changed, (
        f"{changed} were released, and hosts' revisions run them: "
        "take the change back, and write a new step"
    )


@each_step
def test_steps_of_former_releases_are_listed(step: Step) -> None:
    """When the version rises, the files of the release before must be in the list."""
    is_released = not is_at_least(step.released_in, sa_jobs.__version__)
    assert f"{step.revision}.py" in RELEASED or not is_released, (
        f"{step.revision} came with {step.released_in}: "
        "add its line to tests/migrations/released_steps.txt, which says how"
    )


def test_oldest_clients_never_fall_and_expanding_steps_keep_them() -> None:
    """The marker has the newest step's, which must stand for all steps before it."""
    steps = migrations.revisions()
    for before, after in itertools.pairwise(steps):
        assert is_at_least(after.min_client, before.min_client)
        if after.phase == "expand":
            assert after.min_client == before.min_client
    assert steps[-1].min_client == ddl.MIN_CLIENT


@pytest.mark.parametrize(
    ("version", "oldest", "expected"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1", "0.1.0", True),
        ("0.10.0", "0.9.0", True),
        ("0.1.0.dev1", "0.1.0", True),
        ("1.0.0rc1", "1.0.1", False),
        ("0.9.9", "1.0", False),
        ("0.0.0", "0", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, oldest: str, expected: bool) -> None:
    assert is_at_least(version, oldest) is expected


@each_file
def test_strong_locks_on_tables_in_use_are_taken_by_alter(file: Path) -> None:
    """In steps after the first, run() is for what is new; what goes is dropped by alter()."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "target.run":
            sql = ast.unparse(node.args[0])
            assert not re.search(r"DROP (TABLE|INDEX)", sql)
            if file.stem != "sa_jobs_0001":
                assert not re.search(r"ALTER TABLE|CREATE (UNIQUE )?INDEX", sql)
