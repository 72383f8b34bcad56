"""What Codex does beyond a plain turn: sub-agents, making room by a summary, reasoning that comes back.

Run with POLAR_TEST_HARNESSES=codex, or all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from polar.models import Completion
from tests.harnesses.cases import BASH, CASES, chosen
from tests.harnesses.conftest import Run

(CODEX,) = [case for case in CASES if case.harness == "codex"]
pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(CODEX not in chosen(), reason="codex is not among POLAR_TEST_HARNESSES"),
]
DONE = {"content": "The file is there."}


def call(name: str, reasoning: str | None = None, **arguments: Any) -> dict[str, Any]:
    """An answer that calls a tool."""
    return {"content": "Let me.", "reasoning": reasoning, "tool_calls": [{"name": name, "arguments": arguments}]}


def chained(rows: list[Completion]) -> bool:
    """Whether each of these calls goes on from the one before it, found by an id of ours, with nothing rewritten."""
    pairs = zip(rows[1:], rows, strict=False)
    return all((row.parent_id, row.parent_reason, row.flags) == (before.id, "anchor", []) for row, before in pairs)


def test_a_sub_agent_is_told_from_its_parent(run: Callable[..., Run]) -> None:
    """A tool of a group is called by its own name, and the calls of the agent that it starts are marked as its."""
    main = [
        call("multi_agent_v1__spawn_agent", message="errand: say when you are done"),
        call("exec_command", cmd=f"sleep 3; {BASH}"),
        DONE,
    ]
    errand = {"match": "user\nerrand", "answers": [{"content": "I am done."}]}
    done = run(replace(CODEX, script={"scripts": [errand, {"answers": main}]}))
    loop = [row for row in done.rows if row.role == "main"]
    (sent,) = [row for row in done.rows if row.role == "subagent"]
    assert done.ended.state == "completed", done.said()
    assert len(loop) == 3, done.said()
    assert chained(loop), done.said()
    assert sent.parsed["role_reason"].startswith("codex: collab_spawn "), done.said()
    assert (sent.parent_id, sent.outcome) == (None, "answered")
    assert "agent_id" in str(done.asked(loop[1])["input"][-1]), done.said()


@pytest.mark.parametrize("summary", ["none", "auto"])
def test_reasoning_comes_back_and_changes_nothing(run: Callable[..., Run], summary: str) -> None:
    """Reasoning is part of the turn that is gone on from, in whichever form Codex was given it."""
    main = [call("exec_command", reasoning="I think.", cmd=BASH), call("exec_command", cmd="cat hello.txt"), DONE]
    # Slow enough that what keeps a stream alive comes before the first event.
    script = {"scripts": [{"answers": main, "latency_seconds": 0.8}]}
    done = run(replace(CODEX, script=script, settings={"reasoning_summary": summary}))
    assert done.ended.state == "completed", done.said()
    assert len(done.rows) == 3, done.said()
    assert chained(done.rows), done.said()
    (thought,) = [item for item in done.asked(done.rows[1])["input"] if item["type"] == "reasoning"]
    assert bool(thought["summary"]) == (summary == "auto")


def test_room_is_made_by_a_summary(run: Callable[..., Run]) -> None:
    """A conversation that grows too long is summed up in a call that is marked, and begun anew with the summary."""
    anew = {"match": "All is well so far.", "answers": [call("exec_command", cmd=BASH), DONE]}
    # Only a call that offers tools has the name of this one in its prompt.
    long = {"match": "write_stdin", "answers": [call("exec_command", cmd="seq 1 4000")]}
    scripts = [anew, long, {"answers": [{"content": "All is well so far."}]}]
    done = run(replace(CODEX, script={"scripts": scripts}, settings={"context_length": 24_000}))
    assert done.ended.state == "completed", done.said()
    assert done.content == "hello", done.said()
    (place,) = [index for index, row in enumerate(done.rows) if row.role == "auxiliary"]
    assert done.rows[place].parsed["role_reason"] == "codex: compaction"
    before, after = done.rows[:place], done.rows[place + 1 :]
    assert {row.role for row in (*before, *after)} == {"main"}, done.said()
    assert len(after) == 2, done.said()
    assert chained(before), done.said()
    assert chained(after), done.said()
