"""What the dialects of OpenAI's API share: where the key stands, the shape of errors, the list of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polar.dialects.base import BadRequest

ERROR_TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


def secret(headers: Mapping[str, str]) -> str | None:
    """The key where OpenAI's clients put it, or Azure's."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("api-key")


def error(status: int, code: str, message: str, field: str | None) -> dict[str, Any]:
    """The error body."""
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


def models(kind: str, known: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
    """The body of `models` and `model`. Raises BadRequest (404)."""
    cards = [
        {
            "id": model["id"],
            "object": "model",
            "created": 0,
            "owned_by": "polar",
            "max_model_len": model["context_length"],
        }
        for model in known
    ]
    if kind == "models":
        return {"object": "list", "data": cards}
    for card in cards:
        if card["id"] == params["model"]:
            return card
    names = ", ".join(card["id"] for card in cards)
    message = f"there is no model {params['model']!r} here; there is {names}"
    raise BadRequest(message, field="model", code="model_not_found", status=404)
