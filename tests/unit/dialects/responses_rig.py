"""What tests of the Responses dialect share: tools, items, answers, and events that are checked as they come."""

from __future__ import annotations

from typing import Any

import orjson
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from polar.dialects.base import Earlier
from polar.dialects.openai_responses import OpenAIResponses
from polar.messages import Answer, FinishReason, Message, ModelRequest, ToolCall

DIALECT = OpenAIResponses()
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HEX, OTHER = "0123456789abcdef01234567", "89abcdef0123456789abcdef"
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Patch.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
GROUP = {"type": "namespace", "name": "team", "description": "Others.", "tools": [{"type": "function", "name": "ask"}]}
BUILT_IN = [{"type": "local_shell"}, {"type": "shell"}, {"type": "apply_patch"}]
TOOLS = [LOOK, PATCH, GROUP, *BUILT_IN]


def parse(items: Any, **fields: Any) -> ModelRequest:
    """A request with this input."""
    return DIALECT.parse({"model": "m", "input": items, **fields}, {})


def text(role: str, said: str) -> dict[str, Any]:
    """A message item."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": said}]}


def call(index: int, completion: str = HEX, **fields: Any) -> dict[str, Any]:
    """A function call item of one of our answers."""
    ids = {"id": f"fc_{completion}_{index}", "call_id": f"call_{completion}_{index}"}
    return {"type": "function_call", **ids, "name": "look", "arguments": "{}", **fields}


def output(index: int, said: Any, completion: str = HEX, kind: str = "function_call") -> dict[str, Any]:
    """What a tool answered to it."""
    return {"type": f"{kind}_output", "call_id": f"call_{completion}_{index}", "output": said}


def answer(said: str = "", *calls: ToolCall, finish: FinishReason = "stop", **fields: Any) -> Answer:
    """An answer of completion HEX."""
    reasoning = fields.pop("reasoning", None)
    return Answer(f"cmp-{HEX}", "m", Message("assistant", said, reasoning, calls), finish, 5, 2, 1, **fields)


def streamed(request: ModelRequest, given: Answer) -> list[dict[str, Any]]:
    """The events of an answer, each of them valid, numbered and named."""
    stream = DIALECT.open_stream(request, given.id)
    events = []
    for number, raw in enumerate([*stream.finish([given]), *stream.last([given])]):
        name, data = raw.decode().removesuffix("\n\n").split("\n")
        event = orjson.loads(data.removeprefix("data: "))
        EVENT.validate_python(event, strict=True)
        assert (name, event["sequence_number"]) == (f"event: {event['type']}", number)
        events.append(event)
    return events


def earlier(body: dict[str, Any], given: Answer) -> Earlier:
    """A recorded call."""
    answered = DIALECT.answer(DIALECT.parse(body, {}), [given])
    return Earlier(orjson.dumps(body), orjson.dumps(answered))
