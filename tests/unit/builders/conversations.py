"""Conversations as an engine would have seen them, for the builders' tests. Checks nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from polar.builders.base import Call, Ids

_numbers = count(1)


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def root(name: str, prompt: Ids, output: Ids, **changes: Any) -> Call:
    """A completion that continues nothing. Every sampled token has a log-probability found nowhere else."""
    values: dict[str, Any] = {
        "id": name,
        "parent_id": None,
        "parent_reason": "root",
        "prompt_ids": prompt,
        "output_ids": output,
        "logprobs": np.array([-next(_numbers) / 1024 for _ in output], np.float32),
        "request": {"messages": [{"role": "user", "content": "begin"}], "tools": None},
        "answer": {"role": "assistant", "content": f"answer of {name}"},
        "finish_reason": "stop",
        "prompt_verified": True,
    }
    return Call(**(values | changes))


def child(parent: Call, name: str, between: Ids, output: Ids, **changes: Any) -> Call:
    """A completion that continues `parent` token for token, after `between`."""
    messages = [*parent.request["messages"], parent.answer, {"role": "user", "content": f"before {name}"}]
    values: dict[str, Any] = {
        "parent_id": parent.id,
        "parent_reason": "exact",
        "request": {"messages": messages, "tools": parent.request["tools"]},
    }
    prompt = np.concatenate([parent.prompt_ids, parent.output_ids, between])
    return root(name, prompt, output, **(values | changes))


def line(turns: int) -> list[Call]:
    """A conversation without branches: t0, t1, …"""
    calls = [root("t0", ids(1, 2, 3), ids(10, 11))]
    for turn in range(1, turns):
        calls.append(child(calls[-1], f"t{turn}", ids(4, 5), ids(10 + turn, 11)))
    return calls


def unlinked(calls: list[Call]) -> list[Call]:
    """The same completions as canonical mode records them: without parents."""
    return [replace(call, parent_id=None, parent_reason="no_match") for call in calls]
