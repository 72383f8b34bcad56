"""Trainers against a running Polar: client, samples and bridges on sessions of real agents, and the base install."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polar.client import Client
from polar.trainers import Groups, advantages, from_arrow, padded, samples_of, staleness
from polar.trainers.runner import main_sample
from polar.trainers.slime import Rollouts
from polar.trainers.slime_config import SlimeConfig
from polar.trainers.trl import PolarRollouts
from polar.trainers.verl import output_fields
from tests.contracts.test_trainers import Buffer, SlimeSample
from tests.e2e.up import Up, example

pytestmark = pytest.mark.e2e
ROOT = Path(__file__).parents[2]
SUBMITS = """
import sys
from polar.client import Client
from polar.trainers import samples_of
with Client(sys.argv[1], sys.argv[2]) as polar:
    task = polar.request("GET", "/tasks")["tasks"]
    found = [result for result in polar.results(task_id=sys.argv[3])]
    assert found and samples_of(found[0])[0].sampled_tokens
    accepted = polar.submit({"task_id": "base", "instruction": "x", "runtime": {"backend": "local"},
        "agent": {"harness": "shell", "custom_shell": {"command": "true"}}})
    assert polar.wait("base").ended
missing = {"celery", "flask", "sqlalchemy", "pydantic", "gunicorn", "docker"}
assert not missing & set(sys.modules)
import importlib.util
assert not [name for name in missing if importlib.util.find_spec(name)]
"""


@pytest.fixture
def client(up: Up) -> Iterator[Client]:
    """Connected to it."""
    with Client(f"http://127.0.0.1:{up.port}", up.http.headers["X-API-Key"]) as found:
        yield found


def template() -> dict[str, Any]:
    """The example's task without the fields that a bridge fills."""
    return {name: value for name, value in example("tool_lookup").items() if name not in ("num_samples", "task_id")}


def test_sessions_become_batches(client: Client) -> None:
    """Two tasks of four sessions: groups complete, advantages sum to nothing, Arrow says the same as JSON."""
    client.set_policy(7)
    tasks = [example("tool_lookup", num_samples=4), example("tool_lookup", "anthropic.yaml", num_samples=4)]
    groups, done, results = Groups(4), [], []
    for result in client.run(tasks, progress=True):
        results.append(result)
        if (group := groups.add(result)) is not None:
            done.append(group)
    assert len(results) == 8 and len(done) == 2 and all(group.usable == 4 for group in done)
    samples = [sample for group in done for sample in group.samples()]
    found = advantages(samples)
    assert abs(float(found.sum())) < 1e-4
    assert {staleness(sample, 7) for sample in samples} <= {0, None}
    assert padded(samples, pad_id=0)["response_mask"].sum() == sum(sample.sampled_tokens for sample in samples)
    tables = [table for _, table in client.batches()]
    of_arrow = {sample.session_id: sample for table in tables for sample in from_arrow(table)}
    for sample in samples:
        same = of_arrow[sample.session_id]
        assert np.array_equal(same.ids, sample.ids) and np.array_equal(same.logprobs, sample.logprobs)
        assert (same.versions, same.reward, same.group_id) == (sample.versions, sample.reward, sample.group_id)


def test_bridges_run_sessions(up: Up, client: Client) -> None:
    """TRL's rollouts, verl's single session and two rollouts of Slime, each by its own way to ask."""
    key = up.http.headers["X-API-Key"]
    rollouts = PolarRollouts(client.url, key, template())
    rows = rollouts(["find a", "find a", "find b"], SimpleNamespace())
    assert len(rows["prompt_ids"]) == 3 and all(0.0 <= reward <= 1.0 for reward in rows["polar_reward"])
    result = asyncio.run(rollouts.runner.run_one(rollouts.runner.task("find c")))
    assert main_sample(result) and sum(output_fields(result, 4096, 4096)["response_mask"]) > 0
    given = {"rollout_batch_size": 2, "polar_rollout_url": client.url, "polar_task_template": template()}
    name = "s" + uuid.uuid4().hex[:6]
    args = SimpleNamespace(**given, polar_api_key=key, polar_task_id_template=name + "-{rollout_id}-{sample.index}")
    slime, buffer = Rollouts(args, SlimeConfig.of(args), SlimeSample), Buffer(2)
    for rollout_id in range(2):
        batch, metrics = slime.step(rollout_id, buffer)
        assert len(batch) == 2 and metrics["polar/groups"] == 2
        for made in (made for group in batch for made in group):
            assert made.response_length == len(made.loss_mask) == len(made.rollout_log_probs)
            assert made.metadata["polar_reward"] is not None and made.status is SlimeSample.Status.COMPLETED


def test_the_client_is_a_distribution_of_its_own(up: Up, client: Client, tmp_path: Path) -> None:
    """In a fresh environment without the server's packages the client reads results and submits a task."""
    task = example("tool_lookup", num_samples=1)
    (result,) = client.run(task)
    assert samples_of(result)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    uv = Path(sys.executable).parent / "uv"
    # Built from a copy: a build leaves its files beside the sources.
    shutil.copytree(ROOT / "polar", tmp_path / "source/polar", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [str(uv), "pip", "install", "-q", "--python", str(python), str(tmp_path / "source/polar/client")],
        check=True,
        cwd=tmp_path,
    )
    argv = [str(python), "-c", SUBMITS, client.url, up.http.headers["X-API-Key"], task["task_id"]]
    subprocess.run(argv, check=True, cwd=tmp_path)
    polar = str(python.parent / "polar")
    refused = subprocess.run([polar, "up"], capture_output=True, text=True, cwd=tmp_path)
    assert refused.returncode == 1 and "pip install polar-rollout" in refused.stderr
    environ = {"POLAR_API_KEY": up.http.headers["X-API-Key"], "PATH": "/usr/bin"}
    shown = subprocess.run(
        [polar, "status", "--rollout-url", client.url], capture_output=True, text=True, cwd=tmp_path, env=environ
    )
    assert shown.returncode == 0 and task["task_id"] in shown.stdout
