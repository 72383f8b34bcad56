"""Submits a task for each instance of a SWE-bench dataset: the three that lie here, or those of SWE-bench Verified.

    python examples/swebench_verified/submit.py                 # the three that lie here, in bubblewrap, scripted
    python examples/swebench_verified/submit.py --verified 8    # eight of SWE-bench Verified, in their Docker images

Exits with 0 only if every task completed.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

HERE = Path(__file__).parent
VERIFIED = "SWE-bench/SWE-bench_Verified"


def ours(dataset: Path) -> list[dict]:
    """A task for each instance that lies here, after task.yaml."""
    model = yaml.safe_load((HERE / "task.yaml").read_text())
    tasks = []
    for instance in map(json.loads, dataset.read_text().splitlines()):
        name = instance["instance_id"]
        task = copy.deepcopy(model)
        task["task_id"] = f"swebench-{name.replace('__', '-')}"
        task["instruction"] = f"{instance['problem_statement']} The repository is in /testbed. Repair it."
        task["runtime"]["prepare"][0]["source"] = str(HERE / "repos" / name)
        task["evaluator"]["config"] = {"dataset": str(dataset), "instance_id": name}
        tasks.append(task)
    return tasks


def verified(count: int) -> list[dict]:
    """Tasks for the first instances of SWE-bench Verified, each in the image that the dataset names for it."""
    from swebench.harness.utils import load_swebench_dataset

    tasks = []
    for instance in load_swebench_dataset(VERIFIED, "test")[:count]:
        tasks.append(
            {
                "task_id": f"swebench-{instance['instance_id'].replace('__', '-')}",
                "instruction": f"{instance['problem_statement']}\n\nThe repository is in /testbed. Repair it.",
                "timeout_seconds": 3600,
                "agent": {"harness": "mini_swe_agent"},
                "runtime": {"backend": "docker", "image": instance["image"], "workdir": "/testbed"},
                "builder": {"strategy": "prefix_merging"},
                "evaluator": {
                    "strategy": "swebench_harness",
                    "refresh_runtime": True,
                    "config": {"instance": dict(instance)},
                },
            }
        )
    return tasks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verified", type=int, metavar="N", help="so many instances of SWE-bench Verified")
    parser.add_argument("--suffix", default="", help="put behind the names of the tasks, to run them again")
    arguments = parser.parse_args()
    tasks = None
    if arguments.verified:
        try:
            tasks = verified(arguments.verified)
        except OSError as error:  # what `datasets` raises without a network, or without the dataset
            print(f"{VERIFIED} cannot be reached ({type(error).__name__}); these are the three that lie here")
        except ModuleNotFoundError as error:
            parser.error(f"--verified needs the package {error.name}: pip install 'polar-rollout[swebench]'")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for task in ours((HERE / "instances.jsonl").resolve()) if tasks is None else tasks:
            task["task_id"] += arguments.suffix
            path = Path(folder, f"{task['task_id']}.json")
            path.write_text(json.dumps(task))
            failed += subprocess.call([sys.executable, "-m", "polar", "submit", str(path)]) != 0
    return 1 if failed else 0


sys.exit(main())
