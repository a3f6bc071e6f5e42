"""What a host's own Alembic chain says about our steps: read from its files, not a database."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sa_jobs.errors import MigrationError
from sa_jobs.migrations._steps import revisions

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory


class Call(NamedTuple):
    """A call of ours in a revision: the step that it leads to, and the function it is in.

    The step is as the revision has it: "head", or the text of an expression, is none.
    """

    to: str | None
    schema: str | None
    name: str
    function: str
    path: Path


def recorded_call(
    scripts: ScriptDirectory,
    *,
    schema: str | None = None,
    name: str = "sa_jobs",
    function: str | None = None,
) -> Call | None:
    """Return the last call for these tables in the host's chain, None if there is none.

    In a chain for several databases, `function` is the one that upgrades one of them; without it,
    all of them count.
    """
    for script in scripts.walk_revisions():
        found = [
            call
            for call in calls(Path(script.path))
            if (call.schema, call.name) == (schema, name) and function in (None, call.function)
        ]
        if found:
            return found[-1]
    return None


def recorded_places(scripts: ScriptDirectory) -> tuple[tuple[str | None, str], ...]:
    """Return schema and name of all tables that the chain has made and not removed."""
    last: dict[tuple[str | None, str], str | None] = {}
    for script in scripts.walk_revisions():
        for call in reversed(list(calls(Path(script.path)))):
            last.setdefault((call.schema, call.name), call.to)
    return tuple(place for place, to in last.items() if to is not None)


def has_branch(scripts: ScriptDirectory) -> bool:
    """Return whether the chain has the steps themselves, as a branch of their own."""
    first = revisions()[0].revision
    return any(script.revision == first for script in scripts.walk_revisions())


def calls(path: Path) -> Iterator[Call]:
    """Yield the calls of ours by which a revision goes up."""
    module = ast.parse(path.read_text(encoding="utf-8"))
    imported = dict(_imported(module))
    for function in ast.walk(module):
        # Alembic's templates for several databases have one function for each.
        if isinstance(function, ast.FunctionDef) and function.name.startswith("upgrade"):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield from _ours(node, imported, path, function.name)


def _imported(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a revision imports, and what each stands for."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _ours(node: ast.Call, imported: dict[str, str], path: Path, function: str) -> Iterator[Call]:
    first, dot, rest = ast.unparse(node.func).partition(".")
    called = imported.get(first, first) + dot + rest
    if called not in ("sa_jobs.migrations.upgrade", "sa_jobs.migrations.downgrade"):
        return
    given = {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    to = _value(node.args[0]) if node.args else given.get("to", "head")
    yield Call(
        None if to == "base" else to,
        given.get("schema"),
        given.get("name", "sa_jobs"),
        function,
        path,
    )


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)


def databases(config: Config, scripts: ScriptDirectory) -> tuple[str, ...]:
    """Return the databases that the chain's template has functions for, none if it is for one.

    Raises MigrationError where only the application knows them.
    """
    template = Path(scripts.dir) / "script.py.mako"
    if not template.exists() or not re.search(
        r"\w_upgrades\b", template.read_text(encoding="utf-8")
    ):
        return ()
    # Since Alembic 1.16 a pyproject.toml may have it.
    option = getattr(config, "get_alembic_option", config.get_main_option)
    named = option("databases")
    if named is None:
        raise MigrationError(
            f"by its template {template}, this chain has a function for each of several databases, "
            "which only the application knows: let `flask db migrate` (or `alembic revision "
            "--autogenerate`) write the revision instead"
        )
    return tuple(re.split(r",\s*", named))
