"""OpenAI Responses: `/v1/responses` with what belongs to it.

Stored responses are the session's own completions: a conversation that a request only names is put in its place
before anything else is done with it. Items are read in `responses_input`, tools in `responses_tools`; answers are
made in `responses_output` and streamed by `responses_stream`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from polar.dialects import openai_wire, responses_output, responses_tools, seals
from polar.dialects.base import BadRequest, Dialect, Earlier, Route, Stream, sse
from polar.dialects.reading import ANY_OBJECT, flag, integer, listed, mapping, number, required, string, wrong
from polar.dialects.responses_input import TRIGGER, Conversation, items_of, kept, not_stored, reference, summarises
from polar.dialects.responses_stream import ResponsesStream
from polar.messages import Answer, Message, ModelRequest, Sampling, Tool

MAX_TOKENS = 2**31 - 1
PAGE, LONGEST_PAGE = 20, 100
SUMMARISE = (
    "The conversation so far is about to be replaced by a summary of it, which you now write. Whoever goes on reads "
    "nothing but the user's messages and this summary, so state what was asked and which limits were set, what has "
    "been done and decided and why, what was found out (files, commands, names and values, word for word where they "
    "matter), what failed, and what is to be done next. Do not go on with the task itself, and call no tool."
)
COUNT, COMPACT = {"operation": "count"}, {"operation": "compact"}
PATHS: tuple[tuple[str, str, str, Mapping[str, str]], ...] = (
    ("POST", "", "generate", {}),
    ("GET", "", "no_socket", {}),
    ("POST", "/input_tokens", "count", COUNT),
    ("POST", "/compact", "generate", COMPACT),
    ("GET", "/{id}", "response", {}),
    ("DELETE", "/{id}", "forget", {}),
    ("GET", "/{id}/input_items", "input_items", {}),
    ("POST", "/{id}/cancel", "cancel", {}),
)
ABSENT: Mapping[str, str] = {
    "conversation": "conversations are not kept here; use previous_response_id, or send the whole input",
    "prompt": "stored prompt templates are not known here; send instructions and input",
}
UNHEEDED = ("context_management", "max_tool_calls", "top_logprobs")
"""Asked for and not done; kept on the completion as marks."""


class OpenAIResponses(Dialect):
    """See the module."""

    name = "openai_responses"
    routes = tuple(
        Route(root + path, method, kind, fixed)
        for method, path, kind, fixed in PATHS
        for root in ("/v1/responses", "/responses")
    )
    keepalive = b": keep-alive\n\n"

    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return openai_wire.secret(headers)

    def parse(self, body: dict[str, Any], params: Mapping[str, str]) -> ModelRequest:
        _refuse(body)
        conversation = Conversation()
        if instructions := string(body.get("instructions"), "instructions"):
            conversation.say("system", instructions)
        items = items_of(body.get("input"))
        for index, item in enumerate(items):
            conversation.read(item, f"input[{index}]")
        messages = conversation.messages()
        if not messages:
            raise wrong("input", "must hold at least one message")
        marks = _marks(body)
        offered = responses_tools.offered(listed(body.get("tools"), "tools"), "tools", marks)
        names = {tool.name for tool in offered}
        offered += [tool for tool in conversation.tools if tool.name not in names]
        choice = responses_tools.choice(body.get("tool_choice"), offered)
        marks += ["tool_choice"] if choice not in ("auto", "none") or _narrowed(body) else []
        if summarises(items):
            messages, choice = (*messages, Message("user", SUMMARISE)), "none"
        counted = params.get("operation") == COUNT["operation"]
        return _request(body, counted, messages, offered, choice, [*marks, *conversation.marks])

    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        return responses_output.whole(request, answers[0])

    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        return ResponsesStream(request, completion_id)

    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        return openai_wire.error(status, code, message, field)

    def error_event(self, status: int, code: str, message: str) -> bytes:
        error = {"type": "error", "sequence_number": 0, "code": code, "message": message, "param": None}
        return sse(error, "error")

    def models(self, kind: str, models: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
        return openai_wire.models(kind, models, params)

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def completion_id(self, wire_id: str) -> str:
        return f"cmp-{seals.item_anchor(wire_id) or 'unknown'}"

    def cites(self, body: dict[str, Any]) -> Sequence[str]:
        cited = [string(body.get("previous_response_id"), "previous_response_id")]
        if isinstance(items := body.get("input"), list):
            cited += [id_ for item in items if (id_ := reference(item))]
        return [id_ for id_ in dict.fromkeys(cited) if id_]

    def whole(self, body: dict[str, Any], params: Mapping[str, str], cited: Mapping[str, Earlier]) -> dict[str, Any]:
        items = self._with_references(self._with_previous(body, cited), cited) if self.cites(body) else None
        if params.get("operation") == COMPACT["operation"]:
            items = items_of(body.get("input")) if items is None else items
            if not items:
                raise wrong("input", "must hold at least one message")
            return {**body, "object": responses_output.COMPACTION, "input": [*items, {"type": TRIGGER}]}
        return body if items is None else {**body, "input": items}

    def recorded(self, kind: str, wire_id: str, earlier: Earlier | None, params: Mapping[str, str]) -> dict[str, Any]:
        answered = _stored(earlier)
        if earlier is None or answered is None or answered.get("id") != wire_id:
            raise BadRequest(f"there is no stored response {wire_id!r} here", code="not_found", status=404)
        if kind == "forget":
            return {"id": wire_id, "object": "response", "deleted": True}
        if kind == "cancel":
            raise BadRequest(f"the response {wire_id!r} was not made in the background, and is finished")
        if kind == "input_items":
            return _page(items_of(earlier.asked().get("input")), params)
        if params.get("stream") in ("true", "1"):
            raise wrong("stream", "only responses made in the background can be streamed again")
        return answered

    def _with_previous(self, body: dict[str, Any], cited: Mapping[str, Earlier]) -> list[Any]:
        """The conversation that is continued, and what is new. Instructions are each request's own."""
        id_ = string(body.get("previous_response_id"), "previous_response_id")
        new = items_of(body.get("input"))
        if not id_:
            return new
        earlier = cited.get(id_)
        answered = _stored(earlier)
        if earlier is None or answered is None or answered.get("id") != id_:
            said = f"previous_response_id: there is no stored response {id_!r} in this session"
            raise BadRequest(said, field="previous_response_id", code="previous_response_not_found")
        asked = items_of(earlier.asked().get("input"))
        if answered.get("object") == responses_output.COMPACTION:
            asked = []  # the user's messages are in its output already
        elif summarises(asked):
            asked = kept(asked)
        return [*asked, *answered["output"], *new]

    def _with_references(self, items: list[Any], cited: Mapping[str, Earlier]) -> list[Any]:
        """Each item that only names another one, as that one."""
        there = [item for item in items if isinstance(item, dict) and not reference(item)]
        here = {item["id"]: item for item in there if isinstance(item.get("id"), str)}
        found = []
        for index, item in enumerate(items):
            id_ = reference(item)
            answered = _stored(cited.get(id_)) if id_ and id_ not in here else None
            for made in (answered or {}).get("output", ()):
                here.setdefault(made["id"], made)
            if id_ and id_ not in here:
                raise not_stored(f"input[{index}].id", id_)
            found.append(here[id_] if id_ else item)
        return found


def _stored(earlier: Earlier | None) -> dict[str, Any] | None:
    """The answer, if its request let it be kept for later."""
    answered = earlier.answered() if earlier else None
    return None if answered is None or answered.get("store") is False else answered


def _refuse(body: dict[str, Any]) -> None:
    for name, reason in ABSENT.items():
        if body.get(name) is not None:
            raise wrong(name, reason)
    if flag(body, "background"):
        raise wrong("background", "responses are not made in the background here; leave it out and wait, or stream")
    for index, name in enumerate(listed(body.get("include"), "include")):
        string(name, f"include[{index}]")
    for name in ("store", "parallel_tool_calls"):
        flag(body, name)
    for name in ("reasoning", "text"):
        if body.get(name) is not None:
            mapping(body[name], name)


def _request(
    body: dict[str, Any],
    counted: bool,
    messages: tuple[Message, ...],
    offered: list[Tool],
    choice: str,
    marks: list[str],
) -> ModelRequest:
    compact = body.get("object") == responses_output.COMPACTION
    return ModelRequest(
        # A prompt can be counted without saying for which model.
        model=string(body.get("model"), "model") if counted else required(body, "model"),
        messages=messages,
        tools=tuple(offered),
        tool_choice=choice,
        sampling=Sampling(
            temperature=number(body, "temperature", 0, 5),
            top_p=number(body, "top_p", 0, 1) or None,
            max_tokens=integer(body, "max_output_tokens", 1, MAX_TOKENS),
            json_schema=_json_schema(body.get("text")),
        ),
        stream=flag(body, "stream") and not compact,
        include_usage=True,
        want_logprobs="message.output_text.logprobs" in (body.get("include") or ()),
        marks=tuple(dict.fromkeys(marks)),
        raw=body,
    )


def _json_schema(value: Any) -> str | None:
    form = mapping(value, "text").get("format") if value is not None else None
    if form is None:
        return None
    kind = mapping(form, "text.format").get("type")
    if kind == "json_object":
        return ANY_OBJECT
    if kind == "json_schema":
        schema = form.get("schema")
        return orjson.dumps(mapping(schema, "text.format.schema")).decode() if schema else ANY_OBJECT
    if kind in (None, "text"):
        return None
    raise wrong("text.format.type", f"must be text, json_object or json_schema, not {kind!r}")


def _marks(body: dict[str, Any]) -> list[str]:
    marks = [name for name in UNHEEDED if body.get(name)]
    if body.get("parallel_tool_calls") is False:
        marks.append("parallel_tool_calls")
    if body.get("truncation") == "auto":
        marks.append("truncation")
    if (body.get("text") or {}).get("verbosity"):
        marks.append("verbosity")
    if (body.get("reasoning") or {}).get("effort"):
        marks.append("reasoning_effort")
    return marks


def _narrowed(body: dict[str, Any]) -> bool:
    """Whether only some of the tools may be called, which nobody here can hold the model to."""
    chosen = body.get("tool_choice")
    return isinstance(chosen, dict) and chosen.get("type") == "allowed_tools"


def _page(items: list[Any], params: Mapping[str, str]) -> dict[str, Any]:
    listed = [_shown(item, index) for index, item in enumerate(items) if isinstance(item, dict)]
    listed = [item for item in listed if item["type"] != TRIGGER]
    if params.get("order", "desc") != "asc":
        listed.reverse()
    places = [index for index, item in enumerate(listed) if item["id"] == params.get("after")]
    begin = places[0] + 1 if places else 0
    limit = params.get("limit", "")
    end = begin + (min(int(limit), LONGEST_PAGE) if limit.isdigit() and int(limit) else PAGE)
    page = listed[begin:end]
    first, last = (page[0]["id"], page[-1]["id"]) if page else ("", "")
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": end < len(listed)}


def _shown(item: dict[str, Any], index: int) -> dict[str, Any]:
    """An item as a stored one: with an id, a type and a status, and its content in parts."""
    always = {"id": f"item_{index}", "type": "message", "status": "completed"}
    shown = {**item, **{name: item.get(name) or value for name, value in always.items()}}
    if isinstance(content := shown.get("content"), str):
        spoken = shown.get("role") == "assistant"
        part: dict[str, Any] = {"type": "output_text", "annotations": []} if spoken else {"type": "input_text"}
        shown["content"] = [{**part, "text": content}]
    return shown
