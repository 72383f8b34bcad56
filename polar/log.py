"""Logging: one line per stage, readable on a terminal, with task, session, stage and lane as fields.

Configured once per process, by the process. Modules only ask for a logger.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(name)s  %(message)s"
ESCAPED = {code: f"\\x{code:02x}" for code in (*range(32), 127)}
"""A value from outside must not begin a line that looks like ours, nor move a terminal's cursor."""


def configure(level: str = "INFO") -> None:
    """Send records of this process to stderr; a second call changes only the level."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    if not any(isinstance(handler, logging.StreamHandler) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
        root.addHandler(handler)
    for chatty in ("httpx", "httpcore", "kombu", "amqp", "celery", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def line(event: str, **fields: Any) -> str:
    """`event key=value …`, the house form of a log line."""
    said = " ".join([event, *(f"{key}={value}" for key, value in fields.items() if value is not None)])
    return said.translate(ESCAPED)
