"""`GET /docs`: the REST reference as a page in the look of the admin pages, made from the OpenAPI document.

Open to all, like the document itself. What the page says is `openapi`'s and `remedies`'; how a schema reads in a few
words is here, and docs/generate.py says it the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from flask import Blueprint, Flask, current_app, render_template
from markupsafe import Markup, escape

from polar.admin.page import CSP
from polar.api.openapi import build

blueprint = Blueprint("docs", __name__)
LIMITS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


FIRST = ("tasks", "results", "sessions", "recorder", "policy", "weights", "nodes")
"""The order of a reader's interest; others follow."""


class Row(NamedTuple):
    """One field or parameter."""

    name: str
    kind: str
    default: str
    what: str


@blueprint.get("/docs")
def reference() -> tuple[str, int, dict[str, str]]:
    """The reference as a page."""
    headers = {"Content-Security-Policy": CSP, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin"}
    return _rendered(current_app._get_current_object()), 200, headers  # type: ignore[attr-defined]


@cache
def _rendered(app: Flask) -> str:
    # The document is made of the routes, which do not change while the app runs.
    document = build(app)
    schemas = document["components"]["schemas"]
    tags: dict[str, list[dict[str, Any]]] = {tag: [] for tag in FIRST}
    for path, operations in document["paths"].items():
        for method, each in operations.items():
            tags.setdefault(each["tags"][0], []).append({**each, "method": method.upper(), "path": path})
    return render_template(
        "docs.html",
        tags=tags,
        models={name: (each.get("description", ""), list(rows(each, schemas))) for name, each in schemas.items()},
        body=lambda each: each["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2],
        said=said,
        parameter=lambda each: Row(each["name"], each["in"], default(each["schema"]), each.get("description", "")),
    )


def rows(schema: Mapping[str, Any], others: Mapping[str, Any]) -> Iterator[Row]:
    """The fields of a model; one without a sentence has its own model's."""
    for name, each in schema.get("properties", {}).items():
        own = others.get(each.get("$ref", "").rpartition("/")[2], {})
        required = name in schema.get("required", ())
        what = str(each.get("description") or own.get("description", ""))
        yield Row(name, kind(each, _link, escape), "required" if required else default(each), what)


def said(text: str) -> Markup:
    """A sentence of the code, with what it quotes in backticks as code."""
    parts = (
        Markup("<code>{}</code>").format(part) if at % 2 else escape(part) for at, part in enumerate(text.split("`"))
    )
    return Markup("").join(parts)


def _link(name: str) -> Markup:
    return Markup('<a href="#{0}">{0}</a>').format(name)


def kind(schema: Mapping[str, Any], link: Callable[[str], str], word: Callable[[str], str]) -> str:
    """A property's type in a few words, with its limits; models by `link`, fixed words by `word`."""
    if "$ref" in schema:
        return link(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return _joined(dict.fromkeys(kind(each, link, word) for each in schema["anyOf"]))
    if "enum" in schema:
        return _joined(dict.fromkeys(word(str(each)) for each in schema["enum"]))
    if schema.get("type") == "array":
        return Markup("list of ") + kind(schema["items"], link, word) if schema.get("items") else "list"
    limits = [(sign, schema[key]) for key, sign in LIMITS.items() if key in schema]
    return " ".join([str(schema.get("type", "any")), *(f"{sign} {value:g}" for sign, value in limits)])


def _joined(parts: Mapping[str, None]) -> str:
    return Markup(" or ").join(Markup(each) for each in parts)


def default(schema: Mapping[str, Any]) -> str:
    """What holds where nothing is given."""
    found = schema.get("default")
    if found is None or found == {} or found == []:
        return "–"
    return "its defaults" if isinstance(found, dict) else str(found)
