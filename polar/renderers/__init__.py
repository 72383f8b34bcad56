"""The renderers, and which of them a tokenizer's folder wants. Adding one: a file here and a line in the table."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from polar.errors import SpecError
from polar.registry import load
from polar.renderers.base import Renderer

RENDERERS = {
    "chatml": "polar.renderers.chatml:ChatMLRenderer",
}


@lru_cache(maxsize=32)
def for_folder(folder: Path, name: str = "auto") -> Renderer:
    """The renderer of a tokenizer's folder, made once per process. Raises SpecError."""
    if name != "auto":
        return _class(name)(folder)
    for member in sorted(RENDERERS):
        cls = _class(member)
        if cls.fits(folder):
            return cls(folder)
    raise SpecError.at(
        "renderer", f"none of {', '.join(sorted(RENDERERS))} fits {folder}; name one as the engine's `renderer`"
    )


def _class(name: str) -> type[Renderer]:
    return load("renderer", RENDERERS, name, Renderer)  # type: ignore[type-abstract]
