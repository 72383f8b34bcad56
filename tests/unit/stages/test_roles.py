"""What the whole session shows of a call's part in it."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.builders.base import Call
from polar.stages.roles import assign

TOOLS = [{"type": "function", "function": {"name": "agent"}}]
ERRAND = "Find every caller of this function."


def call(name: str, text: str = "hello", *, parent: str | None = None, **fields: Any) -> Call:
    """A recorded call that asks with one user message."""
    tools = fields.pop("tools", TOOLS)
    system = fields.pop("system", None)
    head = [{"role": "system", "content": system}] if system else []
    values: dict[str, Any] = {
        "parent_reason": "exact" if parent else "root",
        "prompt_ids": np.zeros(0, np.int32),
        "output_ids": np.zeros(0, np.int32),
        "logprobs": None,
        "request": {"messages": [*head, {"role": "user", "content": text}], "tools": tools},
        "answer": {"role": "assistant", "content": ""},
        "finish_reason": "stop",
        "model_requested": "policy",
    }
    return Call(id=name, parent_id=parent, **{**values, **fields})


def roles(*calls: Call) -> list[str]:
    """The roles that these calls get."""
    return [each.role for each in assign(list(calls), "policy")]


def test_no_tools_beside_a_loop_with_tools() -> None:
    """A call without tools is a side call only where there are others with tools."""
    assert roles(call("title", tools=None), call("a"), call("b", parent="a")) == ["auxiliary", "main", "main"]
    assert roles(call("a", tools=None), call("b", parent="a", tools=None)) == ["main", "main"]


def test_another_model() -> None:
    """A call for another model is a side call if the policy is asked for by its name elsewhere."""
    other = call("router", model_requested="small")
    found = assign([other, call("a")], "policy")
    assert [each.role for each in found] == ["auxiliary", "main"]
    assert found[0].metadata["role_reason"] == "it asks for small, not for policy"
    assert roles(other, call("a", model_requested="large")) == ["main", "main"]


def test_titles_beside_a_loop() -> None:
    """A title is aside if there is a loop beside it; a task that is nothing but a summary is the main thing."""
    title = call("title", system="You generate a short title for a conversation.", tools=None)
    loop = [call("a", tools=None), call("b", parent="a", tools=None)]
    assert roles(title, *loop) == ["auxiliary", "main", "main"]
    assert roles(title) == ["main"]


def test_subagents_are_found_by_their_errand() -> None:
    """A conversation that opens with the words of a tool call is that call's sub-agent, and so is what follows it."""
    function = {"name": "agent", "arguments": f'{{"prompt": "{ERRAND}"}}'}
    spawner = call("a", answer={"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}]})
    parts = [{"type": "text", "text": f"context\n{ERRAND}"}]
    child = call("c")
    child.request["messages"][0]["content"] = parts
    found = assign([call("z"), spawner, child, call("d", parent="c"), call("b", parent="a")], "policy")
    assert [each.role for each in found] == ["main", "main", "subagent", "subagent", "main"]
    assert [each.metadata.get("spawned_by") for each in found] == [None, None, "a", "a", None]


def test_what_the_proxy_marked_stays() -> None:
    """A harness's own rule is not overruled."""
    assert roles(call("a", role="auxiliary"), call("b", role="subagent"), call("c")) == [
        "auxiliary",
        "subagent",
        "main",
    ]


def seeded(*, result: bool) -> list[Call]:
    """A main agent that goes on, and a call from the same history that is told the words of the tool call."""
    function = {"name": "agent", "arguments": f'{{"prompt": "{ERRAND}"}}'}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": function}]}
    spawner = call("a", answer=answer)
    history = [*spawner.request["messages"], answer]
    told = [*history, *([{"role": "tool", "tool_call_id": "x", "content": "done"}] if result else [])]
    told.append({"role": "user", "content": ERRAND})
    main = {"messages": [*history, {"role": "tool", "tool_call_id": "x", "content": "done"}], "tools": TOOLS}
    return [
        spawner,
        call("s", parent="a", request={"messages": told, "tools": TOOLS}),
        call("b", parent="a", request=main),
    ]


def test_a_subagent_with_its_parents_history_is_found() -> None:
    """A branch that is told the words of a tool call which has no result yet is that call's sub-agent."""
    found = assign(seeded(result=False), "policy")
    assert [each.role for each in found] == ["main", "subagent", "main"]
    assert found[1].metadata["spawned_by"] == "a"


def test_a_main_agent_that_repeats_its_errand_stays_main() -> None:
    """Once the tool call has its result, the words are the main agent's own."""
    assert [each.role for each in assign(seeded(result=True), "policy")] == ["main", "main", "main"]
