"""The families of the `renderers` library: their names, and which of them a tokenizer's folder wants.

The library is an extra: it is imported here when first asked for, and never by `import polar`. It knows models by
their exact names; a model of another name is known by its chat template, which must print what the family prints.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jinja2
import jinja2.sandbox
import orjson

from polar.errors import SpecError

NOT_FAMILIES = frozenset({"auto", "default", "custom"})
EXTRA = "the library of model families is not installed: pip install 'polar-rollout[renderers]'"
CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": {"key": "a"}}}
PROBES: tuple[tuple[list[dict[str, Any]], bool], ...] = (
    ([{"role": "user", "content": "Hello?"}], False),
    ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go on."}], True),
    (
        [
            {"role": "user", "content": "Look it up."},
            {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [CALL],
            },
            {"role": "tool", "content": "found", "tool_call_id": "functions.look:0", "name": "look"},
        ],
        True,
    ),
    (
        [
            {"role": "user", "content": "First."},
            {"role": "assistant", "content": "Done.", "reasoning_content": "Think."},
            {"role": "user", "content": "Second."},
        ],
        False,
    ),
)
"""Conversations, each with whether a tool is offered, that tell layouts apart."""
THINKING_ALOUD: tuple[list[dict[str, Any]], bool] = (
    [
        {"role": "user", "content": "Look it up."},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Think.", "tool_calls": [CALL]},
        {"role": "tool", "content": "found", "tool_call_id": "functions.look:0", "name": "look"},
    ],
    True,
)
"""One more in which most of a layout's tokens are printed."""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


@cache
def families() -> dict[str, Any]:
    """Each family's name and its config class. Raises SpecError if the library is not there."""
    try:
        from renderers.configs import RendererConfig
    except ImportError as error:
        raise SpecError.at("renderer", f"{EXTRA} ({error})") from error
    members = get_args(get_args(RendererConfig)[0])
    named = {member.model_fields["name"].default: member for member in members}
    return {name: member for name, member in sorted(named.items()) if name not in NOT_FAMILIES}


def family_by_name(model: str | None) -> str | None:
    """The family of a model that the library knows by this very name; fine-tunes have other names on purpose."""
    families()
    from renderers.base import MODEL_RENDERER_MAP

    return MODEL_RENDERER_MAP.get(model or "")


def named_in(folder: Path) -> str | None:
    """The model's own name, where its config has kept it."""
    for file, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path")):
        found = _json(folder / file).get(key)
        if isinstance(found, str) and found:
            return found
    return None


def eos_of(folder: Path) -> str | None:
    """The token that ends a text, by its spelling."""
    eos = _json(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(eos, dict):
        eos = eos.get("content")
    return eos if isinstance(eos, str) else None


def printed(folder: Path, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str | None:
    """A conversation as the folder's own chat template prints it; None if it has none, or the template refuses."""
    source = _template(folder)
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, **{"ensure_ascii": False, **options})
    environment.globals["raise_exception"] = _refuse
    config = _json(folder / "tokenizer_config.json")
    tokens = {key: config[key] for key in ("bos_token", "eos_token") if isinstance(config.get(key), str)}
    try:
        template = environment.from_string(source)
        return template.render(messages=messages, tools=tools, add_generation_prompt=True, **tokens)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError):
        return None


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _template(folder: Path) -> str | None:
    try:
        return (folder / "chat_template.jinja").read_text()
    except OSError:
        found = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in found if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def _json(path: Path) -> dict[str, Any]:
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
