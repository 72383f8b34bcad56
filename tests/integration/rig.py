"""What tests of the proxy need: a scripted engine, an executing session, the proxy itself, and its rows."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import uvicorn
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

from polar.models import Completion, Lane, Node, RolloutSession, Task
from polar.proxy.app import create_app
from polar.proxy.limits import Limits
from polar.settings import Settings

KEY = "ses-key-of-this-test"
MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"
WEATHER = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look somewhere.",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
    },
}
SCRIPTS = {
    "scripts": [
        {
            "match": "slowly",
            "answers": [{"content": "one two three four five six seven " * 20}],
            "tokens_per_second": 30,
        },
        {
            "match": "steadily",
            "answers": [{"content": "one two three four five six seven " * 10}],
            "tokens_per_second": 30,
        },
        {"match": "in JSON", "answers": [{"content": '{"sky": "blue"}'}]},
        {"match": "wait", "answers": [{"content": "waited"}], "latency_seconds": 1.0},
        {
            "answers": [
                {
                    "reasoning": "I should look.",
                    "content": "Let me look.",
                    "tool_calls": [{"name": "look", "arguments": {"where": "outside", "n": 1}}],
                },
                {"content": "It is sunny. ☀"},
            ]
        },
    ]
}
FAST = Limits(retry=1.0, keepalive=0.3, deliver_grace=0.05)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(condition: Callable[[], Any], seconds: float = 15.0) -> Any:
    """What `condition` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "the condition did not come"
        time.sleep(0.02)
    return found


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


@contextmanager
def process(argv: list[str], health: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, up while inside."""
    child = subprocess.Popen(argv, env={**os.environ, **(env or {})})
    try:
        until(lambda: answers(health) or child.poll() is not None, 60)
        assert child.poll() is None
        yield child
    finally:
        child.terminate()
        child.wait(15)


def open_session(database: Engine, engine_url: str, **spec: Any) -> str:
    """A session that is executing on a lane with this engine, reached by KEY; its id."""
    with Session(database) as db, db.begin():
        task_spec = {"sampling": {}, "max_turns": None, "max_session_tokens": None, "agent": {}, **spec}
        task = Task(task_id=uuid.uuid4().hex, state="running", spec=task_spec, num_samples=1)
        db.add_all([task, Node(id="local", gateway_url="http://127.0.0.1")])
        db.flush()
        db.add(Lane(name="gpu0", node_id="local", engine={"base_url": engine_url}, max_execute=1, ready_buffer=1))
        session = RolloutSession(
            id=f"ses-{uuid.uuid4().hex}",
            task_pk=task.id,
            number=0,
            stage="execute",
            state="running",
            lane="gpu0",
            execute_attempt=1,
            key_hash=hashlib.sha256(KEY.encode()).digest(),
        )
        db.add(session)
        db.flush()
        return session.id


@contextmanager
def serve(database_url: str, limits: Limits = FAST) -> Iterator[str]:
    """The proxy in a thread, with its clocks turned down."""
    port = free_port()
    config = uvicorn.Config(create_app(Settings(database_url=database_url), limits), port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(15)


def client(url: str, key: str = KEY, **options: Any) -> openai.OpenAI:
    """The official client, which retries nothing unless told."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, **{"max_retries": 0, **options})


def completions(database: Engine) -> list[Completion]:
    """Every row, in order."""
    with Session(database) as db:
        return list(db.scalars(select(Completion).order_by(Completion.seq)))


def ids(data: bytes) -> list[int]:
    """Token ids of a column."""
    return [int(token) for token in np.frombuffer(data, dtype="<i4")]
