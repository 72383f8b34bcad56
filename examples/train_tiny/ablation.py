"""Two comparisons of the paper in small: how completions become traces, and who renders the prompts.

Each row is a run of `train` with the same seed on a Polar of its own. Takes the flags of train.py.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from train import arguments, train

ROWS = (("prefix_merging", "token"), ("per_request", "token"), ("prefix_merging", "canonical"))


def main() -> None:
    """Run every row, then print the table."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    table = Table("builder", "mode", "traces", "updates", "tokens", "trainer CPU s", "wall s", "reward", "ratio off by")
    for builder, mode in ROWS:
        args = arguments(["--builder", builder, *sys.argv[1:]])
        args.mode, args.home = mode, Path(args.home) / f"{builder}-{mode}"
        console.print(f"{builder}, {mode} mode")
        began = time.monotonic()
        steps = train(args, console)
        wall = time.monotonic() - began
        total = {name: sum(step[name] for step in steps) for name in ("traces", "updates", "tokens", "train_cpu")}
        rewards = [step["reward"] for step in steps]
        table.add_row(
            builder,
            mode,
            f"{total['traces']}",
            f"{total['updates']:.0f}",
            f"{total['tokens']:,}",
            f"{total['train_cpu']:.1f}",
            f"{wall:.0f}",
            f"{rewards[0]:.2f} → {sum(rewards[-2:]) / len(rewards[-2:]):.2f}",
            f"{max(step['ratio_spread'] for step in steps):.0e}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
