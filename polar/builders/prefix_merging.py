"""One trace for each root-to-leaf path that the harness kept: prompt, answer, what was appended, answer, …

A completion is joined to its parent only if its prompt starts with the parent's tokens; see links.py. One
that cannot be joined starts a trace of its own and says where it differs; none is dropped.
"""

from __future__ import annotations

from typing import Any, ClassVar

from polar.builders.assemble import assemble
from polar.builders.base import Builder, Built, Call, Trace
from polar.builders.config import BuilderConfig, read_config
from polar.builders.intake import take_in
from polar.builders.links import BREAKS, Node, flag_holes, link, rank


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
        flag_holes(intake, nodes)
        traces: list[Trace] = []
        trained_in: dict[str, int] = {}
        trimmed = 0
        for path in _paths(nodes):
            trained = [node.call.id not in trained_in for node in path]
            flags = set().union(*(node.flags for node in path))
            trims = [*(node.trim for node in path[1:]), 0]
            traces.append(assemble([node.call for node in path], trained, flags, path[0].difference, trims))
            trimmed += sum(trim for trim, train in zip(trims, trained, strict=True) if train)
            for node in path:
                trained_in.setdefault(node.call.id, len(traces) - 1)
        truncated = sum(1 for node in nodes if node.flags & BREAKS)
        return Built(traces, intake.stats(traces, trained_in, truncated, trimmed))


def _paths(nodes: list[Node]) -> list[list[Node]]:
    """Root-to-leaf paths, the main agent's first, then in order of request; each ghost stands alone, after them.

    A path ends where its agent's part does: what a sub-agent said from the same history on is a path of the
    sub-agent. A ghost had no part in what came of the session. At the end of a path it would pass for an answer
    that counted, so the path ends before it and its tokens are told apart by a trace that carries the flag."""
    ghosts = [node for node in nodes if "ghost" in node.flags]
    ends = [
        node for node in nodes if "ghost" not in node.flags and not any(goes_on(node, each) for each in node.children)
    ]
    paths = sorted((end.path() for end in ends), key=lambda path: (rank(path[-1]), [node.order for node in path]))
    found: set[int] = set()
    kept: list[list[Node]] = []
    for path in paths:
        # A side call that the main agent went on from ends a part of its own and stands whole in the other's path.
        if path[-1].order not in found:
            kept.append(path)
            found.update(node.order for node in path)
    return [*kept, *([ghost] for ghost in ghosts)]


def goes_on(node: Node, child: Node) -> bool:
    """Whether the same agent went on from `node` with `child`."""
    return "ghost" not in child.flags and child.call.role == node.call.role
