"""Prints the reward: 1.0 for the right answer, 0.2 for the right call only, else 0.0."""

import json
from pathlib import Path

truth = json.loads(Path("truth.json").read_text())
found = json.loads(Path("answer.json").read_text()) if Path("answer.json").exists() else {"looked_up": [], "answer": ""}
called = truth["key"] in found["looked_up"]
print(1.0 if called and found["answer"].strip() == truth["value"] else 0.2 if called else 0.0)
