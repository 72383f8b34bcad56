"""`GET /openapi.json`: the REST API as an OpenAPI 3.1 document, made from the routes themselves.

Paths, sentences and scopes come from the app, bodies from the typed requests, the rest from `described`.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import Any

from flask import Blueprint, Flask, Response, current_app, jsonify
from pydantic.json_schema import models_json_schema
from werkzeug.routing import Rule

from polar import __version__
from polar.api.auth import OPEN_PATHS, scope_of
from polar.api.described import OPERATIONS, Described

blueprint = Blueprint("openapi", __name__)
PROBLEM = {
    "type": "object",
    "description": "RFC 9457: what went wrong, and with which field.",
    "required": ["type", "title", "status", "code", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "description": "For programs."},
        "detail": {"type": "string", "description": "For people: the reason, and what to do."},
        "errors": {
            "type": "array",
            "description": "One for each wrong field.",
            "items": {
                "type": "object",
                "required": ["field", "reason"],
                "properties": {"field": {"type": "string"}, "reason": {"type": "string"}},
            },
        },
    },
}
TEMPLATE = "#/components/schemas/{model}"


@blueprint.get("/openapi.json")
def document() -> Response:
    """This document."""
    return jsonify(build(current_app))


def build(app: Flask) -> dict[str, Any]:
    """The document of the app's routes."""
    bodies = sorted({each.body for each in OPERATIONS.values() if each.body}, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in bodies], ref_template=TEMPLATE)
    paths: dict[str, dict[str, Any]] = {}
    for rule in sorted(app.url_map.iter_rules(), key=lambda each: each.rule):
        found = OPERATIONS.get(rule.endpoint)
        if found is None:
            continue
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            paths.setdefault(path, {})[method.lower()] = _operation(app, rule, method, found)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Polar", "version": __version__, "summary": "Rollouts as a service."},
        "paths": paths,
        "components": {
            "schemas": {"Problem": PROBLEM, **schemas["$defs"]},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."},
                "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "An API key."},
            },
        },
    }


def _operation(app: Flask, rule: Rule, method: str, found: Described) -> dict[str, Any]:
    view = app.view_functions[rule.endpoint]
    sentence, _, more = " ".join((view.__doc__ or "").split()).partition(". ")
    answer: dict[str, Any] = {
        "operationId": rule.endpoint.replace(".", "_"),
        "tags": [rule.endpoint.partition(".")[0]],
        "summary": sentence.rstrip("."),
        "parameters": [*_path_parameters(rule), *_parameters(found)],
        "responses": {"200": {"description": "OK", "content": {kind: {} for kind in found.media_types}}},
    }
    if more:
        answer["description"] = more
    if found.body is not None:
        schema = {"$ref": TEMPLATE.format(model=found.body.__name__)}
        answer["requestBody"] = {"required": found.body_required, "content": {"application/json": {"schema": schema}}}
    closed = rule.rule not in OPEN_PATHS
    if closed:
        scope = scope_of(method, rule.rule)
        answer["security"] = [{"bearer": [scope]}, {"header": [scope]}]
        answer["x-polar-scope"] = scope
    for code in sorted({*found.errors, *((401, 403) if closed else ()), 500}):
        answer["responses"][str(code)] = {
            "description": HTTPStatus(code).phrase,
            "content": {"application/problem+json": {"schema": {"$ref": TEMPLATE.format(model="Problem")}}},
        }
    return answer


def _path_parameters(rule: Rule) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in sorted(rule.arguments)
    ]


def _parameters(found: Described) -> list[dict[str, Any]]:
    return [
        *(
            {"name": name, "in": "query", "required": False, "schema": schema, "description": text}
            for name, (schema, text) in found.query.items()
        ),
        *(
            {"name": name, "in": "header", "required": False, "schema": {"type": "string"}, "description": text}
            for name, text in found.headers.items()
        ),
    ]
