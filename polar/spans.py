"""Spans with ids that we choose, on OpenTelemetry's SDK. What they say is `tracing`'s; imported only where it is on.

The provider is our own and not the process's: a program that Polar is embedded in keeps its traces apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from datetime import datetime

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from polar import __version__
from polar.tracing import Value, number

_chosen: ContextVar[tuple[int, int | None]] = ContextVar("chosen")
"""(trace id, span id or None for a random one) of the span that is being made."""


class _Ids(IdGenerator):
    """The ids that were chosen."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()

    def generate_trace_id(self) -> int:
        return _chosen.get()[0]

    def generate_span_id(self) -> int:
        return _chosen.get()[1] or self._random.generate_span_id()


class Spans:
    """Where the spans of this process go."""

    def __init__(self, processor: SpanProcessor, service: str) -> None:
        resource = Resource.create({"service.name": service, "service.version": __version__})
        self._provider = TracerProvider(resource=resource, id_generator=_Ids())
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("polar", __version__)

    def make(
        self,
        session: str,
        name: str,
        start: datetime,
        end: datetime,
        facts: Mapping[str, Value | None],
        parent: tuple[str, ...] | None,
        own: tuple[str, ...] | None,
        error: str | None,
        *,
        client: bool = False,
    ) -> None:
        """One span that has ended. `parent` and `own` name the ids of both within the session; without `own` it has a
        random one, and without `parent` it is the root."""
        trace = number(16, session)
        context = Context()
        if parent is not None:
            above = SpanContext(trace, number(8, session, *parent), is_remote=True, trace_flags=TraceFlags(1))
            context = set_span_in_context(NonRecordingSpan(above), context)
        token = _chosen.set((trace, number(8, session, *own) if own else None))
        try:
            span = self._tracer.start_span(
                name,
                context,
                kind=SpanKind.CLIENT if client else SpanKind.INTERNAL,
                attributes={key: value for key, value in facts.items() if value is not None},
                start_time=_nanoseconds(start),
            )
        finally:
            _chosen.reset(token)
        if error is not None:
            span.set_attribute("error.type", error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(_nanoseconds(end))

    def close(self) -> None:
        """Send what is left."""
        self._provider.shutdown()


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1e9)
