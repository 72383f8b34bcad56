"""Each call of the REST API as a value: what is sent, and how its answer is read.

The synchronous and the asynchronous client send the same values; only they touch the network.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from polar.client.types import Accepted, Json, Policy, SessionState, TaskStatus, Trajectory

T = TypeVar("T")
UNSET: Any = object()
"""Of a field that is left as it is, where None takes it away."""
LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
SLACK_SECONDS = 30.0
"""That an answer may take beyond what the server was asked to wait."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One request and the reading of its answer."""

    method: str
    path: str
    read: Callable[[Json], T]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds that the server may take on purpose."""
    patient: bool = True
    """Whether it is sent again when nothing answers, or nothing good."""


def given(**values: Any) -> dict[str, Any]:
    """Query parameters without those that are None."""
    return {name: value for name, value in values.items() if value is not None}


def same(raw: Any) -> Any:
    """The answer as it is."""
    return raw


def _part(name: str) -> str:
    """A name as one part of a path."""
    return quote(name, safe="")


def submit(task: Mapping[str, Any], idempotency_key: str | None) -> Call[Accepted]:
    headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
    return Call("POST", "/rollout/task/submit", Accepted.read, body=task, headers=headers)


def status(task_id: str, wait: float, full: bool) -> Call[TaskStatus]:
    params = {"view": "full" if full else "summary", **given(wait=wait or None)}
    return Call("GET", f"/rollout/task/{_part(task_id)}", TaskStatus.read, params, wait=wait)


def cancel(task_id: str) -> Call[TaskStatus]:
    return Call("DELETE", f"/rollout/task/{_part(task_id)}", TaskStatus.read)


def tasks(status: str | None, harness: str | None, since: float | None, limit: int) -> Call[list[Json]]:
    params = given(status=status, harness=harness, since=since, limit=limit)
    return Call("GET", "/tasks", lambda raw: list(raw["tasks"]), params)


def sessions(task_id: str, after: int | None, limit: int) -> Call[tuple[list[SessionState], int | None]]:
    def read(raw: Json) -> tuple[list[SessionState], int | None]:
        return [SessionState.read(each) for each in raw["sessions"]], raw.get("next")

    return Call("GET", f"/tasks/{_part(task_id)}/sessions", read, given(after=after, limit=limit))


def session(session_id: str) -> Call[SessionState]:
    return Call("GET", f"/rollout/session/{_part(session_id)}", SessionState.read)


def cancel_session(session_id: str) -> Call[SessionState]:
    return Call("DELETE", f"/rollout/session/{_part(session_id)}", SessionState.read)


def trajectory(session_id: str) -> Call[Trajectory]:
    return Call("GET", f"/rollout/session/{_part(session_id)}/trajectory", Trajectory.read)


def completions(session_id: str, after: int | None, limit: int) -> Call[tuple[list[Json], int | None]]:
    path = f"/rollout/session/{_part(session_id)}/completions"
    return Call("GET", path, lambda raw: (raw["completions"], raw["next"]), given(after=after, limit=limit))


def events(session_id: str) -> Call[list[Json]]:
    return Call("GET", f"/rollout/session/{_part(session_id)}/events", lambda raw: list(raw["events"]))


def ack(consumer: str, cursor: str, rewind: bool) -> Call[str]:
    body = {"consumer": consumer, "cursor": cursor, "rewind": rewind}
    return Call("POST", "/rollout/results/ack", lambda raw: str(raw["cursor"]), body=body)


def feed_end() -> Call[str]:
    params = {"after": "end", "limit": 1, "view": "summary"}
    return Call("GET", "/rollout/results", lambda raw: str(raw["next"]), params)


def policy() -> Call[Policy]:
    return Call("GET", "/rollout/policy", Policy.read)


def set_policy(version: Any, name: Any, max_staleness: Any) -> Call[Policy]:
    values = {"version": version, "name": name, "max_staleness": max_staleness}
    body = {key: value for key, value in values.items() if value is not UNSET}
    return Call("PUT", "/rollout/policy", Policy.read, body=body)


def pause(mode: str, wait: float) -> Call[Policy]:
    return Call("POST", "/rollout/pause", Policy.read, {"mode": mode, "wait": wait}, wait=wait)


def resume(wait: float) -> Call[Policy]:
    return Call("POST", "/rollout/resume", Policy.read, {"wait": wait}, wait=wait)


def push(
    version: int | str, path: str, mode: str, lanes: Iterable[str] | None, probe: Mapping[str, Any] | None, wait: float
) -> Call[Policy]:
    body = {"version": version, "path": path, "mode": mode, "wait": wait}
    body |= given(lanes=None if lanes is None else list(lanes), probe=probe)
    # Not sent again: an engine that failed its probe would fail it for a minute. The gate is closed; nothing is lost.
    return Call("POST", "/rollout/policy/push", Policy.read, body=body, wait=2 * wait, patient=False)


def ready() -> Call[Json]:
    return Call("GET", "/readyz", same, patient=False)
