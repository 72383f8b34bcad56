"""The proxy's clocks and sizes, in one place so that tests can turn them down."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, unless the name says otherwise."""

    retry: float = 60.0
    """How long an engine that is away is waited for before the harness is told."""
    keepalive: float = 5.0
    """Longest silence in a stream; harnesses give up after about 60 s without a byte."""
    abort_grace: float = 2.0
    """How long an aborted request may take to hand over its partial output."""
    commit: float = 30.0
    """How long a database that is away is waited for."""
    deliver_grace: float = 0.25
    """How long after an answer its delivery may still be on its way into the database."""
    body: float = 120.0
    """How long a request's body may take to come."""
    beat: float = 1.0
    """How often a process says that it lives, and looks whether the gate moved if it was not told."""
    aside_chars: int = 8_000
    """Texts from this length on are rendered in a thread: the tokenizer takes about 0.7 ms for 1,000 characters."""
    aside_bytes: int = 512_000
    """Bodies from this size on are compressed in a thread."""
