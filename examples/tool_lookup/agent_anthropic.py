"""The same agent on the `anthropic` package: another wire format, and to the model the same conversation.

Asks the model to find a key, runs the tool it calls, and writes down what the model finally answers.
"""

import json
import os
import random
import sys
from pathlib import Path

from anthropic import Anthropic

TOOL = {
    "name": "lookup",
    "description": "Look a key up",
    "input_schema": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
MAX_TURNS = 4


def main() -> None:
    key = random.choice("abcdefgh")
    table = {letter: f"{random.randrange(100):02d}" for letter in "abcdefgh"}
    Path("truth.json").write_text(json.dumps({"key": key, "value": table[key]}))
    client = Anthropic(max_retries=2)
    messages = [{"role": "user", "content": f"find {key}"}]
    looked_up = []
    for _ in range(MAX_TURNS):
        answer = client.messages.create(
            model=os.environ["ANTHROPIC_MODEL"],
            system="Use the lookup tool.",
            messages=messages,
            tools=[TOOL],
            max_tokens=48,
        )
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            text = "".join(block.text for block in answer.content if block.type == "text")
            Path("answer.json").write_text(json.dumps({"looked_up": looked_up, "answer": text}))
            print(f"find {key}: looked up {looked_up}, answered {text!r}")
            return
        results = []
        for call in calls:
            asked = str(call.input.get("key", ""))
            looked_up.append(asked)
            results.append({"type": "tool_result", "tool_use_id": call.id, "content": table.get(asked, "unknown key")})
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    sys.exit("the model never answered")


main()
