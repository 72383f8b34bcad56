"""Prints the reward: 1.0 for the right answer, 0.2 for the right call only, else 0.0. The agent never sees KEY."""

import json
import os
from pathlib import Path

found = json.loads(Path("answer.json").read_text()) if Path("answer.json").exists() else {"looked_up": [], "answer": ""}
called = os.environ["KEY"] in found["looked_up"]
print(1.0 if called and found["answer"].strip() == os.environ["VALUE"] else 0.2 if called else 0.0)
