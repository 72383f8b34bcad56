"""verl: an agent loop whose episodes are Polar's sessions.

    actor_rollout_ref.rollout.agent.agent_loop_config_path=agent.yaml
    # agent.yaml
    - {name: polar, _target_: polar.trainers.verl.PolarAgentLoop, polar_url: ..., template: task.yaml}

Facts of verl 0.9.1, `verl/experimental/agent_loop/agent_loop.py`: a loop is made with keywords, its config's own among
them, `run(sampling_params, **row)` is awaited once for each sample of a prompt, and answers with one
`AgentLoopOutput`: `prompt_ids`, `response_ids`, `response_mask`, `response_logprobs`, `reward_score`, `num_turns`,
`metrics`, `extra_fields`. One row, so of a session with several traces it is the one with the most sampled tokens.
Needs verl to be imported; `output_fields` does not.
"""

from __future__ import annotations

from typing import Any

from polar.client import SessionResult
from polar.trainers.runner import Runner, main_sample, placeholder

try:
    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
except ImportError:  # the fields below are of use, and tested, without it
    AgentLoopBase = object
    AgentLoopMetrics = AgentLoopOutput = None


class PolarAgentLoop(AgentLoopBase):  # type: ignore[misc,unused-ignore]
    """One session for each `run`. The template knows `{prompt}` and `{row.<name>}`, the dataset's row."""

    def __init__(
        self, *args: Any, polar_url: str, template: Any, polar_api_key: str | None = None, **kwargs: Any
    ) -> None:
        if AgentLoopOutput is None:
            raise ImportError("PolarAgentLoop is of verl: pip install verl")
        super().__init__(*args, **kwargs)
        self.runner = Runner(polar_url, polar_api_key, template, prefix="polar-verl")

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        """Submit, wait, and hand the tokens over."""
        task = self.runner.task(list(kwargs["raw_prompt"]), row=kwargs)
        names = ("temperature", "top_p", "top_k")
        asked = {name: sampling_params[name] for name in names if sampling_params.get(name) is not None}
        task["sampling"] = {**asked, **(task.get("sampling") or {})}
        result = await self.runner.run_one(task)
        pad = getattr(self.tokenizer, "pad_token_id", None) or 0
        limits = (self.rollout_config.prompt_length, self.rollout_config.response_length)
        return AgentLoopOutput(metrics=AgentLoopMetrics(), **output_fields(result, *limits, pad_id=pad))


def output_fields(
    result: SessionResult, prompt_length: int, response_length: int, *, pad_id: int = 0
) -> dict[str, Any]:
    """The fields of an `AgentLoopOutput`. What cannot train has mask 0 and reward 0.0, for verl takes no row away; a
    session that was not evaluated has None, and verl asks its own reward function.

    A prompt that is too long is no prompt of the session any more when it is cut, so it is masked; a response is cut
    at its end, which leaves every token behind its own context."""
    sample = main_sample(result)
    reason = "" if sample else "untrainable"
    if sample is not None and len(sample.prompt_ids) > prompt_length:
        sample, reason = None, "prompt_too_long"
    found = sample or placeholder(result, pad_id)
    cut = found.response_ids[:response_length]
    return {
        "prompt_ids": found.prompt_ids.tolist(),
        "response_ids": cut.tolist(),
        "response_mask": found.loss_mask[: len(cut)].tolist(),
        "response_logprobs": None if found.logprobs is None else found.logprobs[: len(cut)].tolist(),
        "reward_score": 0.0 if sample is None else sample.reward,
        "num_turns": 2 * found.turns or 1,
        "extra_fields": {
            "polar_session": result.session_id,
            "polar_untrainable": reason,
            "polar_truncated": len(cut) < len(found.response_ids),
            "polar_versions": [list(span) for span in found.versions],
        },
    }
