"""Commands of Python modules as forks of a process that has the libraries imported.

More than half of the time of an `alembic` or `flask` command goes into importing what is the same
for all. Each fork is a process like any other, with its own directory, environment, and modules of
the host and of the package; only libraries that such a command imports first anyway are there
already.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from tests.support.commands import Ended

# For Flask neither Flask-Migrate nor Alembic: a host may import its models before them.
LIBRARIES = {
    "alembic": "alembic.config alembic.command alembic.autogenerate sqlalchemy.orm psycopg"
    " sqlalchemy.dialects.postgresql.psycopg",
    "flask": "flask.cli flask_sqlalchemy psycopg sqlalchemy.dialects.postgresql.psycopg",
}

_PROGRAM = """\
import importlib, json, os, runpy, signal, sys, traceback

for name in sys.argv[1].split():
    importlib.import_module(name)
for line in sys.stdin:
    asked = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in enumerate((os.devnull, asked["out"], asked["error"])):
            os.dup2(os.open(name, os.O_RDWR), number)
        os.chdir(asked["directory"])
        os.environ.clear()
        os.environ.update(asked["variables"])
        sys.path[0] = asked["directory"]
        sys.argv = asked["arguments"]
        code = 0
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        except SystemExit as error:
            code = error.code
            if not isinstance(code, int):
                code = code is not None
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code & 255)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@cache
def _parent(python: Path, module: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [python, "-c", _PROGRAM, LIBRARIES[module]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        # A line that is there must not hide in a buffer when it is waited for.
        bufsize=0,
        env={name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def run_module(
    python: Path,
    arguments: Sequence[str],
    *,
    directory: Path,
    variables: Mapping[str, str],
    seconds: float,
) -> Ended:
    """Run `python -m` with these arguments, the module first, and return how it ended."""
    parent = _parent(python, arguments[0])
    assert parent.stdin is not None
    assert parent.stdout is not None
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as error:
        asked = {
            "arguments": list(arguments),
            "directory": str(directory),
            "variables": dict(variables),
            "out": out.name,
            "error": error.name,
        }
        parent.stdin.write(json.dumps(asked).encode() + b"\n")
        pid = int(parent.stdout.readline())
        if not select.select([parent.stdout], [], [], seconds)[0]:
            os.kill(pid, 9)
            raise TimeoutError(f"{' '.join(arguments)}: {out.read()}{error.read()}")
        code = int(parent.stdout.readline())
        return Ended(code, out.read(), error.read())
