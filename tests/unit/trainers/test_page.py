"""docs/trainers.md and examples/train_slime are held to the code."""

from __future__ import annotations

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import polar.trainers
from polar.client import Client
from polar.spec import parse_task
from polar.topology import load_topology
from polar.trainers.slime import Rollouts, generate_rollout_polar_async, post_process_rewards
from polar.trainers.slime_config import SlimeConfig

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/trainers.md").read_text()
EXAMPLE = ROOT / "examples/train_slime"


def keys_table() -> str:
    """The table of Slime's keys as the source has them."""
    (config,) = [
        node
        for node in ast.parse((ROOT / "polar/trainers/slime_config.py").read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    rows = []
    for field, text in zip(config.body, config.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name) and field.value is not None
            default = ast.literal_eval(field.value)
            shown = "–" if default is None else f"`{default}`"
            rows.append(f"| `polar_{field.target.id}` | {shown} | {text.value.value} |")
    return "\n".join(rows)


def test_every_key_of_slime_is_documented() -> None:
    """With its default and its sentence, as the source has them."""
    assert keys_table() in PAGE and keys_table().count("\n") > 10


def test_every_method_and_function_is_documented() -> None:
    """The client's public methods, what `polar.trainers` offers, and each bridge with a row."""
    names = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert {name for name in names if f"`{name}(" not in PAGE and f" {name}(" not in PAGE} == set()
    offered = set(polar.trainers.__all__) - {"Sample", "SampleError", "Span"}
    assert {name for name in offered if f"`{name}" not in PAGE} == set()
    shared = {"__init__", "advantages", "batches", "groups", "runner", "samples", "slime_config", "storage", "template"}
    bridges = {path.stem for path in (ROOT / "polar/trainers").glob("*.py")} - shared
    assert set(re.findall(r"^\| `(\w+)` \| [A-Z|a-z]", PAGE, re.MULTILINE)) >= bridges and len(bridges) == 8


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_snippets_name_what_exists(code: str) -> None:
    """Each parses, and what it imports of Polar is there, but for classes that need their trainer's package."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "polar.trainers.nemo_gym":
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


def test_the_example_is_whole(tmp_path: Path) -> None:
    """Files parse, keys are the bridge's, and a prepared row becomes a task that the API would take."""
    keys = yaml.safe_load((EXAMPLE / "polar.yaml").read_text())
    args = SimpleNamespace(rollout_batch_size=4, update_weights_interval=1, **keys)
    args.polar_task_template = str(ROOT / keys["polar_task_template"])
    config = SlimeConfig.of(args)
    row = dict.fromkeys(("problem_statement", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS"), "x")
    source, target = tmp_path / "rows.jsonl", tmp_path / "prompts.jsonl"
    source.write_text(json.dumps({"instance_id": "getmoto__moto-1", **row}) + "\n")
    subprocess.run([sys.executable, str(EXAMPLE / "prepare_data.py"), str(source), str(target)], check=True)
    prompt = SimpleNamespace(group_index=3, index=48, label=None, **json.loads(target.read_text()))
    rollouts = Rollouts(args, config, None, client=object())  # type: ignore[arg-type]
    task = parse_task(rollouts._task([prompt] * 16, 7, 16))
    assert (task.task_id, task.num_samples, task.instruction) == ("swegym-7-3", 16, "x")
    assert task.runtime is not None and task.runtime.image == "xingyaoww/sweb.eval.x86_64.getmoto_s_moto-1:latest"
    assert task.evaluator is not None and task.evaluator.config["instance"]["instance_id"] == "getmoto__moto-1"
    assert load_topology(EXAMPLE / "topology.yaml").rollout.port == 8080


def test_the_examples_script_is_a_script() -> None:
    """Bash parses it, and the functions that it names are the bridge's."""
    script = (EXAMPLE / "run.sh").read_text()
    subprocess.run(["bash", "-n", str(EXAMPLE / "run.sh")], check=True)
    for function in (generate_rollout_polar_async, post_process_rewards):
        assert f"{function.__module__}.{function.__name__}" in script
    flags = re.findall(r"^  (--[a-z0-9-]+)", script, re.MULTILINE)
    assert len(flags) == len(set(flags)) > 25
