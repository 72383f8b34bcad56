"""Prints the reward: 1.0 for the right number, else 0.0."""

import json
from pathlib import Path

stars = json.loads(Path("truth.json").read_text())["stars"]
answer = json.loads(Path("answer.json").read_text())["answer"] if Path("answer.json").exists() else ""
print(1.0 if answer.strip().rstrip(".") == str(stars) else 0.0)
