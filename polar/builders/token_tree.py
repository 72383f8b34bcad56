"""The whole session as one tree of tokens, in which what several completions begin with stands once.

One trace holds every completion that the harness kept. Its stream is the tokens of the tree's nodes, laid end to
end in depth-first order; `metadata["tree"]` is the table of those nodes, a parent before its children:

    parent          index of the node that it goes on from, or -1: a conversation begins here
    start, end      its tokens, as places in prompt_ids + response_ids
    position        of its first token in its conversation, counted from 0
    sampled         whether the policy sampled it; else it is what a harness and the renderer put there
    completion_id   whose output it is; None where it is not sampled

What a token was conditioned on is the nodes above its own, and the tokens before it in its own: a node sees its
ancestors and nothing else, whatever stands before it in the stream. Sampled nodes are never merged, so each sampled
token stands in the tree exactly once; prompts are merged as far as they agree, across conversations too. prompt_ids
is the first completion's prompt, so that a session without a branch has the same trace as prefix_merging gives it. Any
other carries the flag `branched`, and must not be trained on as a line.

Ghosts stand apart, each with its own path, as in prefix_merging: they carry a flag that the tree must not have. For
rewards the tree is one trace; it is as faithful as its worst completion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from polar.builders.assemble import aligned_logprobs, appended_messages, assemble, describe, other_tools
from polar.builders.base import Builder, Built, Call, Ids, Trace
from polar.builders.certificate import Piece, certify
from polar.builders.config import BuilderConfig, read_config
from polar.builders.intake import take_in
from polar.builders.links import BREAKS, Node, flag_holes, link, rank


@dataclass(slots=True, eq=False)
class Part:
    """A node of the tree while it grows: a stretch of tokens without a branch."""

    ids: Ids
    source: Node | None = None
    """The completion that sampled it."""
    children: list[Part] = field(default_factory=list)

    def context(self, token: int) -> int | None:
        """Which child is context that begins with `token`."""
        for index, child in enumerate(self.children):
            if child.source is None and child.ids[0] == token:
                return index
        return None


class TokenTree(Builder):
    """One trace for the session, and one for each answer that nobody got."""

    name: ClassVar[str] = "token_tree"

    def __init__(self, **config: Any) -> None:
        self.config = read_config(BuilderConfig, config)

    def build(self, calls: list[Call]) -> Built:
        intake = take_in(calls, include_auxiliary=self.config.include_auxiliary)
        nodes = link(intake)
        flag_holes(intake, nodes)
        kept = [node for node in nodes if "ghost" not in node.flags]
        ghosts = [node for node in nodes if "ghost" in node.flags]
        traces = [_tree(kept)] if kept else []
        trained_in = {node.call.id: 0 for node in kept}
        for ghost in ghosts:
            trained_in[ghost.call.id] = len(traces)
            traces.append(assemble([ghost.call], [True], ghost.flags, ghost.difference))
        truncated = sum(1 for node in nodes if node.flags & BREAKS)
        return Built(traces, intake.stats(traces, trained_in, truncated))


def _tree(nodes: list[Node]) -> Trace:
    """One trace of all these completions; a parent that is a ghost has no children."""
    root = _grown(_main_first(nodes))
    table: list[dict[str, Any]] = []
    stretches: list[Ids] = []
    pieces: list[Piece] = []
    places: dict[int, int] = {}
    start = 0
    prompt: int | None = None
    sources: list[Node] = []
    for part, parent in _depth_first(root):
        end = start + len(part.ids)
        above = table[places[id(parent)]] if parent is not root else None
        places[id(part)] = len(table)
        table.append(
            {
                "parent": -1 if above is None else places[id(parent)],
                "start": start,
                "end": end,
                "position": 0 if above is None else above["position"] + above["end"] - above["start"],
                "sampled": part.source is not None,
                "completion_id": part.source.call.id if part.source else None,
            }
        )
        stretches.append(part.ids)
        # The end that some continuation does not keep is a node of its own, right after the rest of its output.
        if part.source is not None and part.source is not (sources[-1] if sources else None):
            prompt = start if prompt is None else prompt
            pieces.append(Piece(part.source.call, start - prompt, trained=True))
            sources.append(part.source)
        start = end
    assert prompt is not None
    return _trace(np.concatenate(stretches).astype(np.int32, copy=False), prompt, pieces, sources, table)


def _trace(stream: Ids, prompt: int, pieces: list[Piece], sources: list[Node], table: list[dict[str, Any]]) -> Trace:
    loss_mask = np.zeros(len(stream) - prompt, np.uint8)
    for piece in pieces:
        loss_mask[piece.start : piece.end] = 1
    flags = set().union(*(node.flags for node in sources))
    if any(node["parent"] != index - 1 for index, node in enumerate(table)):
        flags.add("branched")
    if any(node.parent and other_tools(node.parent.call, node.call) for node in sources):
        flags.add("tools_changed")
    messages, lines_up = _messages(sources)
    if not lines_up:
        flags.add("messages_differ")
    first = sources[0].call
    return Trace(
        prompt_ids=stream[:prompt],
        response_ids=stream[prompt:],
        loss_mask=loss_mask,
        logprobs=aligned_logprobs(pieces, len(loss_mask)),
        prompt_messages=list(first.request.get("messages") or []),
        response_messages=messages,
        tools=first.request.get("tools") or None,
        finish_reason=_last_of_main(sources).call.finish_reason,
        certificate=certify(pieces, flags, next((node.difference for node in sources if node.difference), None)),
        completion_ids=[piece.call.id for piece in pieces],
        metadata={**describe(pieces), "role": first.role, "spawned_by": None, "tree": table},
    )


def _main_first(nodes: list[Node]) -> list[Node]:
    """The main agent's completions, then the others', and parents before children all the same."""
    ranks: dict[int, int] = {}
    for node in nodes:
        ranks[node.order] = max(rank(node), ranks[node.parent.order] if node.parent else 0)
    return sorted(nodes, key=lambda node: (ranks[node.order], node.order))


def _grown(nodes: list[Node]) -> Part:
    """The tree under a root without tokens; `nodes` with parents before children."""
    root = Part(np.zeros(0, np.int32))
    outputs: dict[int, Part] = {}
    for node in nodes:
        place = root
        ids = node.call.prompt_ids
        if node.parent is not None:
            kept = len(node.parent.call.output_ids) - node.trim
            place = _after(outputs[node.parent.order], kept)
            ids = ids[len(node.parent.call.prompt_ids) + kept :]
        place = _descend(place, ids)
        outputs[node.order] = Part(node.call.output_ids, node)
        place.children.append(outputs[node.order])
    return root


def _after(output: Part, kept: int) -> Part:
    """The part that ends after so many tokens of an output; where none does, it is parted there."""
    while kept > len(output.ids):
        kept -= len(output.ids)
        output = output.children[0]
    if kept < len(output.ids):
        rest = Part(output.ids[kept:], output.source, output.children)
        output.ids, output.children = output.ids[:kept], [rest]
    return output


def _descend(place: Part, ids: Ids) -> Part:
    """The part that ends where context `ids` after `place` ends, made as far as it is not there."""
    while len(ids):
        index = place.context(int(ids[0]))
        if index is None:
            fresh = Part(ids)
            place.children.append(fresh)
            return fresh
        child = place.children[index]
        shared = _agreement(child.ids, ids)
        if shared < len(child.ids):
            upper = Part(child.ids[:shared], None, [child])
            child.ids = child.ids[shared:]
            place.children[index] = child = upper
        place, ids = child, ids[shared:]
    return place


def _agreement(one: Ids, other: Ids) -> int:
    """How many tokens two stretches begin with alike."""
    length = min(len(one), len(other))
    unequal = one[:length] != other[:length]
    return int(unequal.argmax()) if unequal.any() else length


def _depth_first(root: Part) -> Iterator[tuple[Part, Part]]:
    """Every part with its parent, children in the order in which they came."""
    waiting = [(child, root) for child in reversed(root.children)]
    while waiting:
        part, parent = waiting.pop()
        yield part, parent
        waiting += [(child, part) for child in reversed(part.children)]


def _messages(sources: list[Node]) -> tuple[list[dict[str, Any]], bool]:
    """In the order of the tree: what was appended before each answer, and the answer; whether echoes were found."""
    messages: list[dict[str, Any]] = [sources[0].call.answer]
    lines_up = True
    for node in sources[1:]:
        if node.parent is None:
            messages += list(node.call.request.get("messages") or [])
        else:
            # Read from the deepest call of its line, so that a line of many turns is read once.
            last = _end_of_line(node)
            appended, echoed = appended_messages(node.parent.call, node.call, last.call)
            messages += appended
            lines_up &= echoed
        messages.append(node.call.answer)
    return messages, lines_up


def _end_of_line(node: Node) -> Node:
    while node.children:
        node = node.children[0]
    return node


def _last_of_main(sources: list[Node]) -> Node:
    """The completion with which the main agent ended, or whoever was last where there is none."""
    best = min(rank(node) for node in sources)
    return max((node for node in sources if rank(node) == best), key=lambda node: node.order)
