"""Real model families, by the `renderers` library: Qwen3 and its heirs, GLM, gpt-oss, Kimi, DeepSeek, MiniMax and more.

The library prints and reads; this file hands it Polar's messages and takes ids and messages back, over nothing but
a tokenizer.json. Which family a folder wants is `families`' affair, that content spells no control token `guard`'s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from polar.errors import HarnessError, SpecError
from polar.messages import Message, Tool, ToolCall
from polar.renderers.base import TAIL, Bridge, Parsed, Renderer, TextPieces
from polar.renderers.chatml import DECODER, read_object
from polar.renderers.early import early_parts
from polar.renderers.families import LOOK, PROBES, THINKING_ALOUD, eos_of, families, family_by_name, named_in, printed
from polar.renderers.guard import MARK, GuardedTokenizer
from polar.renderers.layout import Vocabulary
from polar.renderers.packaged_pieces import THINKING, LibraryPieces

FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError, OSError, ImportError)
"""What the library raises where a family cannot be had, or a history cannot be printed or read."""
REWRITTEN_STOPS = {"gpt-oss": ("<|return|>", "<|end|>")}
"""Stops that a family's history spells differently, which the library leaves as they were sampled."""
OPENER_STOPS = ("glm-",)
"""Families whose stops are the openers of the next turn: a sampled one that does not fit what follows goes."""
OPENERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
HARMONY = {"gpt-oss": "<|channel|>"}
"""Families whose encoder is looked for on the network, which is not done for a tokenizer that lacks this token."""
INDEX = re.compile(r"_(\d+)$")


class LibraryRenderer(Renderer):
    """One family of the library on one tokenizer's folder."""

    def __init__(self, folder: Path, family: str | None = None, model: str | None = None) -> None:
        """`model` is the name that the engine serves: a few families differ by it. Raises SpecError."""
        family = family or family_of(folder, model)
        if family is None:
            raise SpecError.at("renderer", f"no family of the library fits {folder}; name one of {_names()}")
        if family not in families():
            raise SpecError.at("renderer", f"no renderer is called {family!r}; the library's families are {_names()}")
        self.name = family  # type: ignore[misc]
        self.vocabulary = _vocabulary(folder)
        if family in HARMONY and HARMONY[family] not in self.vocabulary.added:
            raise SpecError.at("renderer", f"{family} does not fit {folder}: it has no token {HARMONY[family]}")
        name = model if model and family_by_name(model) else named_in(folder) or model or folder.name
        self._tokenizer = GuardedTokenizer(self.vocabulary, name, eos_of(folder))
        try:
            from renderers import create_renderer

            # Where our ledger splices sampled turns, reasoning included, the library must not refuse to.
            config = families()[family](thinking_retention="all")
            self._library = create_renderer(self._tokenizer, config)
            self._stops = frozenset(self._library.get_stop_token_ids())
            self._opening = self._generation_prompt()
            self._learn_layout()
        except FAULTS as error:
            reason = str(error) or type(error).__name__
            if family in HARMONY:
                reason += "; without a network, set TIKTOKEN_ENCODINGS_BASE to a folder with o200k_base.tiktoken"
            raise SpecError.at("renderer", f"{family} does not fit {folder}: {reason}") from error

    @classmethod
    def fits(cls, folder: Path) -> bool:
        return family_of(folder, None) is not None

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stops

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> list[int]:
        if not messages:
            return list(self._opening)
        try:
            return list(
                self._library.render_ids(self._rows(messages), tools=self._tools(tools), add_generation_prompt=True)
            )
        except FAULTS as error:
            raise HarnessError(f"{self.name} cannot print this history: {error}", code="render_refused") from error

    def bridge(
        self,
        output_ids: list[int],
        appended: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Bridge | None:
        before = [*(list(prompt_ids[-TAIL:]) or self._opening), *output_ids]
        tail = len(before) - len(output_ids)
        try:
            rows = self._answers(output_ids, self._rows(appended), before[:tail])
            grown = self._library.bridge_to_next_turn(before[:tail], list(output_ids), rows, tools=self._tools(tools))
        except FAULTS:
            return None
        if grown is None:
            return None
        ids = list(grown.token_ids)
        pairs = zip(before, ids, strict=False)
        kept = next((place for place, (old, new) in enumerate(pairs) if old != new), min(len(before), len(ids)))
        if kept < tail:
            return None
        return self._joined(output_ids, Bridge(ids[kept:], len(before) - kept))

    def parse(self, output_ids: list[int], tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> Parsed:
        prompt = list(prompt_ids[-TAIL:]) or self._opening
        try:
            return self._parsed(output_ids, tools, prompt)
        except (*FAULTS, RecursionError):
            text = self.vocabulary.decode([token for token in output_ids if token not in self._stops])
            return Parsed(Message("assistant", text.strip()), ("malformed_tool_call",))

    def pieces(self, tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> TextPieces:
        return self.pieces_of(tools, prompt_ids, early_parts(self, bool(tools)))

    def pieces_of(self, tools: tuple[Tool, ...], prompt_ids: Sequence[int], early: frozenset[str]) -> LibraryPieces:
        """A reader that shows these parts early, whether or not that is safe."""

        def read(ids: list[int]) -> Parsed:
            return self.parse(ids, tools, prompt_ids)

        return LibraryPieces(self.vocabulary, read, early, self._stops)

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)

    def size(self) -> int:
        return self.vocabulary.size()

    def count(self, text: str) -> int:
        return len(self.vocabulary.plain(text))

    def matches(self, folder: Path) -> bool:
        """Whether the folder's own chat template prints what this family prints."""
        for messages, offers in PROBES:
            tools = [LOOK] if offers else None
            expected = printed(folder, messages, tools)
            try:
                ids = self._library.render_ids(messages, tools=tools, add_generation_prompt=True)
            except FAULTS:
                return False
            if expected is None or self.vocabulary.decode(list(ids)) != expected:
                return False
        return True

    def _generation_prompt(self) -> list[int]:
        rows: Any = [{"role": "user", "content": "a"}]
        without = self._library.render_ids(rows)
        return list(self._library.render_ids(rows, add_generation_prompt=True))[len(without) :]

    def _learn_layout(self) -> None:
        """See which tokens the layout prints, and whether marks in content are taken out again."""
        printed_ids: set[int] = set(self._stops)
        printed_ids.update(self.vocabulary.added[mark] for mark in THINKING if mark in self.vocabulary.added)
        for messages, offers in (*PROBES, THINKING_ALOUD):
            rows: Any = messages
            printed_ids.update(self._library.render_ids(rows, tools=[LOOK] if offers else None))
        self._tokenizer.watch(printed_ids)
        spelled = self._tokenizer.guard("".join(self.vocabulary.added))
        shown = self._library.render_ids([{"role": "user", "content": spelled}])
        if MARK in self.vocabulary.decode(list(shown)):
            self._tokenizer.unwatch()

    def _rows(self, messages: tuple[Message, ...]) -> list[Any]:
        guard = self._tokenizer.guard
        rows: list[dict[str, Any]] = []
        names: dict[str, str] = {}
        for message in messages:
            row: dict[str, Any] = {"role": message.role, "content": guard(message.content)}
            if message.reasoning:
                row["reasoning_content"] = guard(message.reasoning)
            if message.tool_calls:
                # Some families print a call's id, in a form of their own that ours would only blur.
                names |= {call.id: f"functions.{call.name}:{len(names)}" for call in message.tool_calls}
                row["tool_calls"] = [
                    {
                        "id": guard(names[call.id]),
                        "type": "function",
                        "function": {"name": guard(call.name), "arguments": guard(_value(call.arguments))},
                    }
                    for call in message.tool_calls
                ]
            if message.tool_call_id:
                row["tool_call_id"] = guard(names.get(message.tool_call_id, message.tool_call_id))
            if message.name:
                row["name"] = guard(message.name)
            rows.append(row)
        return rows

    def _tools(self, tools: tuple[Tool, ...]) -> list[Any] | None:
        return [{"type": "function", "function": self._tokenizer.guard(_function(tool))} for tool in tools] or None

    def _answers(self, output_ids: list[int], rows: list[Any], prompt: list[int]) -> list[Any]:
        """Rows in which tool results name the calls they answer by the ids that the model itself wrote, if it did."""
        if not any(row["role"] == "tool" for row in rows):
            return rows
        calls = self._library.parse_response(list(output_ids), prompt_ids=prompt).tool_calls
        results = [row for row in rows if row["role"] == "tool"]
        for place, row in enumerate(results):
            found = INDEX.search(row.get("tool_call_id", ""))
            index = int(found[1]) if found else place
            if index < len(calls) and calls[index].id:
                row["tool_call_id"] = self._tokenizer.guard(calls[index].id)
        return rows

    def _joined(self, output_ids: list[int], bridge: Bridge) -> Bridge:
        """The bridge with the turn's end as the family's history spells it."""
        last, added = output_ids[-1] if output_ids else None, self.vocabulary.added
        sampled, spelled = REWRITTEN_STOPS.get(self.name, ("", ""))
        if last is not None and last == added.get(sampled) and bridge.trim == 0:
            return Bridge([added[spelled], *bridge.ids], 1)
        if not self.name.startswith(OPENER_STOPS):
            return bridge
        openers = {added[text] for text in OPENERS if text in added}
        ids = bridge.ids
        first = next((place for place, token in enumerate(ids) if token in openers), 0)
        if first and ids[first - 1] in self._stops:
            # The library closes a cut turn with the end of text, which this history never prints.
            ids = [*ids[: first - 1], *ids[first:]]
        if last in self._stops and ids[0] in openers and bridge.trim == 0:
            return Bridge(ids, 1)
        return Bridge(ids, bridge.trim)

    def _parsed(self, output_ids: list[int], tools: tuple[Tool, ...], prompt: list[int]) -> Parsed:
        functions: Any = [{"type": "function", "function": _function(tool)} for tool in tools] or None
        read = self._library.parse_response(list(output_ids), tools=functions, prompt_ids=prompt)
        flags = []
        if read.reasoning_complete is False:
            flags.append("unclosed_reasoning")
        text, calls = [read.content], []
        for attempt in read.tool_calls:
            call = _call(attempt) if tools else None
            if call is not None:
                calls.append(call)
                continue
            span = attempt.token_span
            text.append(self.vocabulary.decode(list(output_ids[span[0] : span[1]])) if span else attempt.raw)
            if tools:
                flags.append("malformed_tool_call")
        content = "\n".join(part for part in text if part).strip()
        reasoning = (read.reasoning_content or "").strip() or None
        return Parsed(Message("assistant", content, reasoning, tuple(calls)), tuple(dict.fromkeys(flags)))


@lru_cache(maxsize=4)
def _vocabulary(folder: Path) -> Vocabulary:
    """A large tokenizer takes seconds to read, and many families may be tried on it."""
    return Vocabulary(folder)


@cache
def family_of(folder: Path, model: str | None) -> str | None:
    """The family that a model's name or a folder's own template says, None if neither does. Raises SpecError if the
    library is not there."""
    for name in (model, named_in(folder)):
        if (family := family_by_name(name)) is not None:
            return family
    if printed(folder, PROBES[0][0], None) is None:
        return None
    for family in families():
        try:
            renderer = LibraryRenderer(folder, family, model)
        except SpecError:
            continue
        if renderer.matches(folder):
            return family
    return None


def _names() -> str:
    return ", ".join(families())


def _function(tool: Tool) -> dict[str, Any]:
    return tool.raw or {"name": tool.name, "description": tool.description, "parameters": tool.parameters}


def _value(arguments: str) -> Any:
    """Arguments as templates want them: an object, or the text that is none."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _call(attempt: Any) -> ToolCall | None:
    """A read attempt as a call, with its arguments as they were written where the family writes JSON."""
    name, value = attempt.name, attempt.arguments
    served = attempt.status in ("ok", "unknown_tool") or (attempt.status == "invalid_json" and isinstance(value, dict))
    if not served or not isinstance(name, str) or not name:
        return None
    name.encode()
    if isinstance(value, str):
        return ToolCall("", name, value) if isinstance(_strict(value), dict) else None
    if not isinstance(value, dict):
        return None
    return ToolCall("", name, _as_written(attempt.raw, value) or _printed(value))


def _as_written(raw: str, value: dict[str, Any]) -> str | None:
    """The part of a call's own text that is this value."""
    place = raw.find("{")
    while place >= 0:
        try:
            spans, end = read_object(raw, place)
        except (ValueError, RecursionError):
            spans, end = {}, place
        candidates = [raw[place:end], *(text for _, text in spans.values())]
        found = next((text for text in candidates if text.startswith("{") and _strict(text) == value), None)
        if found is not None:
            return found
        place = raw.find("{", place + 1)
    return None


def _strict(text: str) -> Any:
    """The value of a JSON text, None if it is not strictly one."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _printed(value: dict[str, Any]) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text
