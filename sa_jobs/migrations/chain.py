"""What a host's own Alembic chain says about our steps: read from its files, not a database."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sa_jobs.migrations._steps import revisions

if TYPE_CHECKING:
    from alembic.script import ScriptDirectory


class _Call(NamedTuple):
    """A call of ours in a revision: the step that it leads to."""

    to: str | None
    schema: str | None
    name: str


def recorded_step(
    scripts: ScriptDirectory, *, schema: str | None = None, name: str = "sa_jobs"
) -> str | None:
    """Return the step to which the host's chain brings the tables, None if to none."""
    for script in scripts.walk_revisions():
        calls = [
            call for call in _calls(Path(script.path)) if (call.schema, call.name) == (schema, name)
        ]
        if calls:
            return calls[-1].to
    return None


def _calls(path: Path) -> Iterator[_Call]:
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        # Alembic's templates for several databases have one function for each.
        if isinstance(function, ast.FunctionDef) and function.name.startswith("upgrade"):
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    yield from _ours(node)


def _ours(node: ast.Call) -> Iterator[_Call]:
    called = ast.unparse(node.func).rpartition("migrations.")
    if called[0] not in ("", "sa_jobs.") or called[2] not in ("upgrade", "downgrade"):
        return
    given = {keyword.arg or "": _value(keyword.value) for keyword in node.keywords}
    to = _value(node.args[0]) if node.args else given.get("to", "head")
    if to == "head":
        to = revisions()[-1].revision
    yield _Call(None if to == "base" else to, given.get("schema"), given.get("name", "sa_jobs"))


def _value(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.unparse(node)
