"""Stored sessions become data: the example's run, and `polar export` of what it left behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.up import EXAMPLES, Up

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def generated(up: Up, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """What the example wrote, and said."""
    folder = tmp_path_factory.mktemp("data")
    argv = [str(EXAMPLES / "generate_sft/generate.py"), "--groups", "6", "--size", "3", "--out", str(folder)]
    done = run(up, *argv)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def run(up: Up, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, told where this Polar is."""
    own = {"POLAR_URL": f"http://127.0.0.1:{up.port}", "POLAR_HOME": str(up.home)}
    argv = [sys.executable, *arguments]
    return subprocess.run(argv, env={**os.environ, **own}, capture_output=True, text=True, timeout=240)


def rows(path: Path) -> list[dict[str, Any]]:
    """Lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_example_keeps_what_was_accepted(generated: tuple[Path, str]) -> None:
    """Every kept row has the reward, was sampled token for token, and its messages render to its tokens."""
    folder, said = generated
    kept = [*rows(folder / "train.jsonl"), *rows(folder / "test.jsonl")]
    assert kept and all(row["reward"] == 1.0 and row["fidelity"] == "exact" for row in kept)
    assert all(row["harness"] == "shell" and len(row["input_ids"]) == len(row["loss_mask"]) for row in kept)
    counts = re.findall(r"(\d+) rows of \d+ groups, \d+ tokens; (\d+) render the same", said)
    assert len(counts) == 2 and all(count == alike for count, alike in counts), said
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["kind"] == "rejection" and manifest["rows"] == len(kept) and manifest["left_out"]


def test_the_command_exports_what_is_stored(up: Up, generated: tuple[Path, str], tmp_path: Path) -> None:
    """All sessions as Parquet, and pairs of the same group; the same command gives the same files."""
    for name in ("a", "b"):
        done = run(up, "-m", "polar", "export", "sft", str(tmp_path / name), "--format", "parquet", "--seed", "3")
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "a/train.parquet").read_bytes() == (tmp_path / "b/train.parquet").read_bytes()
    assert json.loads((tmp_path / "a/manifest.json").read_text())["sessions"] == 18
    done = run(up, "-m", "polar", "export", "preference", str(tmp_path / "pairs"), "--task-id", "sft-*")
    assert done.returncode == 0, done.stderr
    for pair in rows(tmp_path / "pairs/train.jsonl"):
        assert pair["chosen_reward"] > pair["rejected_reward"]
        assert pair["chosen_session"].startswith("ses-") and pair["prompt"] and pair["chosen"] != pair["rejected"]


def test_what_cannot_be_exported_is_said(up: Up, generated: tuple[Path, str], tmp_path: Path) -> None:
    """Filters that leave nothing, a kind without its threshold, a split that is none: one sentence each."""
    nothing = run(up, "-m", "polar", "export", "sft", str(tmp_path), "--harness", "codex")
    assert nothing.returncode == 1 and "18 harness" in nothing.stderr and "loosen the filters" in nothing.stderr
    bare = run(up, "-m", "polar", "export", "rejection", str(tmp_path))
    assert bare.returncode == 2 and "needs --min-reward" in bare.stderr
    split = run(up, "-m", "polar", "export", "sft", str(tmp_path), "--split", "train=0.5")
    assert split.returncode == 2 and "add up to 0.5" in split.stderr
