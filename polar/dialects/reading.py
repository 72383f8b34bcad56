"""Reading typed fields out of a harness's JSON, so that each refusal names the field and what was expected.

Knows no dialect. Null is read as absent everywhere, as providers do.
"""

from __future__ import annotations

from typing import Any

from polar.dialects.base import BadRequest

ANY_OBJECT = '{"type":"object"}'
"""The JSON schema of "answer in JSON"."""


def wrong(field: str, reason: str) -> BadRequest:
    """The refusal of one field."""
    return BadRequest(f"{field}: {reason}", field=field)


def number(body: dict[str, Any], name: str, low: float, high: float) -> float | None:
    """A number within bounds."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(name, "must be a number")
    if not low <= value <= high:
        raise wrong(name, f"must be between {low:g} and {high:g}")
    return float(value)


def integer(body: dict[str, Any], name: str, low: int, high: int) -> int | None:
    """A whole number within bounds."""
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(name, "must be a whole number")
    if not low <= value <= high:
        raise wrong(name, f"must be between {low} and {high}")
    return value


def flag(body: dict[str, Any], name: str) -> bool:
    """A boolean; absent is false."""
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise wrong(name, "must be true or false")
    return value


def string(value: Any, field: str) -> str:
    """A text; absent is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong(field, "must be a string")
    return value


def required(body: dict[str, Any], name: str, before: str = "") -> str:
    """A text that must be there; `before` is what comes before its name in the path of the field."""
    value = string(body.get(name), before + name)
    if not value:
        raise wrong(before + name, "is missing")
    return value


def listed(value: Any, field: str) -> list[Any]:
    """A list; absent is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong(field, "must be a list")
    return value


def mapping(value: Any, field: str) -> dict[str, Any]:
    """An object that must be there."""
    if not isinstance(value, dict):
        raise wrong(field, "must be an object")
    return value
