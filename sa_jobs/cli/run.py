"""The one place where a command's failure becomes an exit code and a line on standard error."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence

import click
from click.exceptions import NoSuchOption
from sqlalchemy.exc import (
    DBAPIError,
    InterfaceError,
    OperationalError,
    SQLAlchemyError,
    StatementError,
)

from sa_jobs import poolers
from sa_jobs.cli.invocation import Invocation
from sa_jobs.cli.output import escaped, flush, prepare_streams, say, settle_streams
from sa_jobs.error_text import without_credentials, without_data
from sa_jobs.errors import (
    AttachError,
    DatabaseUrlError,
    InvalidJobError,
    InvalidJobTypeError,
    SaJobsError,
    WorkerOptionError,
)

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# What was typed is wrong, not what happened.
_USAGE_ERRORS = (
    AttachError,
    DatabaseUrlError,
    InvalidJobError,
    InvalidJobTypeError,
    WorkerOptionError,
)


def run(command: click.Command, arguments: Sequence[str] | None, program: str) -> int:
    """Run a command and return its exit code; a failure of a known kind prints one line.

    The object of click's context is an Invocation.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    invocation = Invocation(_own_command(command, arguments))
    return exit_code(
        lambda: command.main(
            given or ["--help"], prog_name=program, standalone_mode=False, obj=invocation
        ),
        program,
    )


def exit_code(call: Callable[[], object], program: str) -> int:
    """Return the exit code of what a call does; a failure of a known kind prints one line."""
    prepare_streams()
    try:
        return _exit_code(call, program)
    finally:
        settle_streams()


def started_by() -> list[str]:
    """Return the command line that does the same again, in a process of its own.

    What this process was started with says it best: by which script or module, and with which
    options of Python's.
    """
    return [sys.executable, *sys.orig_argv[1:]]


def _own_command(command: click.Command, arguments: Sequence[str] | None) -> list[str]:
    if arguments is None:
        return started_by()
    # Arguments that a program gave have nothing to do with what it was started with.
    sub_command = [] if isinstance(command, click.Group) else [str(command.name)]
    return [sys.executable, "-m", "sa_jobs", *sub_command, *arguments]


def _exit_code(call: Callable[[], object], program: str) -> int:
    try:
        code = call()
        if sys.stdout is not None:
            flush()
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
        return EXIT_FAILURE  # The reader of a pipe has seen enough.
    except (SaJobsError, SQLAlchemyError) as error:
        say(f"{program}: {escaped(explain(error))}")
        return EXIT_USAGE if isinstance(error, _USAGE_ERRORS) else EXIT_FAILURE
    except (OSError, UnicodeError) as error:
        # The disk is full, a text does not fit an encoding: nothing that a traceback would tell.
        say(f"{program}: {escaped(_outside(error))}")
        return EXIT_FAILURE
    return code if isinstance(code, int) else 0


def explain(error: Exception) -> str:
    """Return one line that says what is wrong and what to do; it holds no password.

    Of what the server says it has the message alone: the detail quotes rows, and so payloads.
    """
    if not isinstance(error, DBAPIError):
        # Without the statement, which is of no use here.
        cause = error.orig if isinstance(error, StatementError) else None
        return _one_line(str(cause or error))
    message = getattr(getattr(error.orig, "diag", None), "message_primary", None)
    reason = _one_line(message or without_data(str(error.orig)))
    if poolers.forbids_transactions(error):
        return poolers.NO_TRANSACTIONS
    state: str = getattr(error.orig, "sqlstate", None) or ""
    for prefix, way_out in _WAYS_OUT.items():
        if state.startswith(prefix):
            return f"{reason}: {way_out}"
    if state:
        return f"the database refused the command: {reason} (SQLSTATE {state})"
    if error.statement is not None and not isinstance(error, (InterfaceError, OperationalError)):
        return f"the database driver cannot do this: {reason}"
    reason = without_credentials(_LIBPQ_PHRASES.sub("", reason))
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
    "22021": (
        "text is not in the encoding that it should be in; where the database has another one than "
        "it says, name it in the URL, as ?client_encoding=latin1"
    ),
    "22P05": "this database's encoding does not have the character; a UTF8 database has all",
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


def _outside(error: OSError | UnicodeError) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f": {error.filename!r}"
        return _one_line(f"{error.strerror}{name}")
    return _one_line(str(error))


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
