"""Answers and streams of Google generateContent, which google-genai's own types accept, every field of them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from google.genai import types

from polar.dialects import seals
from polar.dialects.google_generate import GoogleGenerate
from polar.messages import Answer, FinishReason, Message, ModelRequest, ToolCall

DIALECT = GoogleGenerate()
ID = "cmp-0123456789abcdef01234567"
CALL = ToolCall("call_0123456789abcdef01234567_0", "look", '{"a": 1}')
OTHER = ToolCall("call_0123456789abcdef01234567_1", "look", '{"a": 2}')
USER = {"role": "user", "parts": [{"text": "a"}]}


def parse(contents: Any, params: dict[str, str] | None = None, **more: Any) -> ModelRequest:
    """A request with these contents."""
    return DIALECT.parse({"contents": contents, **more}, {"model": "m", "alt": "sse", **(params or {})})


def answer(message: Message, finish: FinishReason = "stop", **fields: Any) -> Answer:
    """An answer with this message."""
    return Answer(ID, "m", message, finish, 5, 7, 1, **fields)


def asking(*, thoughts: bool = False, **more: Any) -> ModelRequest:
    """A request that wants its thoughts shown, or not."""
    return parse([USER], generationConfig={"thinkingConfig": {"includeThoughts": thoughts}}, **more)


def checked(body: dict[str, Any]) -> types.GenerateContentResponse:
    """A response that has no field which Google's client does not know."""
    return types.GenerateContentResponse.model_validate(body)


def test_an_answer_with_everything() -> None:
    """Thoughts if they were asked for, text, calls with our ids, the signature on the first call, exact usage."""
    message = Message("assistant", "Let me.", "I see.", (CALL, OTHER))
    given = answer(message, "tool_calls", reasoning_tokens=3, cached_tokens=2)
    shown = checked(DIALECT.answer(asking(thoughts=True), [given]))
    thought, text, first, second = shown.candidates[0].content.parts
    assert (thought.text, thought.thought, text.text) == ("I see.", True, "Let me.")
    assert (first.function_call.id, first.function_call.args) == (CALL.id, {"a": 1})
    assert second.thought_signature is None
    assert seals.unseal(base64.b64encode(first.thought_signature).decode()) == seals.Seal(ID[4:], "I see.")
    assert (shown.candidates[0].finish_reason, shown.model_version) == (types.FinishReason.STOP, "m")
    usage = shown.usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count, usage.thoughts_token_count) == (5, 4, 3)
    assert (usage.cached_content_token_count, usage.total_token_count) == (2, 12)
    hidden = checked(DIALECT.answer(asking(), [given]))
    assert [part.text for part in hidden.candidates[0].content.parts] == ["Let me.", None, None]


@pytest.mark.parametrize(
    ("message", "finish", "reason"),
    [
        (Message("assistant", ""), "stop", "STOP"),
        (Message("assistant", "", "only thoughts"), "length", "MAX_TOKENS"),
        (Message("assistant", "text"), "abort", "OTHER"),
    ],
)
def test_an_answer_without_calls_signs_its_text(message: Message, finish: FinishReason, reason: str) -> None:
    """There is always a part, and a signature on it."""
    (candidate,) = checked(DIALECT.answer(asking(), [answer(message, finish)])).candidates
    (part,) = candidate.content.parts
    assert (part.text, candidate.finish_reason) == (message.content, types.FinishReason(reason))
    sealed = seals.unseal(base64.b64encode(part.thought_signature).decode())
    assert sealed == seals.Seal(ID[4:], message.reasoning or "")


def test_arguments_are_always_an_object() -> None:
    """This wire has no other arguments, so what is none is wrapped and not lost."""
    call = ToolCall("c", "look", "[1")
    (candidate,) = checked(DIALECT.answer(asking(), [answer(Message("assistant", tool_calls=(call,)))])).candidates
    assert candidate.content.parts[0].function_call.args == {"arguments": "[1"}


def test_logprobs() -> None:
    """Where they were asked for, each token's is there."""
    given = answer(Message("assistant", "ab"), token_texts=("a", "b"), logprobs=(-0.5, -1.5))
    request = parse([USER], generationConfig={"responseLogprobs": True})
    (candidate,) = checked(DIALECT.answer(request, [given])).candidates
    chosen = candidate.logprobs_result.chosen_candidates
    assert [(one.token, one.log_probability) for one in chosen] == [("a", -0.5), ("b", -1.5)]
    assert candidate.avg_logprobs == -1.0


def events(request: ModelRequest, answers: list[Answer], streamed: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
    """The chunks of a stream in which these pieces left as they were sampled."""
    stream = DIALECT.open_stream(request, ID)
    sent = [*stream.start(5)]
    for kind, piece in streamed:
        sent += getattr(stream, kind)(piece)
    sent += [*stream.finish(answers), *stream.last(answers)]
    data = b"".join(sent)
    if stream.content_type.startswith(b"application/json"):
        return list(json.loads(data))
    return [json.loads(event.removeprefix("data: ")) for event in data.decode().split("\n\n") if event]


PIECES = (("reasoning", "I "), ("reasoning", "see."), ("text", "Let "), ("text", "me."), ("call", CALL))


@pytest.mark.parametrize("alt", ["sse", "json"])
@pytest.mark.parametrize("streamed", range(6))
def test_streams_hold_what_answers_hold(alt: str, streamed: int) -> None:
    """However much left early, the chunks put together are the whole answer."""
    given = answer(Message("assistant", "Let me.", "I see.", (CALL, OTHER)), "tool_calls")
    request = parse([USER], {"alt": alt}, generationConfig={"thinkingConfig": {"includeThoughts": True}})
    chunks = [checked(chunk) for chunk in events(request, [given], PIECES[:streamed])]
    parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
    assert "".join(part.text for part in parts if part.thought) == "I see."
    assert "".join(part.text or "" for part in parts if not part.thought) == "Let me."
    assert [part.function_call.id for part in parts if part.function_call] == [CALL.id, OTHER.id]
    signed = [part for part in parts if part.thought_signature]
    assert [part.function_call.id for part in signed] == [CALL.id]
    assert seals.unseal(base64.b64encode(signed[0].thought_signature).decode()) == seals.Seal(ID[4:], "I see.")
    assert [chunk.candidates[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
    assert (chunks[-1].usage_metadata.total_token_count, chunks[-1].response_id) == (12, ID[4:])


@pytest.mark.parametrize("text", ["", "Fine."])
def test_a_stream_without_calls_signs_its_last_text(text: str) -> None:
    """Clients drop empty texts, so the signature is on one that is not, if there is one."""
    chunks = events(asking(), [answer(Message("assistant", text))], tuple(("text", c) for c in text))
    (part,) = chunks[-1]["candidates"][0]["content"]["parts"]
    assert part["text"] == text[-1:]
    assert "thoughtSignature" in part
    assert "".join(chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks) == text


def test_several_candidates_in_one_stream() -> None:
    """Each has its own text, signature and end, and usage is told once."""
    one, two = Message("assistant", "one", "r"), Message("assistant", "two", tool_calls=(CALL,))
    answers = [answer(one), Answer("cmp-" + "f" * 24, "m", two, "tool_calls", 5, 7, 1)]
    chunks = events(parse([USER], generationConfig={"candidateCount": 2}), answers, (("text", "on"),))
    texts, signed = {0: "", 1: ""}, []
    for chunk in chunks:
        (candidate,) = checked(chunk).candidates
        for part in candidate.content.parts:
            texts[candidate.index] += part.text or ""
            signed += [(candidate.index, part.thought_signature)] if part.thought_signature else []
    assert texts == {0: "one", 1: "two"}
    anchors = sorted((index, seals.unseal(base64.b64encode(value).decode()).anchor) for index, value in signed)
    assert anchors == [(0, ID[4:]), (1, "f" * 24)]
    assert [chunk["usageMetadata"]["totalTokenCount"] for chunk in chunks if "usageMetadata" in chunk] == [19]


def test_an_array_that_breaks_off_is_still_json() -> None:
    """Without alt=sse an error is one more element, whether or not there is one before it."""
    for pieces in ((), (("text", "a"), ("text", "b"))):
        stream = DIALECT.open_stream(parse([USER], {"alt": "json"}), ID)
        sent = [DIALECT.keepalive, *stream.start(5)]
        for kind, piece in pieces:
            sent += [*getattr(stream, kind)(piece), DIALECT.keepalive]
        sent.append(stream.broken(DIALECT, 503, "engine_down", "gone"))
        elements = json.loads(b"".join(sent))
        assert elements[-1]["error"]["status"] == "UNAVAILABLE"
        assert len(elements) == 1 + bool(pieces)
