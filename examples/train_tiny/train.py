"""Mini GRPO on a CPU: a trainer in one file, with rollouts by Polar. What it leaves to others: starting Polar
(`serving`), the model's code and its tokenizer (polar.tiny_engine.train), plots (`plot`).

A step: tasks to Polar → results as they end → samples and advantages → clipped policy gradient → weights on disk →
one push, which closes the gate, has the engine load them, and holds it to log-probabilities that the trainer computed.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from serving import LANE, OwnPolar
from tokenizers import Tokenizer
from torch.nn import functional

import polar.tiny_engine.train as tiny
from polar.client import Client
from polar.tiny_engine import lookup
from polar.trainers import Sample, advantages, samples_of, staleness, token_weights

HERE = Path(__file__).resolve().parent
PACKAGED = Path(tiny.__file__).parent / "model"
AGENTS = ("agent_chat.py", "agent_messages.py")
COLUMNS = ("step", "reward", "loss", "ratio", "gap", "updates", "traces", "roll-outs s", "train s", "push s")


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the tiny model on rollouts that Polar serves.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--groups", type=int, default=8, help="prompts a step")
    parser.add_argument("--size", type=int, default=6, help="sessions a prompt")
    parser.add_argument("--epochs", type=int, default=2, help="times that a step's traces are gone over")
    parser.add_argument("--batch", type=int, default=48, help="traces an update")
    parser.add_argument("--lr", type=float, default=7e-4)
    parser.add_argument("--clip", type=float, default=0.2)
    parser.add_argument("--spoil", type=int, default=6, help="supervised steps on wrong labels before step 0")
    parser.add_argument("--builder", default="prefix_merging", choices=("prefix_merging", "per_request"))
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--token-mode", dest="mode", action="store_const", const="token", default="token")
    mode.add_argument("--canonical", dest="mode", action="store_const", const="canonical")
    parser.add_argument("--url", help="a Polar that runs, instead of one of this example's own; its lane: --lane")
    parser.add_argument("--key", help="its API key, with the scope admin")
    parser.add_argument("--lane", default=LANE)
    parser.add_argument("--home", type=Path, default=Path(".polar/train_tiny"))
    parser.add_argument("--out", type=Path, help="write each step's figures here, as JSON")
    return parser.parse_args(argv)


class Trainer:
    """The policy's weights, and how they change."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args, self.net = args, tiny.TorchQwen3()
        weights = load_file(PACKAGED / "model.safetensors")
        self.net.load_state_dict({name.removeprefix("model."): value.float() for name, value in weights.items()})
        self.rng = random.Random(args.seed)
        self._spoil()
        self.optimiser = torch.optim.Adam(self.net.parameters(), lr=args.lr)

    def _spoil(self) -> None:
        """The packaged model is right two times in three: unlearn keys and digits, and keep the form."""
        tokenizer = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
        optimiser = torch.optim.Adam(self.net.parameters(), lr=5e-4)
        for _ in range(self.args.spoil):
            inputs, targets = tiny.make_batch(tokenizer, self.rng, 32, noise=0.8)
            loss = functional.cross_entropy(self.net(inputs).flatten(0, 1), targets.flatten(), ignore_index=-100)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def logprobs(self, samples: list[Sample]) -> torch.Tensor:
        """[B, T] of each response token given all before it; rows begin where responses do, zeros after their ends."""
        width = max(len(each) for each in samples)
        ids = torch.zeros(len(samples), width, dtype=torch.long)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample)] = torch.from_numpy(sample.ids)
        every = self.net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        starts = [len(each.prompt_ids) - 1 for each in samples]
        rows = [row[at : at + len(each.response_ids)] for row, at, each in zip(every, starts, samples, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def step(self, samples: list[Sample], progress: float) -> dict[str, float]:
        """As many updates as there are batches. The gap and the ratio are those of the weights that sampled.

        The rate falls as the run progresses: gradients get small, and Adam would take steps as large as ever."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.args.lr * (1 - 0.9 * progress)
        with torch.no_grad():
            now, then, mask = self.logprobs(samples), _padded(samples, "logprobs"), _padded(samples, "loss_mask") > 0
            apart = (now - then)[mask]
        figures = {"gap": apart.abs().max().item(), "ratio": apart.exp().mean().item(), "loss": 0.0, "updates": 0}
        figures["ratio_spread"] = (apart.exp() - 1).abs().max().item()
        advantages(samples, "group_mean")
        # Batches of about the same size: a last one of a single trace would be a step of full length for one session.
        batches = max(1, round(len(samples) / self.args.batch))
        for _ in range(self.args.epochs):
            self.rng.shuffle(samples)
            for first in range(batches):
                figures["loss"] += self._update(samples[first::batches])
                figures["updates"] += 1
        return figures

    def _update(self, batch: list[Sample]) -> float:
        weights = torch.nn.utils.rnn.pad_sequence(
            [torch.from_numpy(each) for each in token_weights(batch)], batch_first=True
        )
        advantage = torch.tensor([each.advantage for each in batch])[:, None]
        ratio = torch.where(weights > 0, self.logprobs(batch) - _padded(batch, "logprobs"), 0.0).exp()
        clipped = ratio.clamp(1 - self.args.clip, 1 + self.args.clip)
        loss = -(weights * torch.minimum(ratio * advantage, clipped * advantage)).sum()
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        return loss.item()

    def save(self, folder: Path) -> Path:
        """A checkpoint as the engine reads it, in full precision."""
        shutil.copytree(PACKAGED, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
        save_file({f"model.{name}": value for name, value in self.net.state_dict().items()}, folder / "new")
        (folder / "new").replace(folder / "model.safetensors")
        return folder

    def probe(self, prompt_ids: list[int], output_ids: list[int]) -> dict[str, Any]:
        """What the weights of now say of these tokens; every engine has to say so after a push."""
        with torch.no_grad():
            ids = torch.tensor([prompt_ids + output_ids])
            every = self.net(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        found = every[len(prompt_ids) - 1 :].tolist()
        return {"prompt_ids": prompt_ids, "output_ids": output_ids, "logprobs": found}


def _padded(samples: list[Sample], name: str) -> torch.Tensor:
    rows = [torch.from_numpy(np.asarray(getattr(each, name), np.float32)) for each in samples]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def tasks(args: argparse.Namespace, step: int, version: int) -> Iterator[dict[str, Any]]:
    """A step's prompt groups, one task each; every other one is run by the other program, on the other wire."""
    rng = random.Random(f"{args.seed} {step}")
    for number in range(args.groups):
        table = {key: f"{rng.randrange(100):02d}" for key in lookup.KEYS}
        key, agent = rng.choice(lookup.KEYS), AGENTS[number % len(AGENTS)]
        command = f"python -S {agent} {{{{instruction}}}}"
        yield {
            "task_id": f"tiny-{args.seed}-{step}-{number}-{uuid.uuid4().hex[:6]}",
            "instruction": f"find {key}",
            "num_samples": args.size,
            "timeout_seconds": 120,
            "agent": {
                "harness": "shell",
                "custom_shell": {"command": command},
                "env": {"TABLE": json.dumps(table)},
            },
            "runtime": {
                "backend": "local",
                "prepare": [
                    {"type": "upload_file", "source": str(HERE / name), "target": name} for name in (agent, "judge.py")
                ],
            },
            "sampling": {"temperature": 1.0},
            "builder": {"strategy": args.builder},
            "evaluator": {
                "strategy": "command",
                "config": {"command": "python -S judge.py", "reward_from": "stdout"},
                "env": {"KEY": key, "VALUE": table[key]},
            },
            "metadata": {"group_id": f"{args.seed}-{step}", "policy_version": version},
            "max_staleness": 0,
            "lanes": [args.lane],
        }


class Run:
    """One seed, step after step."""

    def __init__(self, args: argparse.Namespace, client: Client, progress: Progress) -> None:
        self.args, self.client, self.progress = args, client, progress
        self.bar = progress.add_task("sessions", total=args.steps * args.groups * args.size)
        self.trainer = Trainer(args)
        # A Polar that has a version goes on counting: staleness is compared by these numbers.
        known = client.policy().version
        self.version = int(known) + 1 if known is not None else 0
        sample = lookup.Episode("c", "42")
        tokenizer = Tokenizer.from_file(str(PACKAGED / "tokenizer.json"))
        texts = (sample.first_prompt(), sample.call())
        self.probed = tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in texts)

    def push(self) -> float:
        """New weights on the engine. Returns the seconds; raises ApiError if the engine does not agree."""
        began = time.monotonic()
        folder = self.trainer.save(self.args.home / "checkpoint").resolve()
        self.client.push(self.version, str(folder), lanes=[self.args.lane], probe=self.trainer.probe(*self.probed))
        return time.monotonic() - began

    def step(self, step: int) -> dict[str, Any]:
        """Rollouts, updates, push."""
        began = time.monotonic()
        results = []
        for result in self.client.run(tasks(self.args, step, self.version), group=f"{self.args.seed}-{step}"):
            results.append(result)
            self.progress.advance(self.bar)
        rollouts = time.monotonic() - began
        samples = [sample for result in results for sample in samples_of(result)]
        self._check(samples)
        rewards = [0.0 if result.reward is None else result.reward for result in results]
        figures: dict[str, Any] = {
            "step": step,
            "reward": sum(rewards) / len(rewards),
            "traces": len(samples),
            "rollouts": rollouts,
        }
        figures["dialects"] = sorted({str(result.trajectory.metadata.get("api_type")) for result in results})
        figures["sessions"] = len({sample.session_id for sample in samples})
        figures["tokens"] = sum(len(sample) for sample in samples)
        began, used = time.monotonic(), time.process_time()
        figures |= self.trainer.step(samples, step / self.args.steps)
        figures |= {"train": time.monotonic() - began, "train_cpu": time.process_time() - used}
        self.version += 1
        return figures | {"push": self.push()}

    def _check(self, samples: list[Sample]) -> None:
        """Every trained token was sampled by the weights of now, behind exactly the prefix that its trace shows."""
        fidelity = Counter(sample.fidelity for sample in samples)
        behind = Counter(staleness(sample, self.version) for sample in samples)
        if behind.keys() - {0} or (self.args.mode == "token" and fidelity.keys() - {"exact"}):
            raise SystemExit(f"samples that must not train: versions behind {dict(behind)}, fidelity {dict(fidelity)}")


def train(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    """Every step's figures."""
    torch.set_num_threads(1)  # the other processor is for the agents
    here = nullcontext(Client(args.url, args.key)) if args.url else OwnPolar(args.home, PACKAGED, mode=args.mode)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with here as client, Progress(*columns, console=console) as progress:
        run = Run(args, client, progress)
        run.push()
        progress.console.print("  ".join(COLUMNS))
        found = []
        for step in range(args.steps):
            found.append(run.step(step))
            progress.console.print(row(found[-1]))
            if args.out:
                args.out.write_text(json.dumps({"seed": args.seed, "steps": found}) + "\n")
    return found


def row(figures: dict[str, Any]) -> str:
    """A step in a line, under COLUMNS."""
    f = figures
    cells = (f"{f['step']}", f"{f['reward']:.3f}", f"{f['loss']:+.2f}", f"{f['ratio']:.3f}", f"{f['gap']:.0e}")
    cells += (f"{f['updates']:.0f}", f"{f['traces']}", f"{f['rollouts']:.1f}", f"{f['train']:.1f}", f"{f['push']:.1f}")
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True))


def main() -> None:
    """Train one seed, and say what became of the reward."""
    args, console, began = arguments(), Console(highlight=False), time.monotonic()
    found = train(args, console)
    rewards = [figures["reward"] for figures in found]
    first, last = (sum(part) / len(part) for part in (rewards[:5], rewards[-5:]))
    console.print(f"seed {args.seed}: reward {first:.2f} in the first five steps, {last:.2f} in the last five")
    console.print(f"largest gap between trainer and engine {max(each['gap'] for each in found):.1e}")
    console.print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
