"""Which completion continues which: parent links, asserted token for token.

A completion continues its parent only if its prompt starts with the parent's prompt and output. Where the
proxy found no parents at all (canonical mode), the longest completion whose tokens are such a prefix is the
parent. Making traces of the forest is the builders' affair.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from polar.builders.base import Call, Ids
from polar.builders.intake import AUXILIARY, HOLE, Intake

BREAKS = frozenset({"parent_mismatch", "parent_missing"})
"""Flags of a completion that should continue another and cannot."""
RANKS = {"main": 0, "subagent": 1}
REASONS = {
    "edited": "rewritten_history",
    "template_history": "rewritten_history",
    "tools_changed": "tools_changed",
}
"""The ledger's reasons for the place of a completion that a trainer should know."""
TAIL = 64
"""Tokens compared before a whole prompt is: conversations that differ almost always differ at their ends."""


@dataclass(slots=True, eq=False)
class Node:
    """A placed completion in the forest."""

    call: Call
    order: int
    parent: Node | None = None
    children: list[Node] = field(default_factory=list)
    flags: set[str] = field(default_factory=set)
    """What its place in the forest says of it."""
    trim: int = 0
    """How many ids at the end of its parent's output its prompt does not keep."""
    difference: dict[str, Any] | None = None
    """Where its prompt leaves what it should continue."""

    def path(self) -> list[Node]:
        """From the root down to this node."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]


def rank(node: Node) -> int:
    """The main agent's completions come first, then sub-agents', then side calls."""
    return RANKS.get(node.call.role, len(RANKS))


def link(intake: Intake) -> list[Node]:
    """The placed completions as a forest, in order of request; flags say what kept any from its parent."""
    nodes = [Node(call, order) for order, call in enumerate(intake.placed)]
    if any(call.parent_id is not None for call in intake.calls):
        extended = _by_parent_id(intake, nodes)
    else:
        extended = _by_tokens(nodes)
    for node in nodes:
        if node.parent is not None:
            node.parent.children.append(node)
        if (flag := REASONS.get(node.call.parent_reason)) is not None:
            node.flags.add(flag)
    _flag_siblings(nodes)
    for node in nodes:
        if not node.call.delivered and node.call.id not in extended:
            node.flags.add("ghost")
    return nodes


def flag_holes(intake: Intake, nodes: list[Node]) -> None:
    """A hole says so on the completion before it, too: the path it was on may end there."""
    by_id = {node.call.id: node for node in nodes}
    for call in intake.calls:
        if intake.left_out.get(call.id) == HOLE and call.parent_id in by_id:
            by_id[call.parent_id].flags.add("capture_hole")


def first_difference(parent: Call, child: Call, trim: int = 0) -> int | None:
    """Where the child's prompt leaves the parent's prompt and output, but for the output's last `trim` ids; None if it
    starts with both."""
    length = len(parent.prompt_ids)
    at = _first_unequal(parent.prompt_ids, child.prompt_ids)
    if at is not None:
        return at
    at = _first_unequal(parent.output_ids[: len(parent.output_ids) - trim], child.prompt_ids[length:])
    return None if at is None else length + at


def _first_unequal(prefix: Ids, ids: Ids) -> int | None:
    shared = min(len(prefix), len(ids))
    if shared == len(prefix) and same_memory(prefix, ids):
        return None
    unequal = prefix[:shared] != ids[:shared]
    if unequal.any():
        return int(unequal.argmax())
    return shared if shared < len(prefix) else None


def same_memory(prefix: Ids, ids: Ids) -> bool:
    """Whether two arrays begin at the very same place: then the shorter is how the longer begins."""
    return bool(prefix.ctypes.data == ids.ctypes.data) and prefix.strides == ids.strides


def _by_parent_id(intake: Intake, nodes: list[Node]) -> set[str]:
    """Set parents from the recorded links; returns the ids that some completion continues."""
    waiting = iter(nodes)
    placed: dict[str, Node] = {}
    passed: dict[str, Call] = {}
    for call in intake.calls:
        if call.id in intake.left_out:
            passed[call.id] = call
            continue
        node = next(waiting)
        candidate = _climb(node, placed, passed, intake.left_out)
        if candidate is not None:
            _join(node, candidate)
        placed[call.id] = node
    extended = {call.parent_id for call in intake.calls if call.parent_id is not None}
    return extended | {node.parent.call.id for node in nodes if node.parent is not None}


def _climb(node: Node, placed: dict[str, Node], passed: dict[str, Call], left_out: dict[str, str]) -> Node | None:
    """The nearest earlier ancestor that stands in a trace.

    What was sampled by a completion in between is context in the child's prompt; that the prompt starts with
    the ancestor's tokens is asserted all the same, so climbing cannot join what the engine did not see."""
    name, node.trim = node.call.parent_id, node.call.trim
    while name is not None and name not in placed:
        if name not in passed:
            node.flags.add("parent_missing")
            return None
        if left_out[name] == HOLE:
            node.flags.add("capture_hole")
        elif left_out[name] == AUXILIARY:
            node.flags.add("auxiliary_context")
        node.trim = passed[name].trim
        name = passed[name].parent_id
    return None if name is None else placed[name]


def _join(node: Node, candidate: Node) -> None:
    position = first_difference(candidate.call, node.call, node.trim)
    if position is None:
        node.parent = candidate
        return
    node.trim = 0
    node.flags.add("parent_mismatch")
    node.difference = {
        "kind": "parent_mismatch",
        "completion": node.call.id,
        "parent": candidate.call.id,
        "turn": len(candidate.path()),
        "position": position,
    }


class _ByLength:
    """Nodes sorted by a length, to be tried longest first; of equal ones the latest."""

    def __init__(self, length: Callable[[Call], int]) -> None:
        self.length = length
        self.nodes: list[Node] = []
        self.lengths: list[int] = []

    def add(self, node: Node) -> None:
        at = bisect_right(self.lengths, self.length(node.call))
        self.lengths.insert(at, self.length(node.call))
        self.nodes.insert(at, node)

    def longest(self, most: int, fits: Callable[[Call], bool]) -> Node | None:
        """The longest node of at most `most` tokens that `fits`."""
        candidates = self.nodes[: bisect_right(self.lengths, most)]
        return next((node for node in reversed(candidates) if fits(node.call)), None)


def _by_tokens(nodes: list[Node]) -> set[str]:
    """Set parents by the longest token prefix; returns the ids that some completion continues.

    Where only a prompt is a prefix, the template printed the answer differently from what was sampled: the
    conversation went on, but not on the sampled tokens, so the later completion begins a trace of its own."""
    streams = _ByLength(lambda call: len(call.prompt_ids) + len(call.output_ids))
    prompts = _ByLength(lambda call: len(call.prompt_ids))
    extended = set()
    for node in nodes:
        ids = node.call.prompt_ids
        seen = streams.longest(len(ids), partial(_continues, ids))
        seen = seen or prompts.longest(len(ids) - 1, partial(_repeats_prompt, ids))
        if seen is not None:
            _join(node, seen)
            extended.add(seen.call.id)
        if len(ids):
            streams.add(node)
            prompts.add(node)
    return extended


def _continues(ids: Ids, call: Call) -> bool:
    start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
    return np.array_equal(call.output_ids, ids[start:end]) and _starts_with(ids, call.prompt_ids)


def _repeats_prompt(ids: Ids, call: Call) -> bool:
    return _starts_with(ids, call.prompt_ids)


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    at = max(0, len(prefix) - TAIL)
    return np.array_equal(prefix[at:], ids[at : len(prefix)]) and np.array_equal(prefix[:at], ids[:at])


def _flag_siblings(nodes: list[Node]) -> None:
    """Name completions that go on from the same place, and those that were asked the very same thing."""
    alike: dict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in nodes:
        if node.parent is not None and len(node.parent.children) > 1:
            node.flags.add("sibling")
        if len(node.call.prompt_ids):
            alike[node.parent.order if node.parent else -1, len(node.call.prompt_ids)].append(node)
    for group in (group for group in alike.values() if len(group) > 1):
        by_prompt: dict[bytes, list[Node]] = defaultdict(list)
        for node in group:
            by_prompt[node.call.prompt_ids.tobytes()].append(node)
        for same in (same for same in by_prompt.values() if len(same) > 1):
            for node in same:
                node.flags.add("retry")
