"""How deep JSON may be, and what of values reaches a log line."""

from __future__ import annotations

import ast
from pathlib import Path

import orjson
import pytest

from polar import log
from polar.nesting import DEEPEST, too_deep
from polar.proxy.door import parse_body

ROOT = Path(__file__).parents[2]


def nested(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


@pytest.mark.parametrize(("levels", "refused"), [(1, False), (DEEPEST, False), (DEEPEST + 3, True), (1000, True)])
def test_nesting_has_an_end(levels: int, refused: bool) -> None:
    """What is taken can be written again inside more JSON; what is refused need not be."""
    value = orjson.loads(nested(levels))
    assert too_deep(value) is refused
    if not refused:
        orjson.dumps([[[[value]]]])


@pytest.mark.parametrize("body", [nested(300), b"[" * 200_000, b'{"a":' * 200_000, nested(5000)])
def test_a_nested_body_is_a_bad_request(body: bytes) -> None:
    """Whatever its depth, the proxy's reader says what is wrong and no stack runs over."""
    with pytest.raises(Exception, match="nested|not valid JSON"):
        parse_body(body)


def test_a_value_cannot_begin_a_line_of_the_log() -> None:
    """Line ends and terminal codes in what a client sent are escaped."""
    written = log.line("request", path="/x\n12:00:00 INFO forged\x1b[2J\r")
    assert written.isprintable()
    assert "\\x0a12:00:00" in written


def test_secrets_are_not_compared_with_equals() -> None:
    """No `==` in the source has a key, secret or signature on either side: keys are looked up by their hash,
    and what must be compared is compared by hmac.compare_digest."""
    found = []
    for path in sorted([*(ROOT / "polar").rglob("*.py"), *(ROOT / "workers").glob("*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                names = {ast.unparse(side).lower().rpartition(".")[2] for side in (node.left, *node.comparators)}
                if names & {"api_key", "secret", "webhook_secret", "signature", "password"}:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert found == []
