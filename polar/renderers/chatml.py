"""ChatML with JSON tool calls: the layout of the tiny model, in the manner of Qwen and Hermes.

Owns the layout and its inverse. A sampled turn is read here and never printed again: that the ledger splices
ids, and not this file, is what keeps prompts exact.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from polar.errors import SpecError
from polar.messages import Message, Tool, ToolCall
from polar.renderers.base import Bridge, Parsed, Piece, Renderer, TextPieces
from polar.renderers.layout import Detokenizer, Vocabulary, held_back

OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_RESULT, CLOSE_RESULT = "<tool_response>", "</tool_response>"
HOW_TO_CALL = ("\nCall a tool with ", OPEN_CALL, '\n{"name": <name>, "arguments": <object>}\n', CLOSE_CALL)
Part = str | int
SPACE = " \t\r\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


class ChatMLRenderer(Renderer):
    """`<|im_start|>role … <|im_end|>`, tool calls and reasoning in tags."""

    name = "chatml"

    def __init__(self, folder: Path) -> None:
        self.vocabulary = Vocabulary(folder)
        added = self.vocabulary.added
        if "<|im_start|>" not in added or "<|im_end|>" not in added:
            raise SpecError.at("renderer", f"chatml needs <|im_start|> and <|im_end|> in {folder}/tokenizer.json")
        self._start, self._end = added["<|im_start|>"], added["<|im_end|>"]
        tags = (OPEN_CALL, CLOSE_CALL, OPEN_THINK, CLOSE_THINK, OPEN_RESULT, CLOSE_RESULT)
        self._tags: dict[str, Part] = {tag: added.get(tag, tag) for tag in tags}
        self._stops = frozenset(added[text] for text in ("<|im_end|>", "<|endoftext|>") if text in added)

    @classmethod
    def fits(cls, folder: Path) -> bool:
        try:
            template = (folder / "chat_template.jinja").read_text()
        except OSError:
            return False
        return "\\nCall a tool with <tool_call>\\n" in template and "<|im_start|>" in template

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._stops

    def render(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> list[int]:
        parts: list[Part] = []
        system, rest = "", messages
        if messages and messages[0].role == "system":
            system, rest = messages[0].content, messages[1:]
        if tools:
            parts += self._turn("system", f"{system}\n\n# Tools\n" if system else "# Tools\n", close=False)
            parts += [_declaration(tool) + "\n" for tool in tools]
            parts += [self._tags.get(part, part) for part in HOW_TO_CALL]
            parts += [self._end, "\n"]
        elif len(rest) < len(messages):
            parts += self._turn("system", system)
        return self.vocabulary.encode([*parts, *self._conversation(rest)])

    def bridge(
        self,
        output_ids: list[int],
        appended: tuple[Message, ...],
        tools: tuple[Tool, ...] = (),
        prompt_ids: Sequence[int] = (),
    ) -> Bridge:
        parts: list[Part] = []
        if not output_ids or output_ids[-1] not in self._stops:
            if _thinking(self.vocabulary.decode(output_ids)):
                parts += ["\n", self._tags[CLOSE_THINK], "\n\n"]
            parts.append(self._end)
        return Bridge(self.vocabulary.encode([*parts, "\n", *self._conversation(appended)]))

    def _conversation(self, messages: tuple[Message, ...]) -> Iterator[Part]:
        for index, message in enumerate(messages):
            if message.role == "assistant":
                yield from self._assistant(message)
            elif message.role == "tool":
                first = index == 0 or messages[index - 1].role != "tool"
                last = index + 1 == len(messages) or messages[index + 1].role != "tool"
                if first:
                    yield from self._turn("user", "", close=False)
                else:
                    yield "\n"
                yield self._tags[OPEN_RESULT]
                yield f"\n{message.content}\n"
                yield self._tags[CLOSE_RESULT]
                if last:
                    yield self._end
                    yield "\n"
            else:
                yield from self._turn(message.role, message.content)
        yield from self._turn("assistant", "", close=False)

    def _turn(self, role: str, content: str, *, close: bool = True) -> list[Part]:
        opened: list[Part] = [self._start, f"{role}\n{content}"]
        return [*opened, self._end, "\n"] if close else opened

    def _assistant(self, message: Message) -> Iterator[Part]:
        yield from self._turn("assistant", "", close=False)
        if message.reasoning:
            yield self._tags[OPEN_THINK]
            yield f"\n{message.reasoning}\n"
            yield self._tags[CLOSE_THINK]
            yield "\n\n"
        yield message.content
        for index, call in enumerate(message.tool_calls):
            yield "\n" if index or message.content else ""
            name = json.dumps(call.name, ensure_ascii=False)
            yield self._tags[OPEN_CALL]
            yield f'\n{{"name": {name}, "arguments": {_printed(call.arguments)}}}\n'
            yield self._tags[CLOSE_CALL]
        yield self._end
        yield "\n"

    def parse(self, output_ids: list[int], tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> Parsed:
        ids = output_ids
        while ids and ids[-1] in self._stops:
            ids = ids[:-1]
        text = self.vocabulary.decode(ids)
        flags = []
        reasoning, text, closed = split_reasoning(text)
        if not closed:
            flags.append("unclosed_reasoning")
        calls: list[ToolCall] = []
        if tools:
            text, calls, malformed = split_calls(text)
            if malformed:
                flags.append("malformed_tool_call")
        message = Message("assistant", text, reasoning, tuple(calls))
        return Parsed(message, tuple(flags))

    def pieces(self, tools: tuple[Tool, ...], prompt_ids: Sequence[int] = ()) -> TextPieces:
        return ChatMLPieces(self, calls=bool(tools))

    def decode(self, ids: list[int]) -> str:
        return self.vocabulary.decode(ids)

    def size(self) -> int:
        return self.vocabulary.size()

    def count(self, text: str) -> int:
        return len(self.vocabulary.plain(text))


class ChatMLPieces(TextPieces):
    """Reasoning first, then text up to the first tool call, then each call once it is closed; the same cuts as `parse`
    makes. What comes after a call and is none is left to `parse`."""

    def __init__(self, renderer: ChatMLRenderer, *, calls: bool) -> None:
        self._stops = renderer.stop_ids
        self._detokenizer = Detokenizer(renderer.vocabulary)
        self._marks = (OPEN_CALL,) if calls else ()
        self._part: Literal["start", "reasoning", "gap", "text", "call", "between", "done"] = "start"
        self._text = ""

    def feed(self, ids: list[int]) -> list[Piece]:
        self._text += self._detokenizer.feed([token for token in ids if token not in self._stops])
        found: list[Piece] = []
        if self._part == "start":
            self._open()
        if self._part == "reasoning" and (piece := self._take((CLOSE_THINK,), "gap")):
            found.append(("reasoning", piece))
        if self._part == "gap":
            self._text = self._text.lstrip(SPACE)
            self._part = "text" if self._text else "gap"
        if self._part == "text" and (piece := self._take(self._marks, "call")):
            found.append(("text", piece))
        while self._part == "call" and CLOSE_CALL in self._text:
            found += self._next_call()
            self._look_on()
        self._look_on()
        return found

    def _next_call(self) -> list[Piece]:
        """The call whose opening tag has been taken off, which has a closing tag somewhere after it."""
        read = read_call(self._text, 0)
        if read is None:
            # A closing tag inside an argument is not the call's; a later one may be.
            self._part = "done"
            return []
        call, end = read
        self._text, self._part = self._text[end:], "between"
        return [call]

    def _look_on(self) -> None:
        """Whether what follows a call is another one."""
        begun = self._text.lstrip(SPACE)
        if self._part != "between":
            return
        if begun.startswith(OPEN_CALL):
            self._text, self._part = begun.removeprefix(OPEN_CALL), "call"
        elif not OPEN_CALL.startswith(begun):
            self._part = "done"

    def _open(self) -> None:
        begun = self._text.lstrip(SPACE)
        if begun.startswith(OPEN_THINK):
            rest = begun.removeprefix(OPEN_THINK).lstrip(SPACE)
            if rest:
                self._text, self._part = rest, "reasoning"
        elif begun and not OPEN_THINK.startswith(begun):
            self._part = "text"

    def _take(self, marks: tuple[str, ...], following: Literal["gap", "call"]) -> str:
        """What is certain before the first of `marks`; space before a mark belongs to neither side."""
        for mark in marks:
            before, found, after = self._text.partition(mark)
            if found:
                self._text, self._part = after, following
                return before.rstrip(SPACE)
        certain = self._text[: len(self._text) - held_back(self._text, marks)].rstrip(SPACE)
        self._text = self._text[len(certain) :]
        return certain


def split_reasoning(text: str) -> tuple[str | None, str, bool]:
    """Reasoning, the rest, and whether the reasoning was closed."""
    begun = text.lstrip(SPACE)
    if not begun.startswith(OPEN_THINK):
        return None, text, True
    reasoning, closed, rest = begun.removeprefix(OPEN_THINK).partition(CLOSE_THINK)
    return reasoning.strip(SPACE), rest.lstrip(SPACE), bool(closed)


def split_calls(text: str) -> tuple[str, list[ToolCall], bool]:
    """Content, the calls in it, and whether something looked like a call and was none."""
    kept: list[str] = []
    calls: list[ToolCall] = []
    malformed = False
    place = 0
    while (start := text.find(OPEN_CALL, place)) >= 0:
        read = read_call(text, start + len(OPEN_CALL))
        if read is None:
            malformed = True
            end = start + len(OPEN_CALL)
            kept.append(text[place:end])
        else:
            call, end = read
            kept.append(text[place:start].rstrip(SPACE))
            calls.append(call)
        place = end
    tail = text[place:]
    kept.append(tail if not calls else tail.rstrip(SPACE))
    return "".join(kept), calls, malformed


def read_call(text: str, place: int) -> tuple[ToolCall, int] | None:
    """The call whose JSON begins at `place`, and where it ends; None if it is not one."""
    try:
        spans, end = read_object(text, _skip(text, place))
        name, _ = spans.get("name", (None, ""))
        value, written = spans.get("arguments", ({}, "{}"))
        if not isinstance(name, str) or not name.encode() or not isinstance(value, dict):
            return None
    except (ValueError, RecursionError):
        # A name of half a surrogate pair and brackets nested ten thousand deep are both within a sampler's reach.
        return None
    end = _skip(text, end)
    if not text.startswith(CLOSE_CALL, end):
        return None
    return ToolCall("", name, written), end + len(CLOSE_CALL)


def read_object(text: str, place: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """A JSON object's values, each with its exact text, and where the object ends. Raises ValueError.

    The standard decoder forgets how a value was written; a harness must be served what the model wrote."""
    if not text.startswith("{", place):
        raise ValueError("not an object")
    spans: dict[str, tuple[Any, str]] = {}
    place = _skip(text, place + 1)
    while not text.startswith("}", place):
        key, place = DECODER.raw_decode(text, place)
        place = _skip(text, place)
        if not isinstance(key, str) or not text.startswith(":", place):
            raise ValueError("not a key")
        start = _skip(text, place + 1)
        value, place = DECODER.raw_decode(text, start)
        spans[key] = (value, text[start:place])
        place = _skip(text, place)
        if text.startswith(",", place):
            place = _skip(text, place + 1)
        elif not text.startswith("}", place):
            raise ValueError("not the end of a value")
    return spans, place + 1


def _skip(text: str, place: int) -> int:
    while place < len(text) and text[place] in SPACE:
        place += 1
    return place


def _thinking(text: str) -> bool:
    return not split_reasoning(text)[2]


def _printed(arguments: str) -> str:
    """Arguments as the template prints them: an object in its spacing, anything else as it came."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else arguments


def _declaration(tool: Tool) -> str:
    function = tool.raw or {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return json.dumps(function, separators=(",", ":"), ensure_ascii=False)
