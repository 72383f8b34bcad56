"""What is written is checked: settings, lifecycle words, commands, services and examples."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import get_args

import click
import pytest
import yaml

from polar import cli
from polar.builders import BUILDERS
from polar.cli.client import load_task
from polar.dialects import DIALECTS
from polar.dialects.base import Dialect
from polar.lifecycle import Stage, State
from polar.registry import load
from polar.runtimes import RUNTIMES
from polar.runtimes.base import Runtime
from polar.settings import Settings
from polar.spec import TaskRequest, parse_task

ROOT = Path(__file__).parents[2]


def described() -> dict[str, tuple[str, str]]:
    """Each setting's default and the sentence under it, from the source."""
    tree = ast.parse((ROOT / "polar/settings.py").read_text())
    (settings,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Settings"]
    found = {}
    for field, text in zip(settings.body, settings.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            assert isinstance(field.target, ast.Name) and field.value is not None
            found[field.target.id] = (str(ast.literal_eval(field.value)), str(text.value.value))
    return found


def settings_table() -> str:
    """The table of docs/configuration.md as it must be."""
    rows = [f"| `POLAR_{name.upper()}` | {default or '–'} | {text} |" for name, (default, text) in described().items()]
    return "\n".join(rows)


def test_every_setting_is_documented() -> None:
    """docs/configuration.md holds exactly the settings of the source, with their defaults and sentences."""
    assert {field.name for field in fields(Settings)} == described().keys()
    assert settings_table() in (ROOT / "docs/configuration.md").read_text()


def test_the_lifecycle_page_has_every_word() -> None:
    """Stages with their own sentences, and every state and move."""
    page = (ROOT / "docs/lifecycle.md").read_text()
    source = (ROOT / "polar/lifecycle.py").read_text()
    for stage in Stage:
        sentence = re.search(rf'{stage.name} = "{stage}"\n    """(.*?)"""', source)
        assert sentence and f"| {stage} | {sentence[1]} |" in page
    assert all(state in page for state in State)


def test_compose_has_one_service_for_each_process() -> None:
    """Services and files of workers/ match one to one, and each command names its file's module or Celery's app."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    workers = {path.stem for path in (ROOT / "workers").glob("[a-z]*.py")}
    assert workers | {"postgres", "redis"} == compose["services"].keys()
    for name in workers:
        command = " ".join(compose["services"][name]["command"])
        assert f"workers.{name}" in command or "celery -A polar worker" in command
        assert ast.get_docstring(ast.parse((ROOT / f"workers/{name}.py").read_text()))
        assert {"postgres", "redis"} == compose["services"][name]["depends_on"].keys()
    used = {volume.split(":")[0] for each in compose["services"].values() for volume in each.get("volumes", [])}
    assert used == compose["volumes"].keys()
    assert "PASSWORD: polar" not in (ROOT / "docker-compose.yml").read_text()


def test_the_dockerfile_copies_what_it_needs() -> None:
    """Everything that Docker is told to copy is there."""
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*/task.yaml")), ids=lambda path: path.parent.name)
def test_every_example_is_a_valid_task_with_a_readme(path: Path) -> None:
    """An example's task validates, and its page names the command that runs it."""
    parse_task(load_task(path))
    assert f"polar submit examples/{path.parent.name}/task.yaml" in (path.parent / "README.md").read_text()


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_explains_itself(name: str) -> None:
    """Help has a sentence and an example."""
    command = cli.main.get_command(click.Context(cli.main), name)
    assert command and command.help and command.epilog and command.epilog.startswith("Example: polar ")


def test_the_readme_names_make_targets_that_exist() -> None:
    """The two commands, and every file that the README sends the reader to."""
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make ([a-z]+)", readme, re.M):
        assert f"\n{target}:" in makefile
    for link in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"`((?:polar|workers)/[a-z_/]+\.py)`", readme):
        assert (ROOT / name).exists(), name


def test_the_package_imports_without_side_effects() -> None:
    """`import polar` loads nothing heavy and opens nothing."""
    code = "import sys, polar; print(sorted({'celery', 'flask', 'numpy', 'sqlalchemy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_every_mark_is_documented() -> None:
    """docs/dialects.md has each mark that a dialect or the proxy can put on a completion."""
    page = (ROOT / "docs/dialects.md").read_text()
    marks: set[str] = set()
    for path in [*(ROOT / "polar/dialects").glob("*.py"), ROOT / "polar/proxy/prepare.py"]:
        source = path.read_text()
        marks |= set(re.findall(r'marks\.append\(f?"([a-z_]+)', source))
        for table in re.findall(r"^UNHEEDED[^=]*= [({](.*?)[)}]$", source, re.MULTILINE | re.DOTALL):
            marks |= set(re.findall(r'"([a-z_]+)"', table))
    assert len(marks) > 30
    assert {mark for mark in marks if f"`{mark}" not in page} == set()


def test_the_runtimes_page_says_what_each_can() -> None:
    """The table of docs/runtimes.md is that of the classes' attributes."""
    page = (ROOT / "docs/runtimes.md").read_text()
    members = [load("runtime", RUNTIMES, name, Runtime) for name in RUNTIMES]  # type: ignore[type-abstract]
    members.sort(key=lambda member: ["local", "bubblewrap", "docker", "apptainer"].index(member.name))
    assert "| | " + " | ".join(f"`{member.name}`" for member in members) + " |" in page
    rows = {
        "starts from an image (`image`)": "NEEDS_IMAGE",
        "`network: none`, `allow_internet: false`": "ISOLATES_NETWORK",
        "`memory_mb`, `cpus`": "LIMITS_RESOURCES",
        "`pids`": "LIMITS_PIDS",
        "`storage_mb`": "LIMITS_STORAGE",
        "`gpus`": "HAS_GPUS",
        "`prepare_once`": "COPIES_PREPARED",
    }
    for title, ability in rows.items():
        said = " | ".join("yes" if getattr(member, ability) else "no" for member in members)
        assert f"| {title} | {said} |" in page
    keys = [", ".join(f"`{key}`" for key in sorted(member.KWARGS or ())) or "–" for member in members]
    assert f"| `kwargs` | {' | '.join(keys)} |" in page


def test_every_dialect_is_documented() -> None:
    """And each dialect, with the path of its model call."""
    page = (ROOT / "docs/dialects.md").read_text()
    for name in DIALECTS:
        member = load("dialect", DIALECTS, name, Dialect)  # type: ignore[type-abstract]
        assert f"| `{name}` |" in page
        assert any(route.path.rpartition(":")[2] in page for route in member.routes if route.kind == "generate")


def test_every_flag_is_documented() -> None:
    """docs/fidelity.md has each flag of the certificate with its sentence, and each that the proxy can put there."""
    page = (ROOT / "docs/fidelity.md").read_text()
    text = ast.get_docstring(ast.parse((ROOT / "polar/builders/certificate.py").read_text()))
    assert text is not None
    rows = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*) {2,}(.*)$", text, re.MULTILINE)
    assert len(rows) > 25
    for names, sentence in rows[1:]:
        shown = ", ".join(f"`{name}`" for name in names.split(", "))
        assert f"| {shown} | {sentence} |" in page
    documented = {name for names, _ in rows for name in names.split(", ")} | set(
        re.findall(r"^\| `(\w+)` \|", page, re.M)
    )
    assert raised_flags() - documented == set()


def raised_flags() -> set[str]:
    """Flags that the source puts on completions and traces."""
    patterns = (
        r'flags\.(?:append|add)\("([a-z_]+)"',
        r'found\.add\("([a-z_]+)"',
        r'\.flags, "([a-z_]+)"\)',
        r'flags = \["([a-z_]+)"\]',
        r'_as_root\(place, "([a-z_]+)"',
        r'^FORGOTTEN = "([a-z_]+)"',
    )
    found: set[str] = set()
    folders = ("proxy", "renderers", "builders", "engines")
    for path in (path for folder in folders for path in (ROOT / "polar" / folder).glob("*.py")):
        source = path.read_text()
        found |= {name for pattern in patterns for name in re.findall(pattern, source, re.MULTILINE)}
    assert len(found) > 15
    return found


def test_the_fidelity_page_names_tests_that_exist() -> None:
    """Each test that docs/fidelity.md names is there."""
    named = set(re.findall(r"`(test_[a-z_]+)`", (ROOT / "docs/fidelity.md").read_text()))
    written: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(named) > 25
    assert named - written == set()


def test_the_fidelity_page_has_every_field_and_policy() -> None:
    """Each field of a certificate, and each of a task's history policies."""
    page = (ROOT / "docs/fidelity.md").read_text()
    source = (ROOT / "polar/builders/certificate.py").read_text()
    for name in re.findall(
        r'^        "([a-z_]+)": ', source[source.index("def certify") : source.index("def usable")], re.M
    ):
        assert f"| `{name}` |" in page
    for policy in get_args(TaskRequest.model_fields["history"].annotation):
        assert f"| `{policy}` |" in page


def test_every_builder_is_documented() -> None:
    """docs/builders.md has each strategy."""
    page = (ROOT / "docs/builders.md").read_text()
    assert all(f"`{name}`" in page for name in BUILDERS)


def test_the_security_page_names_tests_that_exist() -> None:
    """Each test that docs/security.md names is there, and each row names one."""
    page = (ROOT / "docs/security.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    written: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        written |= set(re.findall(r"def (test_\w+)", path.read_text()))
    assert len(named) > 30
    assert named - written == set()
    rows = re.findall(r"^\| (?!threat|-).*$", page.replace("|---|---|---|", ""), re.MULTILINE)
    assert all("`test_" in row for row in rows)
