"""SWE-Gym's rows as Slime's prompts: JSON lines in, JSON lines out.

    python prepare_data.py swegym.jsonl train.jsonl [--image 'xingyaoww/sweb.eval.x86_64.{instance}:latest']

A row has instance_id, problem_statement, base_commit, test_patch, FAIL_TO_PASS and PASS_TO_PASS, as the dataset
publishes them; the whole row goes to the evaluator, the problem statement to the agent, and nothing else to either.
"""

import argparse
import json
from pathlib import Path

NEEDED = ("instance_id", "problem_statement", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")


def prompt_of(row: dict, image: str) -> dict:
    missing = [name for name in NEEDED if name not in row]
    if missing:
        raise SystemExit(f"{row.get('instance_id', 'a row')} has no {', '.join(missing)}; is this SWE-Gym?")
    name = image.format(instance=row["instance_id"].replace("__", "_s_").lower())
    return {"prompt": row["problem_statement"], "metadata": {"image": name, "instance": row}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--image", default="xingyaoww/sweb.eval.x86_64.{instance}:latest")
    given = parser.parse_args()
    rows = [json.loads(line) for line in given.source.read_text().split("\n") if line.strip()]
    given.target.write_text("".join(json.dumps(prompt_of(row, given.image)) + "\n" for row in rows))
    print(f"{len(rows)} prompts in {given.target}")


if __name__ == "__main__":
    main()
