"""Logging: one line per stage, readable on a terminal, with task, session, stage and lane as fields.

Configured once per process, by the process. Modules only ask for a logger. The same lines can be written as JSON, one
object each, for a collector that wants the fields apart.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(name)s  %(message)s"
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
"""A value from outside must not begin a line that looks like ours, nor move a terminal's cursor."""


class Line(str):
    """A line in the house form, which still knows its parts."""

    __slots__ = ("event", "fields")
    event: str
    fields: dict[str, Any]


class JSONFormatter(logging.Formatter):
    """One object a line: `at`, `level`, `logger`, `event`, and the fields of the line."""

    def format(self, record: logging.LogRecord) -> str:
        said = record.msg if isinstance(record.msg, Line) else None
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"at": at, "level": record.levelname, "logger": record.name}
        body = {"event": said.event, **said.fields} if said is not None else {"event": record.getMessage()}
        if record.exc_info:
            body["traceback"] = self.formatException(record.exc_info)
        return json.dumps({**body, **head}, default=str)


def configure(level: str = "INFO", form: str = "text") -> None:
    """Send records of this process to stderr, as `text` or `json`; a second call changes only the level."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if not any(isinstance(handler, logging.StreamHandler) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(JSONFormatter() if form == "json" else logging.Formatter(FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
    for chatty in ("httpx", "httpcore", "kombu", "amqp", "celery", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def line(event: str, **fields: Any) -> Line:
    """`event key=value …`, the house form of a log line."""
    told = {key: value for key, value in fields.items() if value is not None}
    said = Line(" ".join([event, *(f"{key}={value}" for key, value in told.items())]).translate(ESCAPED))
    said.event, said.fields = event, told
    return said
