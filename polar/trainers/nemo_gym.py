"""NeMo Gym: an agent server whose rollouts are Polar's sessions, with the rewards of their evaluators.

Gym starts `app.py` of a folder; two lines make one (docs/trainers.md): import `PolarAgent`, and run its webserver.
Each row of the dataset is a prompt (`responses_create_params.input`) and whatever the task template asks for.

Facts of nemo-gym 0.7.0 (`base_responses_api_agent.py`, `base_resources_server.py`, `openai_utils.py`): `/run` takes a
`BaseRunRequest` and answers with a `BaseVerifyResponse`: the request, a Responses object, `reward`, `mask_sample`,
`failure_kind`, `failure_reason`. Output items for training carry `prompt_token_ids`, `generation_token_ids` and
`generation_log_probs`; each prompt must begin with the item before it, prompt and generation. The evaluator has judged
by the time `/run` answers, so no resources server has to verify. Needs Python 3.13 and nemo-gym for `PolarAgent`;
the functions need neither.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from polar.client import SessionResult
from polar.trainers.runner import Runner, main_sample
from polar.trainers.samples import Sample

try:
    from nemo_gym.base_resources_server import BaseRunRequest, BaseVerifyResponse
    from nemo_gym.base_responses_api_agent import BaseResponsesAPIAgentConfig, SimpleResponsesAPIAgent
    from pydantic import ConfigDict
except ImportError:  # what is made here is of use, and tested, without it
    SimpleResponsesAPIAgent = None

if SimpleResponsesAPIAgent is not None:

    class PolarAgentConfig(BaseResponsesAPIAgentConfig):  # type: ignore[misc,unused-ignore]
        """What the agent's YAML says."""

        polar_url: str
        polar_api_key: str | None = None
        template: str
        """File of the task template; it knows `{prompt}` and `{row.<name>}`."""

    class PolarRunRequest(BaseRunRequest):  # type: ignore[misc,unused-ignore]
        """A row of the dataset with all its fields."""

        model_config = ConfigDict(extra="allow", populate_by_name=True)

    class PolarVerifyResponse(BaseVerifyResponse):  # type: ignore[misc,unused-ignore]
        """The row, the answer and the reward."""

        model_config = ConfigDict(extra="allow", populate_by_name=True)

    class PolarAgent(SimpleResponsesAPIAgent):  # type: ignore[misc,unused-ignore]
        """An agent server of Gym: one session for each `/run`."""

        config: PolarAgentConfig

        async def responses(self, body: Any = None) -> Any:
            """Not of use here: a session is more than one response."""
            raise NotImplementedError("Polar's agent answers /run alone")

        async def run(self, body: PolarRunRequest) -> PolarVerifyResponse:
            """Submit the row as a task, wait, and answer with its reward."""
            row = body.model_dump(mode="json", exclude_none=True)
            runner = Runner(self.config.polar_url, self.config.polar_api_key, self.config.template, prefix="polar-gym")
            task = runner.task(row["responses_create_params"]["input"], row=row)
            return PolarVerifyResponse.model_validate(verify_response(row, await runner.run_one(task)))


def verify_response(row: Mapping[str, Any], result: SessionResult) -> dict[str, Any]:
    """A session as Gym's answer. Without a reward of an evaluator the sample is masked, and the reason is told."""
    sample = main_sample(result)
    usable = sample is not None and sample.reward is not None
    answer = {
        **row,
        "response": response(result, sample),
        "reward": sample.reward if usable and sample is not None else 0.0,
        "mask_sample": not usable,
        "polar_session": result.session_id,
    }
    if not usable:
        decisions = [trace.raw.get("decision") or {} for trace in result.traces]
        reason = next((each["rule"] for each in decisions if each.get("rule")), "no trace")
        answer |= {"failure_kind": "polar:untrainable", "failure_reason": result.error or reason}
    return answer


def response(result: SessionResult, sample: Sample | None) -> dict[str, Any]:
    """A Responses object: a message for each stretch that the policy sampled, with its tokens."""
    return {
        "id": f"resp_{result.session_id}",
        "object": "response",
        "created_at": time.time(),
        "model": str(result.trajectory.metadata.get("model_used") or "policy"),
        "output": [] if sample is None else _items(sample, _texts(result, sample)),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _items(sample: Sample, texts: list[str]) -> list[dict[str, Any]]:
    items = []
    stream, prompt = sample.ids.tolist(), len(sample.prompt_ids)
    logprobs = np.zeros(len(sample.response_ids)) if sample.logprobs is None else sample.logprobs
    turns = [(start, end) for sampled, start, end in sample.segments() if sampled]
    for number, (start, end) in enumerate(turns):
        text = texts[number] if number < len(texts) else ""
        items.append(
            {
                "id": f"msg_{sample.session_id}_{sample.trace}_{number}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
                "prompt_token_ids": stream[: prompt + start],
                "generation_token_ids": stream[prompt + start : prompt + end],
                "generation_log_probs": logprobs[start:end].tolist(),
            }
        )
    return items


def _texts(result: SessionResult, sample: Sample) -> list[str]:
    messages = result.traces[sample.trace].raw.get("response_messages") or []
    return [str(each.get("content") or "") for each in messages if each.get("role") == "assistant"]
