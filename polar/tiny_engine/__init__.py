"""A real inference engine in numpy for tiny Qwen3 checkpoints, and a scripted twin, behind SGLang's and vLLM's HTTP.

The embedded default, the engine of the tests and of the demo. Nothing in the gateway knows that it is ours: it is
spoken to as any engine is. Importing this package costs nothing; names are resolved on first use, so that whoever
starts a server can set the number of BLAS threads before numpy loads.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polar.tiny_engine.engine import TinyEngine
    from polar.tiny_engine.model import Qwen3
    from polar.tiny_engine.sampling import SamplingParams
    from polar.tiny_engine.scripted import ScriptedEngine, ScriptFile
    from polar.tiny_engine.server import build_app, make_engine, serve

MODEL_DIR = Path(__file__).parent / "model"
"""The packaged checkpoint: about 0.9 million parameters, trained on the task in `lookup`."""

_HOMES = {
    "TinyEngine": "engine",
    "ScriptedEngine": "scripted",
    "ScriptFile": "scripted",
    "build_app": "server",
    "make_engine": "server",
    "serve": "server",
    "Qwen3": "model",
    "SamplingParams": "sampling",
}

__all__ = [
    "MODEL_DIR",
    "Qwen3",
    "SamplingParams",
    "ScriptFile",
    "ScriptedEngine",
    "TinyEngine",
    "build_app",
    "make_engine",
    "serve",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
