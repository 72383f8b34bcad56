"""docs/harnesses.md says what the source says: every preset is on it, with every setting."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from polar import harnesses
from polar.harnesses import HARNESSES
from polar.spec import AgentSpec, Spec

PAGE = Path(__file__).parents[3] / "docs" / "harnesses.md"
BEGIN, END = "<!-- harness settings: begin -->\n", "<!-- harness settings: end -->"
OF_ALL = {"install", "version"}


def presets() -> dict[str, type[Spec]]:
    """Each preset's settings."""
    found = {}
    for name in sorted(HARNESSES.keys() - {"shell", "external"}):
        settings = getattr(harnesses.create(AgentSpec(harness=name)), "settings", None)
        assert isinstance(settings, Spec)
        found[name] = type(settings)
    return found


def described(settings: type[Spec]) -> dict[str, str]:
    """The sentence under each field, from the source."""
    (made,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(made, ast.ClassDef)
    found = {}
    for field, text in zip(made.body, [*made.body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            said = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(said).split()) or "Its option of that name."
    return found


def table() -> str:
    """The list of settings as it must be."""
    lines = ["| harness | setting | default | what |", "|---|---|---|---|"]
    for name, settings in presets().items():
        for field, text in described(settings).items():
            if field not in OF_ALL:
                default = settings.model_fields[field].default
                shown = "–" if default in (None, ()) else f"`{default}`"
                lines.append(f"| `{name}` | `{field}` | {shown} | {text} |")
    return "\n".join(lines) + "\n"


def test_every_setting_is_on_the_page() -> None:
    """The list of settings is the source's."""
    assert BEGIN + table() + END in PAGE.read_text()


@pytest.mark.parametrize("name", sorted(HARNESSES.keys() - {"external"}))
def test_every_preset_is_on_the_page(name: str) -> None:
    """By its name."""
    assert f"`{name}`" in PAGE.read_text() or f'"{name}"' in PAGE.read_text()
