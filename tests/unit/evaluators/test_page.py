"""docs/evaluators.md is held to the code: each evaluator, each field, and a test for each promise."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from polar.evaluators import EVALUATORS
from polar.evaluators.answer_match import AnswerMatchConfig
from polar.evaluators.base import Case, Evaluator
from polar.evaluators.command import CommandConfig
from polar.evaluators.harbor import HarborConfig
from polar.evaluators.harbor_rubric import Criterion, HarborRubricConfig
from polar.evaluators.judge import JudgeConfig
from polar.evaluators.patches import RUNNER_FILES, PatchConfig
from polar.evaluators.swebench_harness import SwebenchConfig
from polar.evaluators.test_on_output import TestOnOutputConfig
from polar.registry import load

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/evaluators.md").read_text() if (ROOT / "docs/evaluators.md").exists() else ""
CONFIGS: list[type[BaseModel]] = [
    *(AnswerMatchConfig, CommandConfig, PatchConfig, TestOnOutputConfig, SwebenchConfig),
    *(HarborConfig, HarborRubricConfig, JudgeConfig, Criterion),
]


def sentences(model: type[Any]) -> dict[str, str]:
    """The fields that a class itself has, each with the sentence under it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for field, text in zip(tree.body, [*tree.body[1:], ast.Pass()], strict=True):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id != "__test__":
            said = text.value.value if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(said).split())
    return found


def rows(model: type[BaseModel]) -> list[str]:
    """The table of a config as the page must have it."""
    found = []
    for name, sentence in sentences(model).items():
        default = model.model_fields[name].get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else "–" if default in (None, (), ()) else f"`{default}`"
        found.append(f"| `{name}` | {shown} | {sentence} |")
    return found


@pytest.mark.parametrize("model", CONFIGS, ids=lambda model: model.__name__)
def test_every_field_is_documented(model: type[BaseModel]) -> None:
    """With its default and the sentence under it in the source; and there is a sentence."""
    for row in rows(model):
        assert not row.endswith("|  |"), row
        assert row in PAGE


def test_every_evaluator_has_its_section() -> None:
    """Under its name."""
    for name in EVALUATORS:
        assert load("evaluator", EVALUATORS, name, Evaluator).name == name  # type: ignore[type-abstract]
        assert f"\n## {name}\n" in PAGE


def test_every_promise_has_a_test() -> None:
    """Each row of the table of hacks names tests, and each of them is there."""
    table = PAGE.partition("## What is promised")[2].partition("## ")[0]
    promises = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| hack")]
    written: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(promises) >= 8
    for line in promises:
        named = set(re.findall(r"`(test_\w+)`", line.split("|")[-2]))
        assert named and named <= written, line


def test_the_runner_files_are_named() -> None:
    """Each file whose changes do not travel unless the task says so."""
    assert all(f"`{name}`" in PAGE for name in RUNNER_FILES if "/" not in name)


def test_the_how_to_shows_a_case_as_it_is() -> None:
    """Every field of a case that the page speaks of exists, and all are spoken of."""
    table = PAGE.partition("## An evaluator of your own")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(get_type_hints(Case))
