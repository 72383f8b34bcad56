"""Reward over steps, one line a seed, as reward.svg and reward.png beside this file.

python plot.py seed1.json seed2.json seed3.json      files that `train.py --out` wrote
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "reward"  # the same figures give the same file
from matplotlib import pyplot  # noqa: E402

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Draw, and print the means that the README has."""
    figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
    kept = HERE / "reward.json"
    if sys.argv[1:]:
        runs = [json.loads(Path(name).read_text()) for name in sys.argv[1:]]
        rewards_of = {run["seed"]: [round(step["reward"], 4) for step in run["steps"]] for run in runs}
        kept.write_text(json.dumps(rewards_of) + "\n")
    for seed, rewards in json.loads(kept.read_text()).items():
        first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
        print(f"| {seed} | {len(rewards)} | {first:.2f} | {last:.2f} | {max(rewards):.2f} |")
        axes.plot(range(len(rewards)), rewards, marker="o", markersize=3, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="mean reward of 48 sessions", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(HERE / "reward.svg", metadata={"Date": None})
    figure.savefig(HERE / "reward.png", dpi=120)


if __name__ == "__main__":
    main()
