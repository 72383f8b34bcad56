"""The Slime bridge's configuration: the original's keys, read from Slime's arguments, and what they come to."""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlimeConfig:
    """Each field is the argument `polar_<name>`, from `--custom-config-path` or the command line."""

    rollout_url: str | None = None
    """Address of Polar's API; wins over the topology."""
    topology_path: str | None = None
    """topology.yaml that names the API."""
    api_key: str | None = None
    """Addition. API key with the scope submit; the original had none."""
    task_template: Any = None
    """The task with its places: `{sample.metadata.x}`, `{args.x}`, `{sglang.router_base_url}`, `{prompt}`."""
    task_id_template: str = "polar-slime-{rollout_id}-{sample.group_index}"
    """Name of a prompt group's task."""
    instruction_template: str | None = None
    """The instruction, where the task template has none; without it, the prompt's text."""
    reward_key: str | None = None
    """Accepted for the original's files: a session has one reward here."""
    max_async_level: int = 2
    """How many batches of prompt groups Polar may have at once."""
    request_timeout: float | None = None
    """A session's budget in seconds, where the task template has none."""
    callback_host: str = "127.0.0.1"
    """Accepted for the original's files: results are read from the feed, so nothing listens."""
    scoring_mode: Literal["group", "individual"] = "group"
    """group: advantages are relative to the group's other sessions. individual: rewards are left to Slime."""
    min_complete_accept_fraction: float = 0.0
    """Groups of which fewer sessions completed with trainable tokens are dropped."""
    add_generation_prompt: bool = True
    """Accepted for the original's files: the proxy renders what the harness sends."""
    eval_dataset_name: str = "polar"
    """Under which name evaluation is reported."""
    eval_tasks: str | None = None
    """Addition. JSON lines with `prompt` and `metadata`, one for each task of an evaluation."""
    submit_concurrency: int = 8
    """Addition. Submits under way at once."""

    @classmethod
    def of(cls, args: Any) -> SlimeConfig:
        """From Slime's arguments. Raises ValueError for a key that is not known, or a value that cannot be."""
        names = {field.name for field in fields(cls)}
        given = {name.removeprefix("polar_"): value for name, value in vars(args).items() if name.startswith("polar_")}
        unknown = sorted(given.keys() - names)
        if unknown:
            known = ", ".join(f"polar_{name}" for name in sorted(names))
            raise ValueError(f"polar_{unknown[0]} is no key of the Slime bridge; it knows {known}")
        config = cls(**{name: value for name, value in given.items() if value is not None})
        if config.task_template is None:
            raise ValueError("polar_task_template is missing: a task as a mapping, or the path of its file")
        if config.scoring_mode not in ("group", "individual"):
            raise ValueError(f"polar_scoring_mode is {config.scoring_mode!r}; it must be group or individual")
        if config.max_async_level < 1:
            raise ValueError("polar_max_async_level must be at least 1")
        return config

    @property
    def url(self) -> str:
        """Where the API is."""
        if self.rollout_url is not None:
            return self.rollout_url
        if self.topology_path is None:
            raise ValueError("give polar_rollout_url, or polar_topology_path")
        import yaml

        rollout = (yaml.safe_load(Path(self.topology_path).read_text()) or {}).get("rollout") or {}
        port = rollout.get("port", 8080)
        return str(rollout.get("public_url") or f"http://{_reachable(rollout.get('host', '127.0.0.1'))}:{port}")

    def max_off_policy_steps(self, args: Any) -> int:
        """How many rollouts a group may be behind when it trains."""
        return self.max_async_level + int(getattr(args, "update_weights_interval", 1) or 1)

    def sglang(self, args: Any) -> dict[str, str]:
        """What `{sglang.…}` means in a template."""
        host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
        return {"router_base_url": f"http://{host or '127.0.0.1'}:{port or 8000}"}


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host
