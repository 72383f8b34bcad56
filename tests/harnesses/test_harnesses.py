"""Each preset's real program does a small task through the real proxy, and its calls are recorded whole.

Plain `pytest` runs the members of CI; `make test-harnesses` runs all, and writes the table of docs/harnesses.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polar import harnesses
from polar.models import Completion
from polar.spec import AgentSpec
from tests.harnesses import mcp_server
from tests.harnesses.cases import Case, chosen
from tests.harnesses.conftest import INSTRUCTION, Run
from tests.harnesses.table import FACTS, Facts

THINGS = "/polar/things"
SKILL = """---
name: tea
description: How to brew tea where kettles whistle.
---

Boil water, then wait.
"""
pytestmark = pytest.mark.harness


@pytest.fixture(params=chosen(), ids=lambda case: case.harness)
def case(request: pytest.FixtureRequest) -> Case:
    """Each harness; one that cannot be run here is skipped, and stands in the table with the reason."""
    case: Case = request.param
    facts = FACTS.setdefault(case.harness, Facts(_version(case), case.dialect, case.streams))
    if case.not_run:
        facts.not_run = case.not_run
        pytest.skip(case.not_run)
    return case


def test_a_real_run_is_recorded_whole(case: Case, run: Callable[..., Run]) -> None:
    """The file is made, each turn continues the one before it token for token, and side calls stand apart."""
    done = run(case)
    facts = FACTS[case.harness]
    main = [row for row in done.rows if row.role == "main"]
    side = [row for row in done.rows if row.role == "auxiliary"]
    facts.made = (done.content or "").strip() == "hello"
    chained = [row for row in main if row.parent_id is not None and row.parent_reason in ("anchor", "exact")]
    facts.chained = f"{len(chained)} of {len(main) - 1}"
    facts.side = ", ".join(sorted({_why(row) for row in side})) or "none"
    facts.honest = False

    assert done.ended.state == "completed", done.said()
    assert facts.made, done.said()
    assert done.left == ["hello.txt"], "it left files of its own in the task's folder"
    assert len(main) >= 2, done.said()
    assert chained == main[1:], done.said()
    assert any(INSTRUCTION in text for text in _texts(done.asked(main[0]))), done.said()
    assert {row.dialect for row in done.rows} == {case.dialect}, done.said()
    assert {row.outcome for row in main} == {"answered"}, done.said()
    if case.dialect != "google_generate":  # there, the path says whether it streams, not the body
        assert {bool(done.asked(row).get("stream")) for row in main} == {case.streams}, done.said()
    if case.makes_side_calls:
        assert side, done.said()


def test_a_failing_run_says_so(case: Case, run: Callable[..., Run]) -> None:
    """With an engine that refuses every call, the agent is not called completed."""
    failed = run(case, refuse=True)
    FACTS[case.harness].honest = failed.ended.state != "completed"
    assert failed.rows, failed.said()
    assert {row.outcome for row in failed.rows} == {"failed"}, failed.said()
    assert failed.ended.state != "completed", failed.said()
    assert failed.content is None


def test_mcp_servers_and_skills_reach_the_model(case: Case, run: Callable[..., Run]) -> None:
    """What a preset says that it passes on stands in what the model is asked: a tool's name, a skill's description."""
    member = type(harnesses.create(AgentSpec(harness=case.harness)))
    spec: dict[str, Any] = {}
    wanted = {}
    if member.SUPPORTS_MCP:
        server = {"name": "words", "transport": "stdio", "command": sys.executable, "args": [f"{THINGS}/server.py"]}
        spec["mcp_servers"] = [server]
        wanted["MCP"] = "fetch_password"
    if member.SUPPORTS_SKILLS:
        spec["skills_path"] = f"{THINGS}/skills"
        wanted["skills"] = "kettles whistle"
    FACTS[case.harness].extras = "neither"
    if not wanted:
        pytest.skip(f"{case.harness} takes neither")
    files = {f"{THINGS}/server.py": Path(mcp_server.__file__).read_text(), f"{THINGS}/skills/tea/SKILL.md": SKILL}
    done = run(case, spec=spec, files=files)
    seen = "\n".join(text for row in done.rows if row.role == "main" for text in _texts(done.asked(row)))
    found = [kind for kind, words in wanted.items() if words in seen]
    FACTS[case.harness].extras = ", ".join(found) or "neither"
    assert found == list(wanted), done.said()


def _why(row: Completion) -> str:
    return str(row.parsed["role_reason"]).partition(": ")[2]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _version(case: Case) -> str:
    harness = harnesses.create(AgentSpec(harness=case.harness, settings=dict(case.settings)))
    settings = getattr(harness, "settings", None)
    return str(getattr(settings, "version", "–"))
