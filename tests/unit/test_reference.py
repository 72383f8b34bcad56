"""The reference is what the code is: pages written from it, and an OpenAPI document of every route."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from openapi_spec_validator import validate

from polar.api import create_app, openapi
from polar.api.described import OPERATIONS
from polar.remedies import REMEDIES
from polar.settings import Settings
from tests.fakes.dispatcher import FakeDispatcher

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def app() -> Flask:
    """The API, without a database."""
    return create_app(Settings(database_url="postgresql+psycopg://nobody@127.0.0.1/none"), FakeDispatcher())


def test_the_document_is_openapi(app: Flask) -> None:
    """It validates against OpenAPI 3.1, and anybody may read it."""
    with app.test_client() as client:
        answer = client.get("/openapi.json")
    validate(answer.json)
    submit = answer.json["paths"]["/rollout/task/submit"]["post"]
    assert submit["x-polar-scope"] == "submit"
    assert submit["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/TaskRequest"
    }
    fields = answer.json["components"]["schemas"]["TaskRequest"]["properties"]
    assert all(each.get("description") or each.get("$ref") for each in fields.values())


def test_every_route_is_in_the_document(app: Flask) -> None:
    """Every route of the REST API is described, and nothing else is; each has a sentence."""
    pages = ("static", "admin.", "front", "docs.")
    routes = {rule.endpoint for rule in app.url_map.iter_rules() if not rule.endpoint.startswith(pages)}
    assert routes == OPERATIONS.keys()
    for operations in openapi.build(app)["paths"].values():
        assert all(each["summary"] for each in operations.values())


def test_the_page_has_all_of_it(app: Flask) -> None:
    """/docs is open to all, and has every operation, model and error code where a link can lead."""
    with app.test_client() as client:
        answer = client.get("/docs")
    assert answer.status_code == 200 and "default-src 'self'" in answer.headers["Content-Security-Policy"]
    document = openapi.build(app)
    ids = set(re.findall(r' id="([^"]+)"', answer.text))
    operations = {each["operationId"] for path in document["paths"].values() for each in path.values()}
    assert operations | document["components"]["schemas"].keys() | REMEDIES.keys() <= ids
    assert {link[1:] for link in re.findall(r'href="(#[^"]+)"', answer.text)} <= ids
    assert "&lt;a " not in answer.text and "&amp;lt;" not in answer.text


def test_described_parameters_are_those_that_are_read() -> None:
    """The query parameters of each operation are exactly those that its module reads."""
    described: dict[str, set[str]] = {}
    for endpoint, each in OPERATIONS.items():
        described.setdefault(endpoint.partition(".")[0], set()).update(each.query)
    for name, expected in described.items():
        assert read_names(name) == expected, name


def read_names(module: str) -> set[str]:
    """Names that a module of the API asks the query for."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"polar/api/{module}.py").read_text())):
        if not isinstance(node, ast.Call):
            continue
        called: Any = node.func
        if isinstance(called, ast.Name) and called.id == "view_is_full":
            found.add("view")
        elif ast.unparse(called) in ("number", "request.args.get") and isinstance(node.args[0], ast.Constant):
            found.add(str(node.args[0].value))
    return found


def test_every_error_code_has_a_remedy() -> None:
    """The codes of the source are exactly those of the table; each says in sentences what it means and what to do."""
    codes = runpy.run_path(str(ROOT / "docs/generate.py"))["raised"]()
    assert len(codes) > 90
    assert codes.keys() == REMEDIES.keys(), codes.keys() ^ REMEDIES.keys()
    for code, remedy in REMEDIES.items():
        assert all(
            text[0].isupper() or text.startswith(("pip", "answer_file", "skills_path", "task_dir")) for text in remedy
        ), code
        assert all(text.endswith((".", ":")) and len(text.split()) > 2 for text in remedy), code


def test_the_reference_is_up_to_date() -> None:
    """docs/reference is what docs/generate.py writes; `make docs` writes it anew."""
    pages = runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]()
    for name, text in pages.items():
        assert (ROOT / "docs/reference" / name).read_text() == text.rstrip() + "\n", name
