"""Small tasks, nodes and lanes to put into tests."""

from __future__ import annotations

from typing import Any

from polar.spec import RuntimeSpec, TaskRequest, parse_task
from polar.topology import EngineSpec, GatewaySpec, LaneSpec, NodeSpec, Topology


def task_body(**changes: Any) -> dict[str, Any]:
    """A task as a trainer would post it."""
    body = {
        "task_id": "task-1",
        "instruction": "do it",
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
        "runtime": {"backend": "local"},
    }
    return {**body, **changes}


def task(**changes: Any) -> TaskRequest:
    """The same, validated."""
    return parse_task(task_body(**changes))


def topology(engine_url: str = "http://127.0.0.1:1", *, max_execute: int = 2, ready_buffer: int = 1) -> Topology:
    """One node with lane gpu0."""
    lane = LaneSpec(
        name="gpu0", engine=EngineSpec(base_url=engine_url), max_execute=max_execute, ready_buffer=ready_buffer
    )
    node = NodeSpec(id="node-1", lanes=(lane,), default_runtime=RuntimeSpec(backend="local"))
    return Topology(gateway=GatewaySpec(nodes=(node,)))
