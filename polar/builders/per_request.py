"""One trace for each completion: nothing is joined, so nothing can be joined wrongly.

Context that completions share is repeated in every prompt; prefix_merging stores it once.
"""

from __future__ import annotations

from typing import Any, ClassVar

from polar.builders.assemble import assemble
from polar.builders.base import Builder, Built, Call
from polar.builders.config import BuilderConfig, read_config
from polar.builders.intake import take_in
from polar.builders.links import BREAKS, link


class PerRequest(Builder):
    """Each completion that has output ids, on its own, in order of request."""

    name: ClassVar[str] = "per_request"

    def __init__(self, **config: Any) -> None:
        self.config = read_config(BuilderConfig, config)

    def build(self, calls: list[Call]) -> Built:
        intake = take_in(calls, include_auxiliary=self.config.include_auxiliary)
        # Linked only to name retries, siblings and ghosts: a break between two traces is no fact about either.
        nodes = link(intake)
        traces = [assemble([node.call], [True], node.flags - BREAKS) for node in nodes]
        return Built(traces, intake.stats(traces, {node.call.id: node.order for node in nodes}, 0))
