"""The command `sa-jobs` in a process of its own, as a shell would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, and what it wrote."""

    code: int
    out: str
    error: str

    def one_line(self) -> str:
        """Return what it wrote on standard error, which must be one line and no traceback."""
        assert self.error.endswith("\n")
        assert self.error.count("\n") == 1, self.error
        assert "Traceback" not in self.error
        return self.error.rstrip("\n")


def environment(url: str | None = None, **variables: str) -> dict[str, str]:
    """Return our environment with this database and no other."""
    named = ("SA_JOBS_DATABASE_URL", "DATABASE_URL")
    kept = {name: value for name, value in os.environ.items() if name not in named}
    if url is not None:
        kept["SA_JOBS_DATABASE_URL"] = url
    return {**kept, **variables}


def sa_jobs(
    *arguments: str,
    url: str | None = None,
    given: str | None = None,
    variables: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    seconds: float = 120,
) -> Ended:
    """Run `sa-jobs`, with `given` as its standard input, and return how it ended."""
    command = [sys.executable, "-m", "sa_jobs", *arguments]
    return _run(command, url, given, variables or {}, directory, seconds)


def in_shell(
    line: str,
    *,
    url: str | None = None,
    variables: Mapping[str, str] | None = None,
    directory: Path = ROOT,
    seconds: float = 120,
) -> Ended:
    """Run a line of shell, in which `sa_jobs` is the command, and return how it ended."""
    script = f'sa_jobs() {{ "{sys.executable}" -m sa_jobs "$@"; }}\n{line}'
    return _run(["sh", "-c", script], url, None, variables or {}, directory, seconds)


def _run(
    command: list[str],
    url: str | None,
    given: str | None,
    variables: Mapping[str, str],
    directory: Path,
    seconds: float,
) -> Ended:
    ended = subprocess.run(
        command,
        cwd=directory,
        env=environment(url, PYTHONPATH=str(ROOT), **variables),
        input=given,
        stdin=subprocess.DEVNULL if given is None else None,
        capture_output=True,
        encoding="utf-8",
        timeout=seconds,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)
