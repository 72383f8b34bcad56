"""The same agent in Anthropic's messages: another wire, another program, and to the model the same conversation."""

import json
import os
import sys
from pathlib import Path
from urllib.request import Request, urlopen

TOOL = {
    "name": "lookup",
    "description": "Look a key up",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
MAX_TURNS = 3


def ask(messages):
    body = {"model": os.environ["ANTHROPIC_MODEL"], "messages": messages, "max_tokens": 32, "tools": [TOOL]}
    body["system"] = "Use the lookup tool."
    headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
    headers["anthropic-version"] = "2023-06-01"
    request = Request(os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages", json.dumps(body).encode(), headers)
    with urlopen(request) as answer:
        return json.load(answer)["content"]


def main():
    table = json.loads(os.environ["TABLE"])
    messages = [{"role": "user", "content": sys.argv[1]}]
    looked_up, text = [], ""
    for _ in range(MAX_TURNS):
        content = ask(messages)
        calls = [block for block in content if block["type"] == "tool_use"]
        if not calls:
            text = "".join(block["text"] for block in content if block["type"] == "text")
            break
        results = []
        for call in calls:
            asked = str(call["input"].get("key", ""))
            looked_up.append(asked)
            found = table.get(asked, "unknown key")
            results.append({"type": "tool_result", "tool_use_id": call["id"], "content": found})
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": results}]
    Path("answer.json").write_text(json.dumps({"looked_up": looked_up, "answer": text}))


main()
