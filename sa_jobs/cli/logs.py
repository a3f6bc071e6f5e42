"""A worker's log: one line for each record, with time, level, logger and the job it is about."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
import sys

from sa_jobs.cli.output import escaped, escaped_lines
from sa_jobs.error_text import hide_data

# What log records about a job carry, in this order; never the payload.
FIELDS = ("job_id", "job_handler", "job_queue", "job_attempt")

_PLAIN = re.compile(r"[\w.:/@+-]+", re.ASCII)


class LineFormatter(logging.Formatter):
    """Formats a record as one line: time with offset, level, logger, message, key=value fields.

    What could break the line is escaped. A traceback follows on lines of its own, indented. Of a
    database's error it has neither parameters nor the detail, which quotes rows. `with_pid` adds
    the process, where several write to one stream.
    """

    def __init__(self, *, with_pid: bool = False) -> None:
        super().__init__()
        self._with_pid = with_pid

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and the traceback if there is one."""
        arguments = record.args if isinstance(record.args, tuple) else ()
        for error in (*arguments, *(record.exc_info or ())[1:2]):
            if isinstance(error, BaseException):
                hide_data(error)
        moment = dt.datetime.fromtimestamp(record.created).astimezone()
        line = " ".join(
            (
                moment.isoformat(timespec="milliseconds"),
                record.levelname,
                record.name,
                escaped(record.getMessage()),
                *(
                    f"{field}={_field(getattr(record, field))}"
                    for field in FIELDS
                    if hasattr(record, field)
                ),
                *([f"pid={record.process}"] if self._with_pid else []),
            )
        )
        if not record.exc_info:
            return line
        trace = escaped_lines(self.formatException(record.exc_info))
        return "\n".join([line, *(f"    {entry}" for entry in trace)])


def _field(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def configure_logging(level: str, *, with_pid: bool = False) -> None:
    """Log to standard error, unless the application has set up a handler of its own.

    SQLAlchemy stays at WARNING where its level was left unset: at INFO it logs every statement
    with its parameters, and so with the payloads.
    """
    root = logging.getLogger()
    logging.getLogger("sa_jobs").setLevel(level)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(LineFormatter(with_pid=with_pid))
        root.addHandler(handler)
        root.setLevel(level)
    database = logging.getLogger("sqlalchemy")
    if database.level == logging.NOTSET:
        database.setLevel(max(root.level, logging.WARNING))
