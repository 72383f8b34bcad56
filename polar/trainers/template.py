"""A task with places to fill in: `{name}` and `{name.of.a.field}` in any text of it.

A text that is nothing but one place takes the value as it is, a number or a list too; elsewhere it becomes text. Braces
that hold no name of this form are left alone, so shell and JSON in a task need no escaping.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from polar.trainers.samples import SampleError

PLACE = re.compile(r"\{([A-Za-z_]\w*(?:\.\w+)*)\}")


def fill(body: Any, values: Mapping[str, Any]) -> Any:
    """The same with every place filled. Raises SampleError for a place that `values` do not know.

    A first name that is in `values` makes a place; any other text in braces stays."""
    if isinstance(body, str):
        return _text(body, values)
    if isinstance(body, Mapping):
        return {key: fill(value, values) for key, value in body.items()}
    if isinstance(body, list | tuple):
        return [fill(value, values) for value in body]
    return body


def load(template: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A template as it is, or from a file of JSON or YAML, or from JSON text. Raises SampleError."""
    if isinstance(template, Mapping):
        return dict(template)
    text = str(template)
    if not text.lstrip().startswith("{"):
        text = Path(text).read_text()
        if not text.lstrip().startswith("{"):
            import yaml

            found = yaml.safe_load(text)
            return _mapping(found, template)
    return _mapping(orjson.loads(text), template)


def _mapping(found: Any, template: object) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise SampleError(f"{template}: a task is a mapping of fields")
    return found


def _text(text: str, values: Mapping[str, Any]) -> Any:
    whole = PLACE.fullmatch(text)
    if whole and whole[1].split(".")[0] in values:
        return _value(whole[1], values)

    def put(found: re.Match[str]) -> str:
        return str(_value(found[1], values)) if found[1].split(".")[0] in values else found[0]

    return PLACE.sub(put, text)


def _value(path: str, values: Mapping[str, Any]) -> Any:
    found: Any = values
    for part in path.split("."):
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif not isinstance(found, Mapping) and hasattr(found, part):
            found = getattr(found, part)
        else:
            raise SampleError(f"the task template asks for {{{path}}}, and there is no {part!r}")
    return found
