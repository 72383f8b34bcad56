"""OpenTelemetry: one trace for each session, a span for each stage, and one for each model call. Off unless asked for.

The stages and calls of a session happen in several processes on several machines. None hands a context to another:
ids are made of what all of them know. The trace's id comes from the session's id, a stage's span id from session,
attempt and stage; so a proxy names the stage that its call belongs to without being told. Spans are made when their
work has ended, with the times it had: nothing is done while it runs, and a process without a collector pays one
comparison. No span has text of requests or answers, and none has keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from polar.clock import now
from polar.errors import SpecError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from polar.spans import Spans

Value = str | int | float | bool | tuple[str, ...]
_spans: Spans | None = None


def configure(endpoint: str, service: str) -> None:
    """Send this process's spans to an OTLP collector, if `endpoint` names one. Raises SpecError without the extra."""
    if not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        message = "traces need the extra `otel`: pip install 'polar-rollout[otel]'"
        raise SpecError.at("POLAR_OTEL_ENDPOINT", message) from None
    exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
    begin(BatchSpanProcessor(exporter), service)


def begin(processor: SpanProcessor, service: str) -> None:
    """Hand this process's spans to `processor` from now on."""
    from polar.spans import Spans

    global _spans
    end()
    _spans = Spans(processor, service)


def end() -> None:
    """Send what is left, and make no more spans."""
    global _spans
    spans, _spans = _spans, None
    if spans is not None:
        spans.close()


def on() -> bool:
    """Whether anybody wants spans: ask before gathering what they would say."""
    return _spans is not None


def stage(
    session: str, attempt: int, name: str, seconds: float, facts: Mapping[str, Value | None], error: str | None = None
) -> None:
    """A stage that just ended, after so many seconds."""
    if _spans is not None:
        said = {"polar.session": session, "polar.attempt": attempt, "polar.stage": name, **facts}
        end = now()
        start = end - timedelta(seconds=seconds)
        _spans.make(session, name, start, end, said, ("session",), (str(attempt), name), error)


def call(
    session: str, attempt: int, name: str, seconds: float, facts: Mapping[str, Value | None], error: str | None = None
) -> None:
    """A model call that just ended: a client's span inside the execute stage of that attempt."""
    if _spans is not None:
        said = {"polar.session": session, "polar.attempt": attempt, "polar.stage": "execute", **facts}
        end = now()
        start = end - timedelta(seconds=seconds)
        _spans.make(session, name, start, end, said, (str(attempt), "execute"), None, error, client=True)


def ended(session: str, created: datetime, facts: Mapping[str, Value | None], error: str | None = None) -> None:
    """A session that just ended: the root of its trace."""
    if _spans is not None:
        _spans.make(session, "session", created, now(), {"polar.session": session, **facts}, None, ("session",), error)


def number(size: int, *parts: str) -> int:
    """An id of so many bytes made of these words; never 0, which is no id."""
    return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=size).digest(), "big") or 1
