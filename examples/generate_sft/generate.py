"""Data to learn from, made offline: sample many, keep what an evaluator accepts, export, and check the tokens.

Talks to a Polar that runs (`polar up`); what is exported, and how, is `polar.exporting`'s affair.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar.client import Client
from polar.exporting import Filters, Rejection, Split, export
from polar.messages import Message, Tool
from polar.renderers import for_folder

HERE = Path(__file__).resolve().parent
KEYS = "abcdefgh"


def tasks(run: str, groups: int, size: int, seed: int) -> Iterator[dict[str, Any]]:
    """A task for each prompt; its sessions are the attempts of which the accepted are kept."""
    rng = random.Random(seed)
    for number in range(groups):
        table = {key: f"{rng.randrange(100):02d}" for key in KEYS}
        key = rng.choice(KEYS)
        files = [{"type": "upload_file", "source": str(HERE / "agent.py"), "target": "agent.py"}]
        yield {
            "task_id": f"{run}-{number}",
            "instruction": f"find {key}",
            "num_samples": size,
            "timeout_seconds": 120,
            "agent": {
                "harness": "shell",
                "custom_shell": {"command": "python -S agent.py {{instruction}}"},
                "env": {"TABLE": json.dumps(table)},
            },
            "runtime": {"backend": "local", "prepare": files},
            "sampling": {"temperature": 1.0},
            "builder": {"strategy": "prefix_merging"},
            "evaluator": {
                "strategy": "command",
                "config": {"command": 'test "$(cat answer.txt)" = "$VALUE"'},
                "env": {"VALUE": table[key]},
            },
            "lanes": ["gpu0"],
        }


def rendered_alike(path: Path, tokenizer: Path) -> tuple[int, int]:
    """Of how many rows the messages, rendered as a trainer on text would, are the very tokens of the row.

    The last turn's close is the template's own and was never sampled, so the row must be how the rendering begins."""
    renderer, alike, count = for_folder(tokenizer), 0, 0
    for row in map(json.loads, path.read_text().splitlines()):
        messages = tuple(Message.from_chat_form(each) for each in row["messages"])
        tools = tuple(Tool(each["function"]["name"], raw=each["function"]) for each in row["tools"] or ())
        alike += renderer.render(messages, tools)[: len(row["input_ids"])] == row["input_ids"]
        count += 1
    return alike, count


def main() -> None:
    """Sample, keep, export, check."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default=os.environ.get("POLAR_URL", "http://127.0.0.1:8080"))
    parser.add_argument("--groups", type=int, default=12, help="prompts")
    parser.add_argument("--size", type=int, default=4, help="attempts at each")
    parser.add_argument("--keep", type=int, default=2, help="accepted attempts of each that are kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(".polar/sft"))
    args = parser.parse_args()
    key_file = Path(os.environ.get("POLAR_HOME", ".polar")) / "api_key"
    key = os.environ.get("POLAR_API_KEY") or (key_file.read_text().strip() if key_file.exists() else None)
    with Client(args.url, key) as client:
        run, start = f"sft-{uuid.uuid4().hex[:8]}", client.feed_end()
        rewards = [each.reward for each in client.run(tasks(run, args.groups, args.size, args.seed), progress=True)]
        done = export(
            lambda full: client.results(after=start, full=full),
            args.out,
            Rejection(args.seed, keep=args.keep),
            filters=Filters(min_reward=1.0, tasks=(f"{run}-*",)),
            split=Split.read("train=0.8,test=0.2", args.seed),
        )
        nodes = client.request("GET", "/rollout/status")["nodes"]["nodes"]
        passport = next(lane["passport"] for node in nodes for lane in node["lanes"] if lane["name"] == "gpu0")
    accepted = sum(reward == 1.0 for reward in rewards)
    print(f"{len(rewards)} attempts at {args.groups} prompts, {accepted} accepted, {done.rows} kept")
    for name, split in done.splits.items():
        alike, count = rendered_alike(args.out / split["file"], Path(passport["tokenizer"]))
        print(f"{name}: {count} rows of {split['groups']} groups, {split['tokens']} tokens; {alike} render the same")


if __name__ == "__main__":
    main()
