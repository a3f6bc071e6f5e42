"""MODULE:ATTR -> the Jobs that it names, or the application that carries one."""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from sa_jobs.cli.invocation import Application
from sa_jobs.cli.output import escaped_lines, say
from sa_jobs.error_text import hide_data
from sa_jobs.errors import SaJobsError, WorkerError
from sa_jobs.handlers import Jobs

_EXPECTED = (
    "a Jobs, or an application that carries one, or a function without arguments that returns "
    "either of them"
)

# Parts that a file or folder can be called, with dots between them.
_MODULE = re.compile(r"[^./\\\0]+(\.[^./\\\0]+)*")


class EndedEarly(SystemExit):
    """A signal came while the application was imported: the process ends, in peace."""


def load_target(reference: str) -> Jobs | Application:
    """Return what `MODULE:ATTR` names, or what the factory returns that it names.

    It is a Jobs, or an application, which carries one in `.extensions["sa_jobs"]`: as its attribute
    `jobs`, or by a method `application` that returns an Application. The current directory comes
    first on the import path, as with `flask` and `gunicorn`. ATTR may have dots, and a factory may
    be written with its parentheses.

    Raises click.UsageError for a reference that leads nowhere. An error of the module's own code
    is shown with its traceback, then raised as WorkerError.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (_MODULE.fullmatch(module_name) and colon and all(attribute.split("."))):
        raise click.UsageError(f"{reference!r} must be MODULE:ATTR, for example shop.app:jobs")
    module = _import(module_name)
    target = _attribute(module, attribute.removesuffix("()"))
    found = _carried_by(target)
    if found is None and _is_factory(target):
        found = _carried_by(_called(target, reference))
    if found is None:
        raise click.UsageError(f"{reference} is {_kind(target)}, not {_EXPECTED}")
    return found


def _import(name: str) -> ModuleType:
    reason = None
    try:
        directory = str(Path.cwd())
    except OSError as error:
        directory = ""  # It is gone, or not ours to see; an installed application needs none.
        reason = error.strerror
    if directory and directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            if not directory:
                raise WorkerError(
                    f"there is no module {error.name!r} among the installed packages, and the "
                    f"current directory cannot be looked at ({reason}): start the worker in the "
                    "application's directory"
                ) from None
            raise click.UsageError(
                f"there is no module {error.name!r} in {directory} or among the installed packages"
            ) from None
        raise WorkerError(
            f"{name} imports the module {error.name!r}, which is not installed"
        ) from error
    except SaJobsError as error:
        raise WorkerError(f"importing {name} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise _failure(error, f"importing {name}") from error


def _attribute(module: ModuleType, path: str) -> Any:
    target: Any = module
    where = module.__name__
    for name in path.split("."):
        if not hasattr(target, name):
            raise click.UsageError(f"{where} has no {name!r}{_suggestion(target, name)}")
        target = getattr(target, name)
        where += f".{name}"
    return target


def _suggestion(target: Any, name: str) -> str:
    names = list(vars(target)) if hasattr(target, "__dict__") else []
    close = difflib.get_close_matches(name, names, n=3)
    registries = [known for known in names if isinstance(vars(target)[known], Jobs)]
    found = list(dict.fromkeys([*registries, *close]))
    return f" (did you mean {' or '.join(found)}?)" if found else ""


def _carried_by(target: Any) -> Jobs | Application | None:
    if isinstance(target, Jobs):
        return target
    extensions = getattr(target, "extensions", None)
    extension: Any = extensions.get("sa_jobs") if isinstance(extensions, dict) else None
    if hasattr(extension, "application"):
        carried: Application = extension.application(target)
        return carried
    found = getattr(extension, "jobs", None)
    return found if isinstance(found, Jobs) else None


def _is_factory(target: Any) -> bool:
    # An application itself is called for each request.
    return callable(target) and not isinstance(target, type) and not hasattr(target, "extensions")


def _called(factory: Any, reference: str) -> Any:
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise click.UsageError(
            f"{reference} cannot be called without arguments ({error}); it must be {_EXPECTED}"
        ) from None
    except ValueError:
        pass  # It has no signature to look at; the call will tell.
    try:
        return factory()
    except SaJobsError as error:
        raise WorkerError(f"calling {reference} failed: {error}") from error
    except (Exception, SystemExit) as error:
        raise _failure(error, f"calling {reference}") from error


def _failure(error: Exception | SystemExit, what: str) -> WorkerError:
    """Show where the user's own code failed, without our frames and the import system's."""
    if isinstance(error, EndedEarly):
        raise error
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith("<frozen ")
        and frame.filename != __file__
        and Path(frame.filename).parent.name != "importlib"
    ]
    for line in traceback.format_list(own):
        for shown in escaped_lines(line.rstrip("\n")):
            say(shown)
    return WorkerError(f"{what} failed: {type(error).__name__}: {_text(error)}")


def _text(error: BaseException) -> str:
    hide_data(error)
    try:
        return str(error)
    except Exception:
        return "its text cannot be shown"


def _kind(target: Any) -> str:
    if isinstance(target, type):
        return f"the class {target.__name__}"
    name = type(target).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
