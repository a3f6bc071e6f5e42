"""Imports go one way, and each file keeps to what it is for."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import sa_jobs

PACKAGE = Path(sa_jobs.__file__).parent

# A file imports from its own layer or those before it; the package's name stands for all in it.
LAYERS = (
    ("errors", "limits", "jsontext", "meta", "backoff", "error_text", "forks", "urls"),
    ("ddl", "models", "names"),
    (
        "expressions",
        "poolers",
        "autocommit",
        "connections",
        "statements",
        "presence",
        "context",
        "deaths",
        "hooks",
        "outcome",
        "payloads",
        "signatures",
    ),
    ("job_options", "select_columns", "duplicates", "inserts"),
    ("claims", "enqueue", "handlers", "lookup", "migrations", "retention", "stats"),
    ("schedules",),
    ("worker",),
    ("supervisor",),
    ("alembic", "cli", "demo", "flask", "opentelemetry", "testing", "__main__"),
)
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def unit_of(module: str) -> str:
    return module.split(".")[1]


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """Yield each imported (module, name), without those under TYPE_CHECKING."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from ((node.module or "", alias.name) for alias in node.names)
        else:
            yield from imports(node)


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def ours(path: Path) -> set[str]:
    """Return the units of the package that a file imports."""
    units = set()
    for module, name in imports(parsed(path)):
        if module == "sa_jobs" and name in LAYER:
            units.add(name)
        elif module.startswith("sa_jobs."):
            units.add(unit_of(module))
    return units - {"__version__"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_imports_only_from_its_layer_and_those_before_it(path: Path) -> None:
    unit = unit_of(module_of(path))
    assert unit in LAYER, f"say in LAYERS where sa_jobs/{unit} belongs"
    assert {name for name in ours(path) - {unit} if LAYER[name] > LAYER[unit]} == set()


def test_no_files_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        unit = unit_of(module_of(path))
        graph.setdefault(unit, set()).update(ours(path) - {unit})
    while graph:
        leaves = {unit for unit, needs in graph.items() if not needs & graph.keys()}
        assert leaves, f"a circle among {sorted(graph)}"
        for unit in leaves:
            del graph[unit]


def test_the_integrations_use_public_names_only() -> None:
    public = set(sa_jobs.__all__) | {"__version__"}
    for name in ("flask", "opentelemetry"):
        path = PACKAGE / f"{name}.py"
        if path.exists():
            used = {what for module, what in imports(parsed(path)) if module == "sa_jobs"}
            assert used <= public


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_the_layers_above_the_worker_import_from_the_package_itself(path: Path) -> None:
    names = {name for module, name in imports(parsed(path)) if module == "sa_jobs"}
    if LAYER[unit_of(module_of(path))] <= LAYER["worker"]:
        assert names <= LAYER.keys() | {"__version__", None}


WORKER = [path for path in FILES if unit_of(module_of(path)) == "worker"]
# What the worker may know of SQLAlchemy: connections and their faults, no SQL.
ALLOWED = {"Connection", "Engine", "URL", "create_engine", "event", "make_url"}
SQL_TEXT = re.compile(
    r"\b(SELECT .* FROM|INSERT INTO|UPDATE \w+ SET|DELETE FROM|LISTEN \w|NOTIFY \w|SET \w+ =)\b",
    re.DOTALL,
)


@pytest.mark.parametrize("path", WORKER, ids=module_of)
def test_the_worker_holds_no_sql(path: Path) -> None:
    tree = parsed(path)
    names = {name for module, name in imports(tree) if module == "sqlalchemy"}
    assert names <= ALLOWED
    modules = {module for module, _ in imports(tree) if module.startswith("sqlalchemy.")}
    for module in modules:
        assert module.startswith(
            (
                "sqlalchemy.engine",
                "sqlalchemy.exc",
                "sqlalchemy.ext.asyncio",
                "sqlalchemy.orm",
                "sqlalchemy.pool",
                "sqlalchemy.util",
            )
        )
    docstrings = {
        ast.get_docstring(node, clean=False)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    }
    texts = {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not [text for text in texts - docstrings if SQL_TEXT.search(text)]


def test_an_enqueue_starts_no_threads_and_hooks_into_no_session() -> None:
    for name in (
        "autocommit", "connections", "duplicates", "enqueue", "handlers", "inserts",
        "job_options", "statements",
    ):  # fmt: skip
        tree = parsed(PACKAGE / f"{name}.py")
        assert not {module for module, _ in imports(tree)} & {"threading", "asyncio", "concurrent"}
        assert "event" not in {name for module, name in imports(tree) if module == "sqlalchemy"}


@pytest.mark.parametrize("name", ["statements", "expressions", "outcome", "backoff"])
def test_a_pure_file_asks_no_clock(name: str) -> None:
    used = {
        node.attr
        for node in ast.walk(parsed(PACKAGE / f"{name}.py"))
        if isinstance(node, ast.Attribute)
    }
    assert not used & {"now_utc", "utcnow", "today", "monotonic", "perf_counter", "execute"}


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_nothing_turns_data_into_code(path: Path) -> None:
    """Annotations of registered functions are evaluated; a row's content never is."""
    tree = parsed(path)
    assert not {module for module, _ in imports(tree)} & {"pickle", "marshal", "shelve", "yaml"}
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    allowed = {"eval"} if module_of(path) == "sa_jobs.signatures" else set()
    assert not called & {"eval", "exec", "compile", "__import__"} - allowed


def test_the_top_level_folder_named_alembic_is_no_package() -> None:
    """It would stand in the library's place."""
    assert not (PACKAGE.parent / "alembic" / "__init__.py").exists()
