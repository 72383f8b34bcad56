"""A real `polar up` that is watched: its spans at a real collector, its log as JSON, and no secret in any of it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from polar.cli import services
from polar.db import connect
from polar.embedded import free_port
from polar.lifecycle import STAGES
from polar.settings import Settings
from tests.e2e.up import THREE_CALLS, Up, shell, start
from tests.integration.test_security import holding

pytestmark = pytest.mark.e2e
SECRETS = {name: f"hush-{name}-3f9a" for name in ("runtime", "agent", "shell", "prepare", "evaluator")}


@dataclass
class Collector:
    """Takes spans over OTLP/HTTP."""

    url: str
    spans: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the library's name
            data = self.rfile.read(int(self.headers["Content-Length"]))
            found.raw.append(data)
            assert self.path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
                found.spans += [read(span, service) for scope in resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


def read(span: Any, service: str) -> dict[str, Any]:
    """What a test asks of a span."""
    said = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    times = (span.start_time_unix_nano, span.end_time_unix_nano)
    ids = {"trace": span.trace_id, "id": span.span_id, "parent": span.parent_span_id}
    return {"name": span.name, "kind": span.kind, "service": service, "times": times, **ids, **said}


@dataclass
class Watched:
    """What is there once a task has ended and all was stopped."""

    up: Up
    collector: Collector
    status: dict[str, Any]
    answers: list[str]
    holding: dict[str, list[str]]

    def files(self) -> Iterator[tuple[Path, bytes]]:
        """Every log that was written, those of agents too."""
        for path in [self.up.home.parent / "up.log", *self.up.home.rglob("*.log"), *self.up.home.glob("logs/**/*")]:
            if path.is_file():
                yield path, path.read_bytes()

    def secrets(self) -> dict[str, str]:
        """Those of the task, and those of this Polar."""
        own = ("pages_secret", "webhook_secret", "postgres.password", "broker.password")
        found = {name: (self.up.home / name).read_text().strip() for name in own if (self.up.home / name).exists()}
        assert len(found) == len(own)
        return {**SECRETS, **found}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """One run of two sessions, one of a task whose prepare step fails."""
    home = tmp_path_factory.mktemp("watched") / "home"
    with collector() as found:
        more = {"POLAR_OTEL_ENDPOINT": found.url, "POLAR_LOG_FORMAT": "json", "POLAR_LOG_LEVEL": "DEBUG"}
        up = start(home, free_port(), free_port(), **more)
        try:
            prepare = [{"type": "exec", "command": "true", "env": {"P": SECRETS["prepare"]}}]
            runtime: dict[str, Any] = {"backend": "local", "env": {"R": SECRETS["runtime"]}, "prepare": prepare}
            body = shell(THREE_CALLS % "pass", runtime=runtime, num_samples=2)
            body["agent"] |= {"env": {"A": SECRETS["agent"]}}
            body["agent"]["custom_shell"] |= {"env": {"S": SECRETS["shell"]}}
            body["evaluator"] = {
                "strategy": "command",
                "config": {"command": "true"},
                "env": {"E": SECRETS["evaluator"]},
            }
            status = up.run(body)
            failing = [*prepare, {"type": "exec", "command": "exit 7", "env": {"P": SECRETS["prepare"]}}]
            broken = up.run({**body, "task_id": "broken", "runtime": {**runtime, "prepare": failing}})
            assert (status["status"], broken["status"]) == ("completed", "failed")
            session = status["results"][0]["session_id"]
            paths = [f"/rollout/task/{body['task_id']}", "/rollout/task/broken", "/tasks", "/nodes", "/rollout/status"]
            paths += [f"/tasks/{body['task_id']}/sessions", "/rollout/results?after=0", "/metrics"]
            paths += [f"/rollout/session/{session}{part}" for part in ("", "/events", "/completions", "/trajectory")]
            answers = [up.http.get(path).raise_for_status().text for path in paths]
            database = connect(services.database_url(Settings(home=str(home))), pool_size=1)
            where = {name: holding(database, secret) for name, secret in SECRETS.items()}
            database.dispose()
        finally:
            up.process.send_signal(signal.SIGINT)
            up.process.wait(40)
        yield Watched(up, found, status, answers, where)


def test_a_session_is_one_trace_at_a_collector(watched: Watched) -> None:
    """Spans of several processes come together: session, stages and calls, each with task, session, stage and lane."""
    task = watched.status["task_id"]
    for result in watched.status["results"]:
        session = result["session_id"]
        spans = [span for span in watched.collector.spans if span["polar.session"] == session]
        assert len({span["trace"] for span in spans}) == 1
        calls = [span for span in spans if "gen_ai.operation.name" in span]
        assert sorted(span["name"] for span in spans) == sorted(["session", *STAGES, *[calls[0]["name"]] * 3])
        by_name = {span["name"]: span for span in spans}
        assert by_name["session"]["parent"] == b""
        for span in spans:
            assert (span["polar.task"], span["polar.lane"]) == (task, "scripted"), span
            assert span["polar.stage"] in STAGES
            assert by_name["session"]["times"][0] <= span["times"][0] <= span["times"][1]
        for stage in STAGES:
            assert by_name[stage]["parent"] == by_name["session"]["id"]
            assert by_name[stage]["service"] == "polar-worker"
        for call in calls:
            assert (call["parent"], call["service"]) == (by_name["execute"]["id"], "polar-proxy")
            assert call["name"] == f"chat {call['gen_ai.request.model']}"
            assert (call["gen_ai.provider.name"], call["gen_ai.output.type"]) == ("sglang", "text")
            assert (call["gen_ai.conversation.id"], call["server.address"]) == (session, "127.0.0.1")
            assert call["gen_ai.request.max_tokens"] == 32 and call["server.port"] > 0
            assert call["gen_ai.usage.input_tokens"] > 0 and call["gen_ai.usage.output_tokens"] > 0
    assert [span["error.type"] for span in watched.collector.spans if span["polar.task"] == "broken"]


def test_each_stage_is_one_line_of_json(watched: Watched) -> None:
    """With the fields that a collector of logs would ask for; every line of every Polar process can be read."""
    lines = [
        json.loads(line) for line in (watched.up.home / "logs/worker.log").read_text().splitlines() if line[:1] == "{"
    ]
    told = [line for line in lines if line["event"] == "stage"]
    for result in watched.status["results"]:
        mine = [line for line in told if line["session"] == result["session_id"]]
        assert [line["stage"] for line in mine] == list(STAGES)
        assert [line["state"] for line in mine] == ["queued", "queued", "queued", "completed"]
        for line in mine:
            assert (line["task"], line["lane"]) == (watched.status["task_id"], "scripted")
            assert line["seconds"] >= 0 and line["level"] == "INFO" and line["at"].endswith("+00:00")
    (failed, *_) = [line for line in told if line["task"] == "broken"]
    assert (failed["stage"], failed["state"], failed["blame"]) == ("prewarm", "failed", "trainer")


def test_no_secret_is_in_a_log_a_span_or_an_answer(watched: Watched) -> None:
    """Neither those that a task brings in its variables, nor Polar's own; not even with DEBUG."""
    files = dict(watched.files())
    assert {path.name for path in files} >= {"api.log", "proxy.log", "worker.log", "beat.log", "postgres.log", "up.log"}
    assert any(b"polar.proxy" in data for data in files.values())
    for name, secret in watched.secrets().items():
        leaks = [str(path) for path, data in files.items() if secret.encode() in data]
        assert leaks == [], name
        assert not [answer[:200] for answer in watched.answers if secret in answer], name
        assert not any(secret.encode() in data for data in watched.collector.raw), name


def test_the_secrets_of_a_task_are_kept_in_one_place(watched: Watched) -> None:
    """Where they must be, for the worker that runs it: in the task as it was asked for."""
    assert watched.holding == {name: ["tasks.spec"] for name in SECRETS}
