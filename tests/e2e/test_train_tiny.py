"""examples/train_tiny: its loop for a few steps, and the parts of it that need no torch."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.up import EXAMPLES

pytestmark = pytest.mark.e2e
EXAMPLE = EXAMPLES / "train_tiny"
FLOAT_NOISE = 1e-4
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed: pip install -e '.[train]'"
)


@needs_torch
@pytest.mark.parametrize("flags", [(), ("--canonical", "--builder", "per_request")], ids=["default", "ablation"])
def test_the_loop_closes(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Two steps on two wires: what the trainer computes is what the engine sampled with, before and after a push."""
    out = tmp_path / "steps.json"
    size = ("--steps", "2", "--groups", "2", "--size", "3", "--spoil", "1")
    argv = [sys.executable, str(EXAMPLE / "train.py"), *size, *flags, "--home", str(tmp_path), "--out", str(out)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads(out.read_text())["steps"]
    assert len(steps) == 2 and "largest gap between trainer and engine" in done.stdout
    for step in steps:
        assert step["dialects"] == ["anthropic_messages", "openai_chat"]
        assert step["gap"] < FLOAT_NOISE and step["ratio_spread"] < 10 * FLOAT_NOISE
        assert 0.0 <= step["reward"] <= 1.0 and step["sessions"] == 6 and step["updates"] >= 2
        assert step["traces"] == 6 if not flags else step["traces"] > 6


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ({"looked_up": ["c"], "answer": "42"}, "1.0"),
        ({"looked_up": ["c"], "answer": "24"}, "0.2"),
        ({"looked_up": ["d"], "answer": "42"}, "0.0"),
        (None, "0.0"),
    ],
)
def test_the_judge(tmp_path: Path, answer: dict[str, object] | None, reward: str) -> None:
    """The answer counts only after the right call; an agent that wrote nothing earned nothing."""
    if answer is not None:
        (tmp_path / "answer.json").write_text(json.dumps(answer))
    argv = [sys.executable, str(EXAMPLE / "judge.py")]
    said = subprocess.check_output(argv, cwd=tmp_path, env={"KEY": "c", "VALUE": "42"}, text=True)
    assert said.strip() == reward


def test_the_page_has_what_was_measured() -> None:
    """The README's table is of the figures that the plot was drawn from, and the trainer stays readable."""
    page = (EXAMPLE / "README.md").read_text()
    runs = json.loads((EXAMPLE / "reward.json").read_text())
    assert len(runs) == 3 and len(re.findall(r"^\| \d \|", page, re.MULTILINE)) == 3
    for seed, rewards in runs.items():
        first, last = sum(rewards[:5]) / 5, sum(rewards[-5:]) / 5
        assert f"| {seed} | {len(rewards)} | {first:.2f} | {last:.2f} | {max(rewards):.2f} |" in page
        assert last > first + 0.3
    assert len((EXAMPLE / "train.py").read_text().splitlines()) < 300
