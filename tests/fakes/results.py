"""Session results as the feed has them, made by hand: for tests of what trainers do with them."""

from __future__ import annotations

from typing import Any

import numpy as np


def trace(
    prompt: int = 3,
    turns: tuple[tuple[int, int], ...] = ((2, 1), (2, 0)),
    *,
    reward: float | None = 1.0,
    version: int | str | None = 4,
    seed: int = 0,
    **changes: Any,
) -> dict[str, Any]:
    """A trace whose response is, for each of `turns`, so many sampled tokens and so many of the harness's."""
    random = np.random.default_rng(seed)
    mask = [bit for sampled, between in turns for bit in [1] * sampled + [0] * between]
    logprobs = [-float(random.random()) * bit for bit in mask]
    certificate = {
        "flags": [],
        "completions": len(turns),
        "policy_versions": [] if version is None else [{"version": version, "start": 0, "end": len(mask)}],
    }
    found = {
        "prompt_ids": random.integers(0, 1000, prompt).tolist(),
        "response_ids": random.integers(0, 1000, len(mask)).tolist(),
        "loss_mask": mask,
        "response_logprobs": logprobs,
        "prompt_messages": [{"role": "user", "content": "find a"}],
        "response_messages": [{"role": "assistant", "content": "found"}],
        "tools": None,
        "finish_reason": "stop",
        "reward": reward,
        "fidelity": "exact",
        "trainable": True,
        "weight": 1.0,
        "decision": {"rule": "trainable", "reason": "the evaluator's reward"},
        "metadata": {"certificate": certificate},
    }
    return {**found, **changes}


def result(
    session_id: str = "ses-1",
    task_id: str = "task-1",
    traces: list[dict[str, Any]] | None = None,
    *,
    status: str = "COMPLETED",
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """A session's result; its trainable traces share its weight."""
    traces = [trace()] if traces is None else traces
    usable = [each for each in traces if each["trainable"]]
    for each in traces:
        each["weight"] = 1 / len(usable) if each["trainable"] else 0.0
    rewards = [each["reward"] for each in traces if each["reward"] is not None]
    return {
        "session_id": session_id,
        "task_id": task_id,
        "status": status,
        "trajectory": {
            "status": status,
            "metadata": {"task_metadata": metadata or {}, "trace_count": len(traces)},
            "traces": traces,
            "error": None,
        },
        "timing": {},
        "node_id": "local",
        "error": None,
        "metadata": {"reward": rewards[0] if rewards else None, "state": "completed"},
        "cursor": "1",
    }
