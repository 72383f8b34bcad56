"""topology.yaml: the original's file loads as it is, and a wrong key is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import SpecError
from polar.topology import load_topology, single_node

ORIGINAL = """
rollout: {host: 0.0.0.0, port: 8080, save_dir: ./results, callback_grace_seconds: 120}
gateway:
  heartbeat_interval_seconds: 30
  completion_persistence: {enabled: true, max_field_bytes: 1048576, queue_size: 1024}
  nodes:
    - id: node1
      host: 127.0.0.1
      port: 8100
      model_served: Qwen/Qwen3-4B
      inference: {engine: sglang, base_url: "http://127.0.0.1:8000"}
      max_init_workers: 3
      max_run_workers: 2
      max_postrun_workers: 4
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "topology.yaml"
    path.write_text(text)
    return path


def test_the_originals_file_loads(tmp_path: Path) -> None:
    """A node without lanes has one, gpu0, made of its own engine and worker numbers."""
    node, lane = load_topology(write(tmp_path, ORIGINAL)).lane("gpu0")
    assert (node.id, node.url) == ("node1", "http://127.0.0.1:8100")
    assert (lane.engine.base_url, lane.engine.model) == ("http://127.0.0.1:8000", "Qwen/Qwen3-4B")
    assert (lane.max_execute, lane.ready_buffer) == (2, 3)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("save_dir", "save_folder", "rollout.save_folder"),
        ("model_served", "model_serve", "gateway.nodes.0.model_serve"),
        ("port: 8100", "port: high", "gateway.nodes.0.port"),
        ("base_url", "url", "gateway.nodes.0.inference.url"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, old: str, new: str, named: str) -> None:
    """Unknown keys and wrong values are refused by their path in the file."""
    with pytest.raises(SpecError, match=named):
        load_topology(write(tmp_path, ORIGINAL.replace(old, new)))


def test_a_name_that_is_not_there_lists_what_is(tmp_path: Path) -> None:
    """Asking for another node or lane says which there are."""
    topology = load_topology(write(tmp_path, ORIGINAL))
    with pytest.raises(SpecError, match="there are: node1"):
        topology.node("node2")
    with pytest.raises(SpecError, match="there are: gpu0"):
        topology.lane("gpu1")


def test_a_missing_file_and_bad_yaml_are_sentences(tmp_path: Path) -> None:
    """No traceback, but the file and the reason."""
    with pytest.raises(SpecError, match="No such file"):
        load_topology(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="not valid YAML"):
        load_topology(write(tmp_path, "a: [1"))


def test_without_a_file_there_is_one_node_with_lane_gpu0() -> None:
    """What holds when nothing was configured."""
    node, lane = single_node("local", 8100).lane("gpu0")
    assert (node.id, lane.engine.engine) == ("local", "sglang")
