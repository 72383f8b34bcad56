"""An agent on the `openai` package: it knows a base URL, a key and a tool, and nothing of Polar.

Asks the model to find a key, runs the tool it calls, and writes down what the model finally answers.
"""

import json
import os
import random
import sys
from pathlib import Path

from openai import OpenAI

TOOL = {
    "name": "lookup",
    "description": "Look a key up",
    "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
}
MAX_TURNS = 4


def main() -> None:
    key = random.choice("abcdefgh")
    table = {letter: f"{random.randrange(100):02d}" for letter in "abcdefgh"}
    Path("truth.json").write_text(json.dumps({"key": key, "value": table[key]}))
    client = OpenAI(max_retries=2)
    messages = [{"role": "system", "content": "Use the lookup tool."}, {"role": "user", "content": f"find {key}"}]
    looked_up = []
    for _ in range(MAX_TURNS):
        answer = client.chat.completions.create(
            model=os.environ["OPENAI_MODEL"],
            messages=messages,
            tools=[{"type": "function", "function": TOOL}],
            max_tokens=48,
        )
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            Path("answer.json").write_text(json.dumps({"looked_up": looked_up, "answer": message.content or ""}))
            print(f"find {key}: looked up {looked_up}, answered {message.content!r}")
            return
        for call in message.tool_calls:
            asked = str(json.loads(call.function.arguments).get("key", ""))
            looked_up.append(asked)
            result = table.get(asked, "unknown key")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    sys.exit("the model never answered")


main()
