"""A trivial agent: three model calls in one conversation, and a note of every answer that it has seen.

It tries again as the clients of model APIs do, but longer: a service that is killed takes seconds to come back. A key
that is refused ends it. Standard library only, because it runs outside the test process.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
import uuid
from typing import Any

TURNS = 3
ME = uuid.uuid4().hex[:12]
"""Of this process: in sandboxes, all have the same number."""
PAUSES = (0.2, 0.5, 1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 4.0)


def ask(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """One model call, with what is sent again when the service is away."""
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 64}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    for pause in (*PAUSES, None):
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429 or pause is None:
                sys.exit(f"answered {error.code}: {error.read()!r}")
        except (OSError, http.client.HTTPException, ValueError):
            if pause is None:
                raise
        time.sleep(pause)
    raise AssertionError("the last round returns or raises")


def note(turn: int, answer: dict[str, Any]) -> None:
    """Keep what was seen where the suite finds it: in a folder, or behind an address where no folder is shared."""
    where, name = os.environ["CHAOS_SEEN"], f"{os.environ['SESSION_ID']}.{ME}.jsonl"
    text = json.dumps({"turn": turn, "id": answer["id"]}) + "\n"
    if where.startswith("http"):
        urllib.request.urlopen(urllib.request.Request(f"{where}{name}", text.encode()), timeout=60).close()
    else:
        with open(os.path.join(where, name), "a", encoding="utf-8") as file:
            file.write(text)


def main() -> None:
    """Count to three."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
    for turn in range(TURNS):
        answer = ask(messages)
        note(turn, answer)
        messages += [answer["choices"][0]["message"], {"role": "user", "content": f"and after {turn}?"}]


if __name__ == "__main__":
    main()
