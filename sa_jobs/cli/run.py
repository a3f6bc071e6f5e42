"""The one place where a command's failure becomes an exit code and a line on standard error."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Sequence

import click
from click.exceptions import NoSuchOption
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from sa_jobs.cli.output import escaped, say
from sa_jobs.errors import (
    AttachError,
    DatabaseUrlError,
    InvalidJobError,
    InvalidJobTypeError,
    SaJobsError,
)

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# What was typed is wrong, not what happened.
_USAGE_ERRORS = (AttachError, DatabaseUrlError, InvalidJobError, InvalidJobTypeError)


def run(command: click.Command, arguments: Sequence[str] | None, program: str) -> int:
    """Run a command and return its exit code; a failure of a known kind prints one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given:
        given = ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal or pipe that cannot show a character gets its number.
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command.main(given, prog_name=program, standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # not in every release of click
            error.show()
            return error.exit_code
        say(f"{_path(error, program)}: {escaped(_message(error))}{_hint(error, program)}")
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        say(f"{program}: interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has seen enough. Nothing more may be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    except (SaJobsError, SQLAlchemyError) as error:
        say(f"{program}: {escaped(explain(error))}")
        return EXIT_USAGE if isinstance(error, _USAGE_ERRORS) else EXIT_FAILURE
    return code if isinstance(code, int) else 0


def explain(error: Exception) -> str:
    """Return one line that says what is wrong and what to do; it holds no password."""
    if not isinstance(error, DBAPIError):
        return _one_line(str(error))
    reason = _one_line(str(error.orig))
    state: str = getattr(error.orig, "sqlstate", None) or ""
    for prefix, way_out in _WAYS_OUT.items():
        if state.startswith(prefix):
            return f"{reason}: {way_out}"
    if state:
        return f"the database refused the command: {reason} (SQLSTATE {state})"
    reason = _without_credentials(_LIBPQ_PHRASES.sub("", reason))
    return (
        f"cannot reach the database ({reason}): check that the server runs, and the URL in "
        "--database-url, SA_JOBS_DATABASE_URL or DATABASE_URL"
    )


# Said twice over, or a question that the line itself answers.
_LIBPQ_PHRASES = re.compile(r"^connection (failed|is bad): | Is the server running [^?]*\?")

_CHECK_TABLES = "run `sa-jobs db check` to see how far the tables are"
_TRY_AGAIN = "try again later"
_WAYS_OUT = {
    "08": _TRY_AGAIN,
    "25006": "this server only answers reads; name the primary server in the URL",
    "28": "check the user and the password in the URL",
    "3D000": "check the URL, or create the database",
    "3F000": _CHECK_TABLES,
    "40": _TRY_AGAIN,
    "42501": "let the owner grant the role what is missing, or use another role in the URL",
    "42703": _CHECK_TABLES,
    "42P01": _CHECK_TABLES,
    "53": _TRY_AGAIN,
    "55P03": _TRY_AGAIN,
    "57": _TRY_AGAIN,
}


def _one_line(text: str) -> str:
    return " ".join(text.split()).rstrip(" .:") or "no reason was given"


def _without_credentials(reason: str) -> str:
    # A password with an unescaped @ in it ends up in what the driver takes for the host.
    return re.sub(r"[^\s'\"]*@", "***@", reason)


def _path(error: click.ClickException, program: str) -> str:
    context = getattr(error, "ctx", None)
    return context.command_path if context is not None else program


def _message(error: click.ClickException) -> str:
    message = _one_line(error.format_message())
    if isinstance(error, NoSuchOption) and error.possibilities and "Did you mean" not in message:
        message += f" (did you mean {', '.join(sorted(error.possibilities))}?)"
    return message


def _hint(error: click.ClickException, program: str) -> str:
    if not isinstance(error, click.UsageError):
        return ""
    return f" (see {_path(error, program)} --help)"
