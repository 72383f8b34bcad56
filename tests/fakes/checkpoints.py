"""Checkpoints that differ a little from the packaged one."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.numpy import load_file, save_file

MODEL = Path(__file__).parents[2] / "polar" / "tiny_engine" / "model"


def shifted(folder: Path, by: float = 0.05) -> Path:
    """The packaged model with its last norm scaled by 1 + `by`: every log-probability is another."""
    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = (weights["model.norm.weight"] * (1 + by)).astype(weights["model.norm.weight"].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
