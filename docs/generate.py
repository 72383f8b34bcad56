"""`python docs/generate.py` — writes docs/reference from the code: REST, command line, task, topology, errors.

A test runs it and compares, so the pages cannot fall behind. Explanations are written by hand, elsewhere.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from polar import cli, errors, spec, topology
from polar.api import create_app, docs, openapi
from polar.api.auth import ForbiddenError
from polar.api.described import OPERATIONS
from polar.remedies import REMEDIES
from polar.settings import Settings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs/reference"
WRITTEN = "<!-- Written by docs/generate.py from the code. -->\n"


class NoDispatcher:
    """The app is only looked at: nothing is published."""

    def look(self, lane: str) -> None:
        raise NotImplementedError

    def wake(self, session_id: Any, stage: str, lane: str) -> None:
        raise NotImplementedError


def pages() -> dict[str, str]:
    """Each page's text by its file's name."""
    app = create_app(Settings(database_url="postgresql+psycopg://nobody@127.0.0.1/none"), NoDispatcher())
    return {
        "rest.md": WRITTEN + "\n".join(rest(openapi.build(app))),
        "cli.md": WRITTEN + "\n".join(commands()),
        "task.md": WRITTEN + "\n".join(models("The task", TASK, spec.TaskRequest)),
        "errors.md": WRITTEN + "\n".join(error_codes()),
        "topology.md": WRITTEN + "\n".join(models("The topology file", TOPOLOGY, topology.Topology)),
    }


TASK = """What `POST /rollout/task/submit` and `polar submit` take, as JSON or YAML. An unknown field is refused by its
path. Fields marked *addition* are not in the original's schema; the rest has its names and meanings."""
REST = """Made from `/openapi.json` (OpenAPI 3.1), which every API serves, as a page at `/docs`. A key goes into
`Authorization: Bearer KEY`, `X-API-Key: KEY`, or the address, `http://polar:KEY@host`. Errors are problem
documents (RFC 9457) whose `errors` name the fields. The proxy's own routes are those of the providers:
[dialects](../dialects.md).
"""
ERRORS = """Every code that Polar gives. It is the last word of a problem document's `type`
(`urn:polar:problem:CODE`), the `code` of a session that failed, and what programs should look at; the sentence beside
it says what happened this time. The codes that an agent sees come in its provider's own shape:
[dialects](../dialects.md#errors).

*Whose*: whom a failed session blames; of an answer of the REST API it is the HTTP status. Codes without either are of
the proxy's answers, or are never shown. Refusals that HTTP itself names have its words as codes, such as
`method_not_allowed`.
"""
COMMANDS = """What `polar COMMAND --help` says. Commands that talk to the API read `POLAR_URL` and `POLAR_API_KEY`.
Shell completion, of task names too: `eval "$(_POLAR_COMPLETE=bash_source polar)"`; `zsh_source`, `fish_source`.
"""
TOPOLOGY = """Which nodes there are, their lanes, and the engines behind them; every `-c` takes it. The original's file
loads as it is. An unknown key is refused by its path."""


def rest(document: dict[str, Any]) -> Iterator[str]:
    """One part for each operation."""
    yield "# REST\n"
    yield REST
    for path, operations in document["paths"].items():
        for method, each in operations.items():
            yield f"## {method.upper()} {path}\n"
            scope = each.get("x-polar-scope")
            yield f"{each['summary']}. {each.get('description', '')}".strip() + "\n"
            yield f"Scope: `{scope}`.\n" if scope else "Open to all.\n"
            if "requestBody" in each:
                name = each["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                link = "[TaskRequest](task.md)" if name == "TaskRequest" else f"`{name}`"
                yield f"Body: {link}{'' if each['requestBody']['required'] else ', or nothing'}.\n"
                if name != "TaskRequest":
                    yield from fields(
                        document["components"]["schemas"][name], document["components"]["schemas"], "task.md"
                    )
            named = [parameter for parameter in each["parameters"] if parameter["in"] != "path"]
            if named:
                yield "| parameter | in | what |\n|---|---|---|"
                yield from (f"| `{one['name']}` | {one['in']} | {_cell(one)} |" for one in named)
                yield ""
            refusals = [code for code in each["responses"] if code not in ("200", "401", "403", "500")]
            if refusals:
                yield f"Refusals: {', '.join(refusals)}.\n"

    others = document["components"]["schemas"]
    bodies = {each.body.__name__ for each in OPERATIONS.values() if each.body}
    for name in sorted(others.keys() - OF_TASKS - bodies - {"Problem"}):
        yield f"## {name}\n"
        yield str(others[name].get("description", "")) + "\n"
        yield from fields(others[name], others, "task.md")


OF_TASKS = frozenset(spec.TaskRequest.model_json_schema()["$defs"])
"""Models that the task's page describes."""


def _cell(parameter: dict[str, Any]) -> str:
    schema = parameter["schema"]
    notes = [f"default {schema['default']}"] if "default" in schema else []
    notes += [f"at most {schema['maximum']}"] if "maximum" in schema else []
    return parameter["description"] + (f" ({', '.join(notes)})" if notes else "")


def fields(schema: dict[str, Any], others: Mapping[str, Any], page: str = "") -> Iterator[str]:
    """A table of a schema's properties; `others` are the models that it may refer to, described on `page`."""
    yield "| field | type | default | what |\n|---|---|---|---|"
    for name, each in schema.get("properties", {}).items():
        default = "required" if name in schema.get("required", ()) else _default(each)
        own = others.get(each.get("$ref", "").rpartition("/")[2], {})
        text = str(each.get("description") or own.get("description", "")).replace("\n", " ").replace("|", "\\|")
        yield f"| `{name}` | {kind(each, page)} | {default} | {text} |"
    yield ""


def kind(schema: Mapping[str, Any], page: str) -> str:
    """A property's type in a few words, as /docs says it."""

    def link(name: str) -> str:
        return f"[{name}]({page if name in OF_TASKS else ''}#{name.lower()})"

    return docs.kind(schema, link, "`{}`".format)


def _default(schema: Mapping[str, Any]) -> str:
    found = docs.default(schema)
    return found if found in ("–", "its defaults") else f"`{found}`"


def models(title: str, text: str, root: type[BaseModel]) -> Iterator[str]:
    """A part for the root and for each model below it."""
    schema = root.model_json_schema()
    yield f"# {title}\n\n{text}\n"
    others = schema.get("$defs", {})
    yield from fields(schema, others)
    for name, each in others.items():
        yield f"## {name}\n"
        yield str(each.get("description", "")) + "\n"
        yield from fields(each, others)


def error_codes() -> Iterator[str]:
    """A row for each code, in the alphabet's order."""
    yield f"# Errors\n\n{ERRORS}"
    yield "| code | whose | what it means | what to do |\n|---|---|---|---|"
    for code, whose in sorted(raised().items()):
        remedy = REMEDIES[code]
        yield f"| `{code}` | {', '.join(sorted(whose)) or '–'} | {remedy.means} | {remedy.do} |"


def raised() -> dict[str, set[str]]:
    """Each code that stands in the source, with whom it blames or its HTTP status."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "polar").rglob("*.py")]
    constants = {name: value for tree in trees for name, value in _constants(tree)}
    found: dict[str, set[str]] = {}
    for kind in KINDS.values():
        found.setdefault(kind.code, set()).update(_whose(kind))
    for call in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func).rpartition(".")[2]
        given = [each.value for each in call.keywords if each.arg == "code"]
        whose = _whose(KINDS[name]) if name in KINDS else set()
        if name == "problem" and len(call.args) > 2:
            given, whose = [call.args[1]], {ast.unparse(call.args[0])}
        for each in given:
            code = constants.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
            if isinstance(code, str):
                found.setdefault(code, set()).update(whose)
    return found


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield ast.unparse(node.targets[0]), node.value.value


def _whose(kind: type[errors.PolarError]) -> set[str]:
    if issubclass(kind, errors.SessionError):
        return {kind.blame}
    return set() if kind in (errors.PolarError, errors.LostLeaseError) else {str(kind.http_status)}


def _kinds(root: type[errors.PolarError]) -> Iterator[type[errors.PolarError]]:
    yield root
    for each in root.__subclasses__():
        if each.__module__ == errors.__name__:
            yield from _kinds(each)


KINDS = {kind.__name__: kind for kind in (*_kinds(errors.PolarError), ForbiddenError)}
"""Every error that is defined where all are, and the API's one more."""


def commands() -> Iterator[str]:
    """A part for each command, as its own help says it."""
    yield "# Command line\n"
    yield COMMANDS
    settings = cli.main.context_settings
    parent = click.Context(cli.main, info_name="polar", help_option_names=settings["help_option_names"])
    for name in sorted(cli.COMMANDS):
        command = cli.main.get_command(parent, name)
        assert command is not None
        # As it is called, below `polar`, whose settings it takes: a command keeps the help option that it had first.
        wide = {"max_content_width": 100, "terminal_width": 100}
        with click.Context(command, parent, info_name=name, **wide) as context:
            yield f"## polar {name}\n\n```text\n{command.get_help(context)}\n```\n"


def write() -> None:
    """Write every page."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    write()
    sys.stdout.write(f"wrote {FOLDER}\n")
