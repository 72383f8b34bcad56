"""The token ledger: which recorded call a new one continues, and the exact ids its prompt begins with.

A session's answered calls form a forest, never changed, only added to. A request is walked once from its
first message on; wherever an assistant message is one that we served in exactly this place, the walk stands on
that call's node. The deepest such node is the parent: its ids are taken as they are, and only what follows is
rendered. Holds no messages, only hashes, and does no I/O; `ledgers` fills it.
"""

from __future__ import annotations

import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from polar.errors import NodeError
from polar.messages import Message, ModelRequest, Tool, chain_step, steady, with_tool_names
from polar.renderers.base import TAIL, Renderer

Ids = npt.NDArray[np.int32]
ANCHOR = re.compile(r"call_?([0-9a-f]{24})_?\d+")
CACHED_PROMPTS = 2
"""Whole prompts kept per session. Others are put together again from suffixes, so that memory grows with the
session's tokens and not with the square of its turns."""


def anchor(completion_id: str, index: int) -> str:
    """The id minted for the index-th tool call of a completion: a harness must send it back."""
    return f"call_{completion_id.rpartition('-')[2]}_{index}"


def as_ids(data: bytes | list[int] | Ids) -> Ids:
    """Token ids as stored, or as an engine or renderer gave them."""
    return np.frombuffer(data, dtype="<i4") if isinstance(data, bytes) else np.asarray(data, dtype="<i4")


@dataclass(slots=True)
class Node:
    """One answered call."""

    id: str
    parent_id: str | None
    fingerprint: bytes
    context_hash: bytes
    """Names the conversation that was asked."""
    chain_hash: bytes
    """Names the conversation with the answer."""
    served: bytes
    """Hash of the answer alone."""
    prompt_len: int
    suffix_ids: Ids
    output_ids: Ids
    body_hash: bytes
    delivered: bool
    head: bytes = b""
    """Names its system messages where they tell the time; a continuation keeps those that were printed."""
    trim: int = 0
    """How many ids at the end of its parent's output its prompt does not keep."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs."""

    parent: Node | None
    reason: str
    """`anchor` or `exact`: it continues the parent. `edited`: it does, or begins anew, because what we served
    stands in a history that changed. `template_history`: it does, but the task's history policy or the model's template
    does not go on from sampled tokens here. `tools_changed`, `no_match`, `root`: a new root."""
    appended: int
    """Index of the first message that the parent's ids do not cover."""
    fingerprint: bytes
    context_hash: bytes
    flags: tuple[str, ...] = ()
    head: bytes = b""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, and where it stands after all."""

    place: Place
    prefix: Ids
    """What it keeps of the parent's ids; of a root, nothing."""
    suffix: Ids
    trim: int = 0
    """How many ids at the end of the parent's output it does not keep."""


@dataclass(slots=True)
class Walk:
    """What one pass over the messages found."""

    digest: bytes
    parent: Node | None = None
    by_anchor: bool = False
    appended: int = 0
    rewritten: bool = False
    ours_outside: bool = False
    """An answer of ours stands after the parent, in a place where we did not give it."""


@dataclass(slots=True)
class Ledger:
    """The forest of one attempt of one session."""

    nodes: dict[str, Node] = field(default_factory=dict)
    last_body: str | None = None
    """The call whose body was recorded last, from this process."""
    _by_anchor: dict[str, Node] = field(default_factory=dict)
    _by_chain: dict[bytes, list[Node]] = field(default_factory=dict)
    _contexts: set[bytes] = field(default_factory=set)
    _served: set[bytes] = field(default_factory=set)
    _fingerprints: set[bytes] = field(default_factory=set)
    _prompts: OrderedDict[str, Ids] = field(default_factory=OrderedDict)

    def add(self, node: Node) -> None:
        """Take a recorded call in; a second time changes nothing."""
        if node.id in self.nodes:
            return
        self.nodes[node.id] = node
        self._by_anchor[node.id.rpartition("-")[2]] = node
        self._by_chain.setdefault(node.chain_hash, []).append(node)
        self._contexts.add(node.context_hash)
        self._served.add(node.served)
        self._fingerprints.add(node.fingerprint)

    def place(self, request: ModelRequest, history: str = "sampled") -> Place:
        """Find the call that this one continues, under the task's history policy."""
        fingerprint = request.fingerprint()
        walk = self._walk(fingerprint, request.messages)
        flags = ["rewritten"] if walk.rewritten else []
        if walk.digest in self._contexts:
            flags.append("sibling")
        head = _head(request.messages)
        if walk.parent is not None and walk.parent.head != head:
            flags.append("volatile_header")
        reason = self._reason(walk, fingerprint, request.messages)
        place = Place(walk.parent, reason, walk.appended, fingerprint, walk.digest, tuple(flags), head)
        anew = walk.parent is not None and _begins_anew(history, request.messages[walk.appended :])
        return _as_root(place) if anew else place

    def prompt(
        self, place: Place, messages: tuple[Message, ...], tools: tuple[Tool, ...], renderer: Renderer
    ) -> Prompt:
        """What the parent keeps and what follows it; a root where the renderer cannot go on from sampled tokens."""
        messages = with_tool_names(messages)
        if place.parent is not None:
            ids, parent = self.ids(place.parent), place.parent
            end = ids[max(0, parent.prompt_len - TAIL) : parent.prompt_len].tolist()
            bridge = renderer.bridge(parent.output_ids.tolist(), messages[place.appended :], tools, end)
            if bridge is not None:
                return Prompt(place, ids[: len(ids) - bridge.trim], as_ids(bridge.ids), bridge.trim)
            place = _as_root(place, "unbridged")
        return Prompt(place, as_ids([]), as_ids(renderer.render(messages, tools)))

    def ids(self, node: Node) -> Ids:
        """Prompt and output of a call: what any continuation of it begins with."""
        pieces: list[Ids] = []
        step: Node | None = node
        trim = 0
        while step is not None and step.id not in self._prompts:
            pieces += [_cut(step.output_ids, trim), step.suffix_ids]
            trim, step = step.trim, self._parent(step)
        base = [] if step is None else [_cut(self._prompts[step.id], trim)]
        whole = np.concatenate([*base, *reversed(pieces)]) if pieces else self._prompts[node.id]
        if len(whole) != node.prompt_len + len(node.output_ids):
            raise NodeError(
                f"completion {node.id} does not add up to its {node.prompt_len} prompt ids", retryable=False
            )
        self._prompts[node.id] = whole
        self._prompts.move_to_end(node.id)
        if len(self._prompts) > CACHED_PROMPTS:
            self._prompts.popitem(last=False)
        return whole

    def undelivered(self, body_hash: bytes) -> Iterator[Node]:
        """Recorded answers to this very body that no client is known to hold."""
        return (node for node in self.nodes.values() if node.body_hash == body_hash and not node.delivered)

    def _parent(self, node: Node) -> Node | None:
        if node.parent_id is None:
            return None
        parent = self.nodes.get(node.parent_id)
        if parent is None:
            raise NodeError(f"completion {node.id} continues {node.parent_id}, which is not recorded", retryable=False)
        return parent

    def _walk(self, fingerprint: bytes, messages: tuple[Message, ...]) -> Walk:
        walk = Walk(fingerprint)
        index = 0
        while index < len(messages):
            message = messages[index]
            if message.role == "assistant":
                index += self._step(walk, messages, index)
            else:
                walk.digest = chain_step(walk.digest, message)
                index += 1
        return walk

    def _step(self, walk: Walk, messages: tuple[Message, ...], index: int) -> int:
        """Past an answer; how many messages it takes, for some harnesses send one answer as several."""
        run = index + 1
        while run < len(messages) and messages[run].role == "assistant":
            run += 1
        for end in range(run, index + 1, -1):
            whole = _merged(messages[index:end])
            # What is put together must be an answer of ours word for word: an id alone could swallow a message
            # that stands behind it.
            if (node := self._newest(chain_step(walk.digest, whole))) is not None:
                _stand(walk, node, end, by_anchor=self._named(whole) is node)
                return end - index
        message = messages[index]
        plain = chain_step(walk.digest, message)
        named = self._named(message)
        # Everything before this message is what the node was asked with, so its id alone settles the match:
        # harnesses re-serialise arguments and drop reasoning, and the recorded ids are the truth either way.
        if named is not None and named.context_hash == walk.digest:
            walk.rewritten |= named.chain_hash != plain
            _stand(walk, named, index + 1, by_anchor=True)
        elif (node := self._newest(plain)) is not None:
            _stand(walk, node, index + 1, by_anchor=False)
        else:
            walk.digest = plain
            walk.ours_outside |= named is not None or _alone(message) in self._served
        return 1

    def _named(self, message: Message) -> Node | None:
        if message.anchor and (node := self._by_anchor.get(message.anchor)):
            return node
        for call in message.tool_calls:
            found = ANCHOR.search(call.id)
            if found and (node := self._by_anchor.get(found[1])):
                return node
        return None

    def _newest(self, chain_hash: bytes) -> Node | None:
        """Of equal answers to an equal question, the one a client holds; else the last."""
        nodes = self._by_chain.get(chain_hash)
        return max(reversed(nodes), key=lambda node: node.delivered) if nodes else None

    def _reason(self, walk: Walk, fingerprint: bytes, messages: tuple[Message, ...]) -> str:
        if walk.parent is not None:
            return "edited" if walk.ours_outside else "anchor" if walk.by_anchor else "exact"
        if not any(message.role == "assistant" for message in messages):
            return "root"
        if any(self._walk(other, messages).parent for other in self._fingerprints - {fingerprint}):
            return "tools_changed"
        return "edited" if walk.ours_outside else "no_match"


def _stand(walk: Walk, node: Node, appended: int, *, by_anchor: bool) -> None:
    walk.digest, walk.parent, walk.by_anchor, walk.appended = node.chain_hash, node, by_anchor, appended
    walk.ours_outside = False


def _merged(parts: tuple[Message, ...]) -> Message:
    return Message(
        "assistant",
        "\n".join(part.content for part in parts),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        anchor=next((part.anchor for part in parts if part.anchor), None),
    )


def _head(messages: tuple[Message, ...]) -> bytes:
    """Names the system messages if any of them tells the time."""
    texts = [message.content for message in messages if message.role == "system"]
    if all(steady(text) == text for text in texts):
        return b""
    return hashlib.blake2b("\0".join(texts).encode(), digest_size=8).digest()


def _begins_anew(history: str, appended: tuple[Message, ...]) -> bool:
    """Whether a history policy follows the template here, which may print earlier turns differently."""
    return history == "template" or (history == "tool_cycle" and any(each.role == "user" for each in appended))


def _as_root(place: Place, *flags: str) -> Place:
    return replace(place, parent=None, reason="template_history", appended=0, flags=(*place.flags, *flags))


def _cut(ids: Ids, trim: int) -> Ids:
    return ids[: len(ids) - trim]


def _alone(message: Message) -> bytes:
    return hashlib.blake2b(message.canonical(), digest_size=16).digest()


def make_node(
    completion_id: str,
    place: Place,
    served: Message,
    *,
    prompt_len: int,
    suffix_ids: Ids,
    output_ids: Ids,
    body_hash: bytes,
    trim: int = 0,
) -> Node:
    """The node of a call that has just been answered."""
    return Node(
        id=completion_id,
        parent_id=place.parent.id if place.parent else None,
        fingerprint=place.fingerprint,
        context_hash=place.context_hash,
        chain_hash=chain_step(place.context_hash, served),
        served=_alone(served),
        prompt_len=prompt_len,
        suffix_ids=suffix_ids,
        output_ids=output_ids,
        body_hash=body_hash,
        delivered=False,
        head=place.head,
        trim=trim,
    )
