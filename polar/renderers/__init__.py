"""The renderers, and which of them a tokenizer's folder wants. Adding one: a file here and a line in the table.

Names that are not in the table are families of the `renderers` library, which is an extra."""

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
def for_folder(folder: Path, name: str = "auto", model: str | None = None) -> Renderer:
    """The renderer of a tokenizer's folder, made once per process; `model` is what its engine calls it.

    Raises SpecError."""
    if name in RENDERERS or ":" in name:
        return _class(name)(folder)
    if name == "auto":
        for member in sorted(RENDERERS):
            cls = _class(member)
            if cls.fits(folder):
                return cls(folder)
    # Imported here, so that only those who need a family pay for the library.
    from polar.renderers.packaged import LibraryRenderer

    try:
        return LibraryRenderer(folder, None if name == "auto" else name, model)
    except SpecError as error:
        known = f"renderers of Polar's own: {', '.join(sorted(RENDERERS))}"
        raise SpecError(f"{error.message} ({known})", errors=error.errors) from error


def _class(name: str) -> type[Renderer]:
    return load("renderer", RENDERERS, name, Renderer)  # type: ignore[type-abstract]
