"""`sa-jobs migrations` and `sa-jobs db`, as a host's developer and its administrator run them."""

from __future__ import annotations

import ast
import inspect
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory

from sa_jobs import __version__, migrations
from sa_jobs.cli import main
from sa_jobs.migrations.chain import recorded_call
from tests.migrations.schema import (
    CUSTOM,
    DEFAULT,
    Host,
    Place,
    create_all,
    execute,
    marker,
    objects,
    pg_dump,
    run_psql,
)
from tests.support.commands import Ended

MakeHost = Callable[..., Host]
Run = Callable[..., Ended]

STEPS = [step.revision for step in migrations.revisions()]
HEAD = STEPS[-1]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `sa-jobs` in this process; `url=` is the database, and there is none without it."""

    def run(*arguments: str, url: str | None = None) -> Ended:
        for name in ("SA_JOBS_DATABASE_URL", "DATABASE_URL"):
            monkeypatch.delenv(name, raising=False)
        if url is not None:
            monkeypatch.setenv("DATABASE_URL", url)
        capsys.readouterr()
        code = main(arguments)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def options(place: Place) -> list[str]:
    return (["--schema", place.schema] if place.schema else []) + ["--name", place.name]


def new_file(ended: Ended) -> str:
    assert (ended.code, ended.error) == (0, "")
    return Path(ended.out.splitlines()[-1]).read_text()


# --- migrations new and check ---------------------------------------------------------------------


@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
def test_new_writes_what_autogenerate_would(
    place: Place, run: Run, make_host: MakeHost, empty_database: str, another_database: str
) -> None:
    host = make_host()
    where = ["--directory", str(host.directory), *options(place)]
    assert "none, and sa-jobs" in run("migrations", "check", *where).one_line()

    source = new_file(run("migrations", "new", *where))

    spelled = f"schema={place.schema!r}, name={place.name!r})"
    assert f"    sa_jobs.migrations.upgrade({HEAD!r}, from_=None, {spelled}\n" in source
    assert f"    sa_jobs.migrations.downgrade(None, from_={HEAD!r}, {spelled}\n" in source
    assert source.startswith('"""add job queue\n')
    assert "nothing to do" in run("migrations", "new", *where).out
    assert HEAD in run("migrations", "check", *where).out
    host.upgrade()
    create_all(another_database, place)
    assert pg_dump(empty_database) == pg_dump(another_database)


def test_new_goes_on_from_what_the_chain_says_step_by_step_and_removes(
    run: Run, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host()
    where = ["--directory", str(host.directory)]
    new_file(run("migrations", "new", "--to", STEPS[0], *where))
    source = new_file(run("migrations", "new", "-m", "next", *where))
    assert f"upgrade({HEAD!r}, from_={STEPS[0]!r}, schema=None" in source
    assert f"downgrade({STEPS[0]!r}, from_={HEAD!r}, schema=None" in source
    host.upgrade()
    assert marker(empty_database) == [HEAD]

    source = new_file(run("migrations", "new", "--remove", *where))
    assert "def upgrade() -> None:\n" in source
    host.upgrade()
    assert objects(empty_database) == set()
    assert "nothing to do" in run("migrations", "new", "--remove", *where).out
    host.downgrade("-1")
    assert marker(empty_database) == [HEAD]


def test_new_reads_the_configuration(
    run: Run, make_host: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_host()
    ini = host.directory.with_suffix(".ini")
    lines = ini.read_text().replace("[alembic]\n", "[alembic]\nfile_template = q_%%(rev)s\n")
    ini.write_text(lines)
    ended = run("migrations", "new", "-c", str(ini))
    new_file(ended)
    assert Path(ended.out.strip()).name.startswith("q_")

    monkeypatch.chdir(host.directory.parent)
    assert "say -c or --directory" in run("migrations", "new").one_line()
    ini.rename("alembic.ini")
    assert run("migrations", "check").code == 0


def test_the_configuration_may_be_in_a_pyproject(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toml = Path("pyproject.toml")
    toml.write_text("[project]\nname = 'host'\n")
    refusal = run("migrations", "check", "-c", "pyproject.toml").one_line()
    assert "pyproject.toml has no [tool.alembic]" in refusal
    assert "say -c or --directory" in run("migrations", "check").one_line()
    if "toml_file" not in inspect.signature(Config).parameters:
        toml.write_text("[tool.alembic]\nscript_location = 'migrations'\n")
        assert "is read by Alembic 1.16 and newer" in run("migrations", "check").one_line()
        return
    config = Config("alembic.ini", toml_file=toml, stdout=io.StringIO())
    command.init(config, "migrations", "pyproject")
    new_file(run("migrations", "new", "--to", STEPS[0]))
    assert "sa-jobs migrations new" in run("migrations", "check").one_line()
    Path("alembic.ini").unlink()
    new_file(run("migrations", "new", "-c", "pyproject.toml"))
    assert run("migrations", "check").code == 0
    assert len(list(Path("migrations/versions").glob("*.py"))) == 2

    toml.write_text(toml.read_text() + "\nbroken = [\n")
    refusal = run("migrations", "check").one_line()
    assert "Alembic's configuration cannot be read: TOMLDecodeError: " in refusal


BROKEN = {
    "[alembic]\nscript_location = nomod:x\n": "ModuleNotFoundError: No module named 'nomod'",
    "[alembic]\nscript_location = absent\n": "doesn't exist",
    "[alembic]\n": "No 'script_location' key found.*: say -c or --directory",
    "script_location = x\n": "MissingSectionHeaderError",
    "[other]\n": "'script_location'|alembic",
    "[alembic]\nscript_location = %(nothing)s\n": "InterpolationMissingOptionError",
}


@pytest.mark.parametrize("text", BROKEN)
def test_a_configuration_that_cannot_be_read_is_one_line(
    text: str, run: Run, tmp_path: Path
) -> None:
    ini = tmp_path / "own.ini"
    ini.write_text(text)
    for verb in ("check", "new"):
        ended = run("migrations", verb, "-c", str(ini))
        assert ended.code == 1
        assert re.search(BROKEN[text], ended.one_line())


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("def (:", "SyntaxError: .*host_1.py, line 3"),
        ("import nomod", r"ModuleNotFoundError: No module named 'nomod' \(.*host_1.py, line 3\)"),
        ("raise KeyError(1)", r"KeyError: 1 \(.*host_1.py, line 3\)"),
    ],
)
def test_a_revision_that_cannot_be_read_is_named(
    line: str, expected: str, run: Run, make_host: MakeHost
) -> None:
    host = make_host()
    host.add_revision("pass")
    (file,) = host.directory.glob("versions/*.py")
    file.write_text(file.read_text().replace("revision =", f"{line}\nrevision =", 1))
    for verb in ("check", "new"):
        ended = run("migrations", verb, "--directory", str(host.directory))
        assert ended.code == 1
        assert re.search(f"the revisions cannot be read: {expected}", ended.one_line())


def test_a_template_that_makes_no_python_is_one_line(run: Run, make_host: MakeHost) -> None:
    host = make_host()
    template = host.directory / "script.py.mako"
    template.write_text(template.read_text() + "\ndef (:\n")
    refusal = run("migrations", "new", "--directory", str(host.directory)).one_line()
    assert "the new revision cannot be read: SyntaxError" in refusal


def test_new_with_two_heads_names_the_option(run: Run, make_host: MakeHost) -> None:
    host = make_host()
    host.add_revision("pass")
    host._last = None
    second = host.add_revision("pass")
    where = ["--directory", str(host.directory)]
    assert "--head" in run("migrations", "new", *where).one_line()
    source = new_file(run("migrations", "new", "--head", second, *where))
    assert f"Revises: {second}\n" in source


def test_the_steps_as_a_branch_need_no_revision(
    run: Run, make_host: MakeHost, empty_database: str
) -> None:
    host = make_host()
    head = host.add_revision("pass")
    ini = host.directory.with_suffix(".ini")
    locations = f"{host.directory / 'versions'}\n    sa_jobs:migrations/versions"
    ini.write_text(
        "[alembic]\n"
        f"script_location = {host.directory}\n"
        "path_separator = newline\n"
        "version_path_separator = newline\n"
        f"version_locations =\n    {locations}\n"
    )
    where = ["-c", str(ini)]
    assert f"{HEAD}, the newest of this release" in run("migrations", "check", *where).out
    for chosen in ([], ["--head", head]):
        assert "`alembic upgrade sa_jobs@head`" in run("migrations", "new", *where, *chosen).out
    refusal = run("migrations", "new", "--remove", *where).one_line()
    assert "run `alembic downgrade sa_jobs@base`" in refusal
    refusal = run("migrations", "new", "--to", STEPS[0], *where).one_line()
    assert f"run `alembic upgrade sa_jobs@{STEPS[0]}`" in refusal
    assert len(list(host.directory.glob("versions/*.py"))) == 1

    # The branch makes the tables of the default name alone.
    assert run("migrations", "check", "--name", "other", *where).code == 1
    assert "name='other'" in new_file(
        run("migrations", "new", "--name", "other", "--head", head, *where)
    )


def test_the_place_of_the_chain_is_named_where_another_was_asked_for(
    run: Run, make_host: MakeHost
) -> None:
    host = make_host()
    where = ["--directory", str(host.directory)]
    new_file(run("migrations", "new", *where, "--schema", "shop"))
    for verb in ("check", "new"):
        refusal = run("migrations", verb, *where).one_line()
        assert (
            "make the tables of shop.sa_jobs, and none of sa_jobs: say `--schema shop`" in refusal
        )
        assert "--name sa_jobs" in refusal
    assert run("migrations", "check", *where, "--schema", "shop").code == 0
    assert len(list(host.directory.glob("versions/*.py"))) == 1

    # A second queue that is named is made, that of the default name too.
    new_file(run("migrations", "new", *where, "--name", "sa_jobs"))
    refusal = run("migrations", "check", *where, "--name", "third").one_line()
    assert (
        "say `--name sa_jobs` or `--schema shop`; `sa-jobs migrations new --name third`" in refusal
    )
    new_file(run("migrations", "new", *where, "--schema", "shop", "--remove"))
    assert "`--schema" not in run("migrations", "check", *where, "--name", "third").one_line()
    assert run("migrations", "check", *where).code == 0


# --- Chains for several databases -----------------------------------------------------------------


@pytest.fixture
def multidb(tmp_path: Path) -> list[str]:
    """The options that name a new environment of Alembic's template for several databases."""
    ini = tmp_path / "alembic.ini"
    command.init(Config(str(ini), stdout=io.StringIO()), str(tmp_path / "chain"), "multidb")
    return ["-c", str(ini)]


def functions(source: str) -> dict[str, str]:
    """Return what each function of a revision does."""
    return {
        node.name: ast.unparse(node.body[-1])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.args.args == []
    }


def test_new_puts_the_call_where_the_tables_are(run: Run, multidb: list[str]) -> None:
    place = "schema=None, name='sa_jobs')"
    refusal = run("migrations", "new", *multidb).one_line()
    assert "several databases (engine1, engine2): say with --engine" in refusal
    ended = run("migrations", "new", "--engine", "other", *multidb)
    assert ended.code == 2
    assert "'other' is not in the chain (engine1, engine2)" in ended.one_line()

    source = new_file(run("migrations", "new", "--engine", "engine2", "--to", STEPS[0], *multidb))
    assert functions(source) == {
        "upgrade_engine1": "pass",
        "downgrade_engine1": "pass",
        "upgrade_engine2": f"sa_jobs.migrations.upgrade({STEPS[0]!r}, from_=None, {place}",
        "downgrade_engine2": f"sa_jobs.migrations.downgrade(None, from_={STEPS[0]!r}, {place}",
    }

    # From then on the chain says it.
    assert run("migrations", "check", *multidb).code == 1
    source = new_file(run("migrations", "new", *multidb))
    assert functions(source)["upgrade_engine1"] == "pass"
    assert functions(source)["upgrade_engine2"].startswith(
        f"sa_jobs.migrations.upgrade({HEAD!r}, from_={STEPS[0]!r}"
    )
    assert run("migrations", "check", *multidb).code == 0
    assert "nothing to do" in run("migrations", "new", *multidb).out

    # Another database may have a queue too.
    source = new_file(run("migrations", "new", "--engine", "engine1", *multidb))
    assert f"({HEAD!r}, from_=None, " in functions(source)["upgrade_engine1"]
    assert functions(source)["upgrade_engine2"] == "pass"

    source = new_file(run("migrations", "new", "--engine", "engine1", "--remove", *multidb))
    assert functions(source)["upgrade_engine1"].startswith("sa_jobs.migrations.downgrade(None")


def test_new_refuses_an_engine_where_there_is_one_database(run: Run, make_host: MakeHost) -> None:
    where = ["--directory", str(make_host().directory)]
    ended = run("migrations", "new", "--engine", "engine1", *where)
    assert ended.code == 2
    assert "'engine1' is not in the chain (none, as" in ended.one_line()


FLASK_MULTIDB = """\
<%
    from flask import current_app
    db_names = [''] + list(current_app.config["SQLALCHEMY_BINDS"])
%>
% for db_name in db_names:
def upgrade_${db_name}():
    ${context.get("%s_upgrades" % db_name, "pass")}
% endfor
"""


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (FLASK_MULTIDB, "only the application knows: let `flask db migrate`"),
        ("revision = ${repr(up_revision)}\ndown_revision = None\n", "no place for ${upgrades}"),
    ],
    ids=["flask", "own"],
)
def test_new_names_autogenerate_where_a_template_hides_the_place(
    template: str, expected: str, run: Run, make_host: MakeHost
) -> None:
    host = make_host()
    (host.directory / "script.py.mako").write_text(template)
    refusal = run("migrations", "new", "--directory", str(host.directory)).one_line()
    assert expected in refusal
    assert "alembic revision --autogenerate" in refusal
    assert list(host.directory.glob("versions/*.py")) == []


# --- What the files say ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("sa_jobs.migrations.upgrade('sa_jobs_0002', from_='sa_jobs_0001')", "sa_jobs_0002"),
        ("sa_jobs.migrations.upgrade(to='sa_jobs_0002')", "sa_jobs_0002"),
        ("sa_jobs.migrations.upgrade()", "head"),
        ("from sa_jobs import migrations as m; m.upgrade('sa_jobs_0001')", "sa_jobs_0001"),
        ("import sa_jobs.migrations as m; m.upgrade('sa_jobs_0001')", "sa_jobs_0001"),
        ("import sa_jobs as q; q.migrations.upgrade('sa_jobs_0001')", "sa_jobs_0001"),
        ("from sa_jobs.migrations import upgrade as up; up('sa_jobs_0001')", "sa_jobs_0001"),
        ("from other import migrations; migrations.upgrade('sa_jobs_0001')", None),
        ("sa_jobs.migrations.downgrade('base', from_='sa_jobs_0002')", None),
        ("sa_jobs.migrations.upgrade('sa_jobs_0001', schema='other')", None),
        ("other.migrations.upgrade('sa_jobs_0001')", None),
        ("op.upgrade('sa_jobs_0001')", None),
    ],
)
def test_the_recorded_step_is_read_from_the_files(
    body: str, expected: str | None, make_host: MakeHost
) -> None:
    host = make_host()
    host.add_revision(body)
    host.add_revision("pass")
    config = Config()
    config.set_main_option("script_location", str(host.directory))
    call = recorded_call(ScriptDirectory.from_config(config))
    assert (call.to if call else None) == expected


@pytest.mark.parametrize("to", ["", "'head'", "to='head'", "STEP"])
def test_a_revision_that_names_no_step_is_refused(to: str, run: Run, make_host: MakeHost) -> None:
    host = make_host()
    host.add_revision(f"sa_jobs.migrations.upgrade({to})")
    where = ["--directory", str(host.directory)]
    for verb in ("check", "new"):
        ended = run("migrations", verb, *where)
        assert ended.code == 1
        assert "host_1.py brings the tables to " in ended.one_line()
        assert "let it name the step" in ended.one_line()

    # A later revision that does is enough.
    host.add_steps()
    assert run("migrations", "check", *where).code == 0


# --- migrations list and sql ----------------------------------------------------------------------


def test_list_shows_every_step(run: Run) -> None:
    out = run("migrations", "list").out
    for step in migrations.revisions():
        assert step.revision in out
        assert step.summary in out


@pytest.mark.parametrize("place", [DEFAULT, CUSTOM], ids=lambda place: place.name)
def test_sql_does_what_the_command_does(
    place: Place, run: Run, empty_database: str, another_database: str
) -> None:
    where = options(place)
    create_all(another_database, place)
    run_psql(empty_database, run("migrations", "sql", "--to", STEPS[0], *where).out)
    run_psql(
        empty_database,
        run("migrations", "sql", "--from", STEPS[0], "--concurrently", *where).out,
    )
    assert pg_dump(empty_database) == pg_dump(another_database)
    assert "nothing to do" in run("db", "upgrade", *where, url=empty_database).out
    run_psql(empty_database, run("migrations", "sql", "--down", *where).out)
    assert objects(empty_database) == set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (f"--from {HEAD} --to base", f"from {HEAD} to base is the way back: say --down"),
        (f"--from head --to {STEPS[0]}", "is the way back: say --down"),
        (f"--down --from {STEPS[0]} --to head", "is the way up, and --down is for the way back"),
        ("--from head", "there is no step from head to head"),
        ("--to base", "there is no step from base to base"),
        (f"--from {HEAD}", f"there is no step from {HEAD} to head"),
        ("--down --from base", "there is no step from base to base"),
    ],
)
def test_sql_refuses_the_wrong_way_and_no_way(arguments: str, expected: str, run: Run) -> None:
    ended = run("migrations", "sql", *arguments.split())
    assert (ended.code, ended.out) == (2, "")
    assert expected in ended.one_line()


def test_sql_takes_head_and_base_by_name(run: Run) -> None:
    whole = run("migrations", "sql").out
    assert whole == run("migrations", "sql", "--from", "base", "--to", "head").out
    back = run("migrations", "sql", "--down").out
    assert back == run("migrations", "sql", "--down", "--from", "head", "--to", "base").out
    assert "DROP TABLE" in back


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--name", "a b"),
        ("--name", 'a"b'),
        ("--name", "a" * 50),
        ("--name", "taken"),
        ("--schema", "a b"),
        ("--schema", "pg_own"),
        ("--schema", ""),
    ],
)
def test_names_that_tables_cannot_have_are_wrong_usage(option: str, value: str, run: Run) -> None:
    for verb in ("new", "check", "sql"):
        ended = run("migrations", verb, option, value)
        assert (ended.code, ended.out) == (2, "")
        assert f"{option.removeprefix('--')}={value!r}" in ended.one_line()


# --- db -------------------------------------------------------------------------------------------


def test_db_goes_up_and_down(run: Run, empty_database: str) -> None:
    url = empty_database
    assert "no tables" in run("db", "build-indexes", url=url).one_line()
    assert run("db", "upgrade", "--to", STEPS[0], url=url).out.startswith(STEPS[0])
    assert "sa-jobs db upgrade" in run("db", "check", url=url).one_line()
    assert run("db", "build-indexes", url=url).out.count("are built") == 2
    assert run("db", "upgrade", "--concurrently", "always", url=url).out.count("\n") == 2
    assert "nothing to do" in run("db", "build-indexes", url=url).out
    assert run("db", "downgrade", "--to", STEPS[1], url=url).out.startswith(HEAD)
    assert run("db", "current", url=url).out == f"{STEPS[1]}\n"
    assert "--yes" in run("db", "downgrade", "--to", "base", url=url).one_line()
    assert run("db", "downgrade", "--to", "base", "--yes", url=url).code == 0
    assert objects(url) == set()


@pytest.mark.parametrize(
    "command",
    [
        ("migrations", "new", "--to"),
        ("migrations", "sql", "--to"),
        ("migrations", "sql", "--from"),
        ("db", "upgrade", "--to"),
        ("db", "downgrade", "--to"),
    ],
    ids=" ".join,
)
def test_a_step_that_the_package_lacks_is_named(command: tuple[str, ...], run: Run) -> None:
    ended = run(*command, "sa_jobs_9999")
    assert ended.code == 2
    assert f"'sa_jobs_9999' is not a step of sa-jobs {__version__}" in ended.one_line()


def test_a_newer_schema_that_this_release_may_use_is_fine(run: Run, empty_database: str) -> None:
    create_all(empty_database)
    execute(empty_database, "UPDATE sa_jobs_step SET revision = 'sa_jobs_9999'")
    assert "newer than the newest step" in run("db", "check", url=empty_database).out
    execute(empty_database, "UPDATE sa_jobs_step SET min_client = '9.0.0'")
    assert "pip install --upgrade sa-jobs" in run("db", "check", url=empty_database).one_line()


def test_six_commands_at_once_all_succeed(empty_database: str, another_database: str) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "sa_jobs", "db", "upgrade", "--database-url", empty_database],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    ended = [(*process.communicate(timeout=120), process.returncode) for process in processes]
    assert [code for _, _, code in ended] == [0] * 6, ended
    assert sum("nothing to do" in out for out, _, _ in ended) == 5
    create_all(another_database)
    assert pg_dump(empty_database) == pg_dump(another_database)
