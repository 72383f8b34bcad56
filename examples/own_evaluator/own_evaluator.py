"""An evaluator of one's own: rewards short answers, each trace by itself."""

from __future__ import annotations

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict


class Brevity(Evaluator):
    """1.0 for an answer of no words, falling to 0.0 at `most` of them."""

    name = "brevity"

    def __init__(self, *, most: int = 40) -> None:
        if most < 1:
            raise ValueError("most: must be at least 1")
        self.most = most

    def evaluate(self, case: Case) -> Verdict:
        if not case.traces:
            raise EvaluatorError("there is nothing to judge: the session has no trace", code="no_traces")
        words = [
            sum(len(str(message["content"] or "").split()) for message in trace["response_messages"])
            for trace in case.traces
        ]
        rewards = [max(0.0, 1 - number / self.most) for number in words]
        return Verdict(sum(rewards) / len(rewards), trace_rewards=list(rewards), evidence={"words": words})
