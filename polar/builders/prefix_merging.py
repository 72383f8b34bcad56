"""One trace for each root-to-leaf path that the harness kept: prompt, answer, what was appended, answer, …

A completion is joined to its parent only if its prompt starts with the parent's tokens; see links.py. One
that cannot be joined starts a trace of its own and says where it differs; none is dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from polar.builders.assemble import assemble
from polar.builders.base import Builder, Built, Call, Trace
from polar.builders.config import BuilderConfig, read_config
from polar.builders.intake import HOLE, Intake, take_in
from polar.builders.links import BREAKS, Node, link


class PrefixMergingConfig(BuilderConfig):
    """Settings, and two that clients of the original send: parent links make them needless, so they do nothing."""

    end_of_turn_token_id: int | None = None
    """Where the original cut one turn from the next."""
    tokenizer_name_or_path: str | None = None
    """With what the original encoded text that came without ids; here that is a hole, and flagged."""


class PrefixMerging(Builder):
    """Shared completions are trained in the first path, in order of request, and are context in the others."""

    name: ClassVar[str] = "prefix_merging"

    def __init__(self, **config: Any) -> None:
        self.config = read_config(PrefixMergingConfig, config)

    def build(self, calls: list[Call]) -> Built:
        intake = take_in(calls, include_auxiliary=self.config.include_auxiliary)
        nodes = link(intake)
        _flag_holes(intake, nodes)
        traces: list[Trace] = []
        trained_in: dict[str, int] = {}
        for path in _paths(nodes):
            trained = [node.call.id not in trained_in for node in path]
            flags = set().union(*(node.flags for node in path))
            traces.append(assemble([node.call for node in path], trained, flags, path[0].difference))
            for node in path:
                trained_in.setdefault(node.call.id, len(traces) - 1)
        truncated = sum(1 for node in nodes if node.flags & BREAKS)
        return Built(traces, intake.stats(traces, trained_in, truncated))


def _paths(nodes: list[Node]) -> list[list[Node]]:
    """Root-to-leaf paths, depth first in order of request; each ghost stands alone, after them.

    A ghost had no part in what came of the session. At the end of a path it would pass for an answer that
    counted, so the path ends before it and its tokens are told apart by a trace that carries the flag."""
    ghosts = [node for node in nodes if "ghost" in node.flags]
    kept = [node for node in nodes if "ghost" not in node.flags]
    leaves = [node for node in kept if all("ghost" in child.flags for child in node.children)]
    paths = sorted((leaf.path() for leaf in leaves), key=lambda path: [node.order for node in path])
    return [*paths, *([ghost] for ghost in ghosts)]


def _flag_holes(intake: Intake, nodes: list[Node]) -> None:
    """A hole says so on the completion before it, too: the path it was on may end there."""
    by_id = {node.call.id: node for node in nodes}
    for call in intake.calls:
        if intake.left_out.get(call.id) == HOLE and call.parent_id in by_id:
            by_id[call.parent_id].flags.add("capture_hole")
