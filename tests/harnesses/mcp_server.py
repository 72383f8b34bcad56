"""A tool server over standard input and output with one tool, for harnesses to find; it needs nothing installed."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL = {
    "name": "fetch_password",
    "description": "Say the secret word of this test.",
    "inputSchema": {"type": "object", "properties": {}},
}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    """The result of a call."""
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "s", "version": "1"}}
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "marmalade"}]}
    return {}


def main() -> None:
    """Answer until the other side hangs up."""
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message and "method" in message:
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)


if __name__ == "__main__":
    main()
