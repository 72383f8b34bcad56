"""No body makes a dialect fail: it is read, or refused by the name of a field."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.dialects import DIALECTS
from polar.dialects.base import BadRequest, Dialect
from polar.messages import Answer, Message, ModelRequest, ToolCall
from polar.registry import load
from tests.unit.dialects.bodies import BODIES

ANSWERS = [
    Answer(
        "cmp-0123456789abcdef01234567",
        "m",
        Message("assistant", text, thought, calls),
        finish,
        prompt_tokens=3,
        completion_tokens=2,
        created=1,
        token_texts=("a", "☀"),
        logprobs=(-0.5, 0.0),
    )
    for text, thought, calls, finish in (
        ("", None, (), "length"),
        ("a ☀", "hm", (), "stop"),
        ("", "hm", (ToolCall("call_0123456789abcdef01234567_0", "look", '{"a": [1]}'),), "tool_calls"),
        ("a", None, (ToolCall("call_x_0", "unknown", "{}"), ToolCall("call_x_1", "look", '{"input": "b"}')), "stop"),
    )
]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=12)
    | st.sampled_from(
        ["", "user", "assistant", "tool", "text", "function", "custom", "auto", "call_x_0", "data:,", "x" * 99]
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], how: str, value: Any) -> Any:
    """The body with one place replaced, removed, doubled, or wrapped in a list."""
    body = copy.deepcopy(body)
    if not path:
        return value if isinstance(value, dict) else body
    parent: Any = body
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    if how == "remove":
        del parent[key]
    elif how == "wrap":
        parent[key] = [parent[key]]
    elif how == "double" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    else:
        parent[key] = value
    return body


def check(dialect: Dialect, body: dict[str, Any], params: dict[str, str]) -> None:
    """Read it, and answer it in every way; only a BadRequest may stop that."""
    try:
        dialect.cites(body)
        request = dialect.parse(body, params)
    except BadRequest as error:
        assert error.message
        assert 400 <= error.status < 500
        orjson.dumps(dialect.error(error.status, error.code or "invalid_request", error.message, field=error.field))
        return
    assert isinstance(request, ModelRequest)
    request.fingerprint()
    for message in request.messages:
        message.canonical()
        orjson.dumps(message.chat_form())
    for answer in ANSWERS:
        orjson.dumps(dialect.answer(request, [answer] * request.n))
        stream = dialect.open_stream(request, answer.id)
        assert [*stream.start(3), *stream.finish([answer] * request.n), *stream.last([answer] * request.n)]


@pytest.mark.parametrize("name", sorted(DIALECTS))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_change_of_a_good_body(name: str, data: st.DataObject) -> None:
    """Up to three places of a rich body hold something else."""
    dialect = load("dialect", DIALECTS, name, Dialect)()  # type: ignore[type-abstract]
    body, params = data.draw(st.sampled_from(BODIES[name]))
    body = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(body))))
        how = data.draw(st.sampled_from(["replace", "replace", "remove", "double", "wrap"]))
        body = changed(body, path, how, data.draw(VALUES))
    check(dialect, body, params)


@pytest.mark.parametrize("name", sorted(DIALECTS))
def test_good_bodies_are_read(name: str) -> None:
    """The bodies that the other test spoils are good ones."""
    dialect = load("dialect", DIALECTS, name, Dialect)()  # type: ignore[type-abstract]
    for body, params in BODIES[name]:
        assert dialect.parse(copy.deepcopy(body), params).messages
        check(dialect, body, params)
