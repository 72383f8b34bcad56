"""What a page's Python takes for granted: a key, tasks, a trainer's own function. The rest is the page's own."""

from __future__ import annotations

from typing import Any

ASK = """curl -sSf {{base_url}}/v1/chat/completions -H "Authorization: Bearer {{api_key}}" \
  -d '{"model": "policy", "max_tokens": 12, "messages": [{"role": "user", "content": "find c"}]}'"""


class EnoughError(Exception):
    """Raised by `train_on`: what follows the feed for ever has shown that it works."""


def train_on(result: Any) -> None:
    """A trainer that has had enough after one result."""
    raise EnoughError(result)


def tasks(page: str) -> list[dict[str, Any]]:
    """One small task, named after the page; the page of trainers speaks of groups of eight."""
    return [
        {
            "task_id": f"{page}-given",
            "instruction": "find c",
            "num_samples": 8 if page == "trainers" else 2,
            "agent": {"harness": "shell", "custom_shell": {"command": ASK}},
            "runtime": {"backend": "local"},
            "evaluator": {"strategy": "session_completed"},
            "lanes": ["gpu0"],
        }
    ]


def names(page: str, key: str) -> dict[str, Any]:
    """The names that a page's first block may use."""
    return {"__name__": "page", "key": key, "tasks": tasks(page), "train_on": train_on}
