"""What a proxy process counts, and `/metrics`.

A node's proxy may be several processes behind one port, and a scrape reaches any one of them. Labels per process would
not help: most series would be missing from most scrapes. So the processes count in files that all of them can read
(prometheus-client's multiprocess mode), and whichever is asked answers for all. `shared` arranges that, before anything
is counted; without it, as in tests, a process answers for itself.

A key of scope `read` opens it, as on the API: an agent in its sandbox reaches this port too, and has no business here.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
    multiprocess,
)
from sqlalchemy import bindparam, select
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Send

from polar import keys
from polar.metrics import PROXY
from polar.models import ApiKey
from polar.proxy.reads import Reads
from polar.proxy.shared import VARIABLE, lives

SCOPES = select(ApiKey.scopes).where(ApiKey.key_hash == bindparam("hash"), ApiKey.revoked_at.is_(None))
_own = CollectorRegistry()
disable_created_metrics()  # a second series for each, of no use to anybody here


def _made(name: str) -> Any:
    (metric,) = [each for each in PROXY if each.name == name]
    if metric.kind == "histogram":
        return Histogram(name, metric.text, metric.labels, registry=_own, buckets=metric.buckets)
    if metric.kind == "gauge":
        return Gauge(name, metric.text, metric.labels, registry=_own, multiprocess_mode="livesum")
    return Counter(name, metric.text, metric.labels, registry=_own)


CALLS: Counter = _made("polar_calls_total")
RESPONSES: Counter = _made("polar_responses_total")
ENGINE_SECONDS: Histogram = _made("polar_call_engine_seconds")
ADDED_SECONDS: Histogram = _made("polar_call_added_seconds")
IN_FLIGHT: Gauge = _made("polar_calls_in_flight")
HELD: Gauge = _made("polar_calls_held")
PROMPT_TOKENS: Counter = _made("polar_call_prompt_tokens_total")
SAMPLED_TOKENS: Counter = _made("polar_call_sampled_tokens_total")
PLACES: Counter = _made("polar_places_total")
RECORDED_BYTES: Counter = _made("polar_recorded_bytes_total")
COMMIT_RECORDS: Histogram = _made("polar_commit_records")
COMMIT_SECONDS: Histogram = _made("polar_commit_seconds")


@cache
def _of(metric: Any, *labels: str) -> Any:
    """A metric's series; there are as many as its labels have values, and they stay."""
    return metric.labels(*labels)


def added(dialect: str, seconds: float) -> None:
    """Count what Polar itself took of an answered call."""
    _of(ADDED_SECONDS, dialect).observe(seconds)


def ended(dialect: str, outcome: str, reason: str, prompt: int, sampled: int, engine: float | None) -> None:
    """Count a call that ended; `engine` is None if it never got there."""
    _of(CALLS, dialect, outcome).inc()
    _of(PLACES, reason).inc()
    _of(PROMPT_TOKENS, dialect).inc(prompt)
    _of(SAMPLED_TOKENS, dialect).inc(sampled)
    if engine is not None:
        _of(ENGINE_SECONDS, dialect).observe(engine)


def committed(rows: list[dict[str, Any]], began: float) -> None:
    """Count a commit of these rows that was begun at that monotonic time."""
    COMMIT_SECONDS.observe(time.monotonic() - began)
    COMMIT_RECORDS.observe(len(rows))
    RECORDED_BYTES.inc(sum(len(value) for row in rows for value in row.values() if isinstance(value, bytes)))


def told(dialect: str, route: str, status: int) -> None:
    """Count a response."""
    _of(RESPONSES, dialect, route, str(status)).inc()


def telling(send: Send, dialect: str) -> Send:
    """`send`, with the status of a model call's response counted."""

    async def counted(message: Message) -> None:
        if message["type"] == "http.response.start":
            told(dialect, "generate", message["status"])
        await send(message)

    return counted


class Endpoint:
    """`GET /metrics` of this proxy."""

    def __init__(self, auth: str) -> None:
        self._open = auth == "open"

    async def show(self, request: Request) -> Response:
        """What was counted so far; to a key of scope `read` only, unless the API asks for none."""
        if not self._open:
            scheme, _, key = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not await self._may(request.app.state.reads, key.strip()):
                message = "send an API key of scope read: Authorization: Bearer KEY\n"
                return Response(message, 401, {"www-authenticate": "Bearer"}, media_type="text/plain")
        return Response(generate_latest(registry()), headers={"content-type": CONTENT_TYPE_LATEST})

    async def _may(self, reads: Reads, key: str) -> bool:
        rows = await reads.all(SCOPES, hash=keys.hashed(key))
        return any("read" in row.scopes for row in rows)


def registry() -> CollectorRegistry:
    """What all processes of this proxy counted."""
    folder = os.environ.get(VARIABLE)
    if folder is None:
        return _own
    for path in Path(folder).glob("gauge_live*_*.db"):
        pid = int(path.stem.rpartition("_")[2])
        if not lives(pid):
            # Killed in the middle of its calls: they are not in flight any more.
            multiprocess.mark_process_dead(pid, folder)
    found = CollectorRegistry()
    multiprocess.MultiProcessCollector(found, folder)
    return found
