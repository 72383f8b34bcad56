"""The arrow of imports: down only. Read from the source, so that a wrong import fails here and not in review."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAYERS: list[set[str]] = [
    {"spec", "messages", "dispatch", "settings", "topology", "registry", "log", "errors", "nesting", "__init__"}
    | {"metrics", "tracing", "spans", "remedies", "clock", "session_clock", "statements", "client"},
    {"lifecycle", "placement", "recording", "models", "db", "lanes", "leases", "queries", "keys", "rehoming"}
    | {"admission", "bodies", "embedded", "fleet", "listing", "policy", "staleness", "tiny_engine", "weights"},
    {"runtimes", "harnesses", "builders", "evaluators", "dialects", "engines", "renderers", "rewards", "scoring"}
    | {"regeneration"},
    {"stages", "delivery", "sweep", "slices", "trainers", "exporting"},
    {"cli", "api", "admin", "proxy", "__main__"},
]
FAMILIES = {"runtimes", "harnesses", "builders", "evaluators", "dialects", "engines", "renderers"}
BASES = {
    # Programs are installed on the node by the same bounded process call that runtimes run commands with.
    "harnesses": {"polar.runtimes.base", "polar.runtimes", "polar.runtimes.environment", "polar.runtimes.process"},
    "evaluators": {"polar.runtimes.base"},
    "rewards": {"polar.evaluators.base"},
}
"""Contracts that a family is written against: their base alone."""
PROCESS_LIBRARIES = {"celery", "kombu", "gunicorn", "workers"}
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> list[str]:
    """Modules that a file imports, as written."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module]
            found += [f"{node.module}.{alias.name}" for alias in node.names if node.module == "polar"]
    return found


def part(module: str) -> str:
    """`polar.runtimes.base` belongs to the part `runtimes`."""
    return module.split(".")[1] if "." in module else "__init__"


def sources() -> list[tuple[str, Path]]:
    """(part, file) of everything under polar/, but for the file that makes `celery -A polar` work."""
    found = []
    for path in sorted((ROOT / "polar").rglob("*.py")):
        inside = path.relative_to(ROOT / "polar")
        name = inside.parts[0].removesuffix(".py")
        if name != "celery":
            found.append((name, path))
    return found


def test_every_part_has_a_height() -> None:
    """A new file or folder directly under polar/ says where it stands."""
    assert {name for name, _ in sources()} - HEIGHT.keys() == set()


def test_imports_go_down_only() -> None:
    """No file imports from a layer above its own."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for name, path in sources()
        for module in imports(path)
        if module.startswith("polar.") and HEIGHT.get(part(module), 0) > HEIGHT[name]
    ]
    assert wrong == []


def test_families_do_not_import_each_other() -> None:
    """A family may be written against another's base, where the contract says so, and nothing else of it."""
    wrong = []
    for name, path in sources():
        for module in imports(path):
            other = part(module) if module.startswith("polar.") else ""
            if name in FAMILIES and other in FAMILIES and other != name and module not in BASES.get(name, set()):
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert wrong == []


def test_polar_imports_no_process_library() -> None:
    """Celery, gunicorn and the workers are the processes' affair."""
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for _, path in sources()
        for module in imports(path)
        if module.split(".")[0] in PROCESS_LIBRARIES
    ]
    assert wrong == []
