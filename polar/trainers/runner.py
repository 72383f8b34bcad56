"""What bridges share: prompts become tasks by a template, tasks become sessions, sessions become samples.

Trainers that ask for one row a prompt get one: the trace with the most sampled tokens, the main agent's as a rule.
A session that has none gets a placeholder that trains nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from polar.client import AsyncClient, Client, SessionResult
from polar.trainers.samples import Sample, samples_of
from polar.trainers.template import fill, load


class Runner:
    """Runs sessions for a trainer. `template` is a task with places, a mapping or a file; it knows `{prompt}`."""

    def __init__(
        self, url: str, key: str | None, template: Any, *, prefix: str = "polar", concurrency: int = 8
    ) -> None:
        self.url, self.key = url, key
        self.template = load(template)
        self.prefix, self.concurrency = prefix, concurrency

    def task(self, prompt: Any, sessions: int = 1, **values: Any) -> dict[str, Any]:
        """A task of its own name. `prompt` is text, or messages, of which the last user's is the instruction."""
        known = {"prompt": instruction(prompt), **values}
        filled: dict[str, Any] = fill(self.template, known)
        filled.setdefault("instruction", known["prompt"])
        filled["task_id"] = f"{filled.get('task_id', self.prefix)}-{uuid.uuid4().hex[:12]}"
        filled["num_samples"] = sessions
        return filled

    def run(self, tasks: Sequence[Mapping[str, Any]]) -> list[list[SessionResult]]:
        """Every task's sessions, in the order of the tasks."""
        place = {task["task_id"]: number for number, task in enumerate(tasks)}
        found: list[list[SessionResult]] = [[] for _ in tasks]
        with Client(self.url, self.key) as client:
            for result in client.run(tasks, concurrency=self.concurrency):
                found[place[result.task_id]].append(result)
        return found

    async def run_one(self, task: Mapping[str, Any]) -> SessionResult:
        """The one session of a task; left, the task is cancelled."""
        async with AsyncClient(self.url, self.key) as client:
            await client.submit(task)
            try:
                return (await client.wait(task["task_id"])).results[0]
            except BaseException:
                await client.cancel(task["task_id"])
                raise


def instruction(prompt: Any) -> str:
    """A prompt as an instruction: text, or the text of the last message that a user wrote."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(list(prompt)):
        if message.get("role") == "user":
            return _content(message.get("content"))
    return "\n".join(_content(message.get("content")) for message in prompt)


def main_sample(result: SessionResult) -> Sample | None:
    """The sample with the most sampled tokens, the first of equals; None of a session that cannot train."""
    return max(samples_of(result), key=lambda sample: sample.sampled_tokens, default=None)


def placeholder(result: SessionResult, token: int = 0) -> Sample:
    """A row that trains nothing, where a trainer insists on one; its reward is None and its weight 0."""
    return Sample(
        prompt_ids=np.array([token], np.int32),
        response_ids=np.array([token], np.int32),
        loss_mask=np.zeros(1, np.uint8),
        logprobs=np.zeros(1, np.float32),
        reward=None,
        weight=0.0,
        session_id=result.session_id,
        task_id=result.task_id,
        group_id=result.task_id,
        trace=-1,
        status=result.status,
        trainable=False,
        metadata=result.task_metadata,
    )


def flat(results: Iterable[Sequence[SessionResult]]) -> list[SessionResult]:
    """Sessions of all tasks, task after task."""
    return [result for some in results for result in some]


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
