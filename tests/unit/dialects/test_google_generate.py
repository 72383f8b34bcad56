"""Google generateContent: what its clients send, in both spellings; errors, models and keys."""

from __future__ import annotations

import base64
import json
from typing import Any

import orjson
import pytest

from polar.dialects import seals
from polar.dialects.base import BadRequest
from polar.dialects.google_generate import GoogleGenerate
from polar.messages import Image, Message, ModelRequest, ToolCall

DIALECT = GoogleGenerate()
ID = "cmp-0123456789abcdef01234567"
CALL = ToolCall("call_0123456789abcdef01234567_0", "look", '{"a": 1}')
OTHER = ToolCall("call_0123456789abcdef01234567_1", "look", '{"a": 2}')
USER = {"role": "user", "parts": [{"text": "a"}]}
PIXEL = base64.b64encode(b"\xfb\xef\xbe pixel").decode()


def parse(contents: Any, params: dict[str, str] | None = None, **more: Any) -> ModelRequest:
    """A request with these contents."""
    return DIALECT.parse({"contents": contents, **more}, {"model": "m", "alt": "sse", **(params or {})})


def one(content: dict[str, Any]) -> Message:
    """The only message of a request."""
    (message,) = parse([content]).messages
    return message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (USER, Message("user", "a")),
        ({"parts": {"text": "a"}}, Message("user", "a")),
        ({"role": "user", "parts": [{"text": "a"}, {"text": "b"}]}, Message("user", "a\nb")),
        ({"role": "model", "parts": [{"text": "a"}, {"text": "b"}]}, Message("assistant", "ab")),
        ({"role": "model", "parts": []}, Message("assistant", "")),
        ({"role": "model", "parts": [{"text": "r", "thought": True}, {"text": "a"}]}, Message("assistant", "a", "r")),
        (
            {"role": "model", "parts": [{"executableCode": {"language": "PYTHON", "code": "1"}}]},
            Message("assistant", "[code that was run]\n1"),
        ),
    ],
)
def test_contents(content: dict[str, Any], message: Message) -> None:
    """Every form of a content comes out as the same message."""
    assert one(content) == message


@pytest.mark.parametrize(
    "spelt", [lambda name: name, lambda name: "".join(f"_{c.lower()}" * c.isupper() or c for c in name)]
)
def test_both_spellings(spelt: Any) -> None:
    """Fields are read as Google's reference spells them and as its Python client's users do."""
    call = {spelt("functionCall"): {"name": "look", "args": {"myKey_x": 1}}, spelt("thoughtSignature"): "Zm9yZWlnbg=="}
    response = {spelt("functionResponse"): {"name": "look", "response": {"output": "it"}}}
    request = parse(
        [USER, {"role": "model", "parts": [call]}, {"role": "function", "parts": [response]}],
        **{
            spelt("systemInstruction"): {"parts": [{"text": "be"}]},
            spelt("generationConfig"): {spelt("maxOutputTokens"): 9, spelt("topP"): 0.5, spelt("stopSequences"): ["x"]},
            spelt("toolConfig"): {spelt("functionCallingConfig"): {"mode": "NONE"}},
            "tools": [{spelt("functionDeclarations"): [{"name": "look"}]}],
        },
    )
    assert [message.role for message in request.messages] == ["system", "user", "assistant", "tool"]
    assert request.messages[2].tool_calls == (ToolCall("", "look", '{"myKey_x":1}'),)
    assert request.messages[3] == Message("tool", "it", name="look")
    assert request.sampling.asked() == {"max_tokens": 9, "top_p": 0.5, "stop": ("x",)}
    assert (request.tool_choice, [tool.name for tool in request.tools]) == ("none", ["look"])


@pytest.mark.parametrize("value", ["be", {"text": "be"}, {"role": "user", "parts": [{"text": "be"}]}, [{"text": "be"}]])
def test_system_instruction(value: Any) -> None:
    """Every form of the system instruction is the first message."""
    assert parse([USER], systemInstruction=value).messages[0] == Message("system", "be")


@pytest.mark.parametrize(
    ("response", "said", "failed"),
    [
        ({"output": "x"}, "x", False),
        ({"result": "x"}, "x", False),
        ({"output": {"n": 1}}, '{"n":1}', False),
        ({"error": "broke"}, "broke", True),
        ({"a": 1, "error": None}, '{"a":1,"error":null}', False),
        ({}, "{}", False),
        (None, "", False),
    ],
)
def test_what_tools_said(response: Any, said: str, failed: bool) -> None:
    """Wrapped results are unwrapped, errors are noted, anything else is shown as it came."""
    part = {"functionResponse": {"id": "c", "name": "look", "response": response}}
    expected = Message("tool", said, tool_call_id="c", name="look", is_error=failed)
    assert one({"role": "user", "parts": [part]}) == expected


def test_results_find_their_calls() -> None:
    """By id, and without one by name, in the order of the calls; texts beside them are messages of their own."""
    calls = [{"functionCall": {"id": call.id, "name": call.name, "args": {}}} for call in (CALL, OTHER)]
    calls.append({"functionCall": {"id": "x", "name": "go"}})
    named = [{"functionResponse": {"name": name, "response": {"output": name}}} for name in ("look", "go")]
    by_id = {"functionResponse": {"id": CALL.id, "name": "look", "response": {"output": "first"}}}
    contents = [USER, {"role": "model", "parts": calls}, {"role": "user", "parts": [by_id, *named, {"text": "so?"}]}]
    *results, said = parse(contents).messages[2:]
    assert [result.tool_call_id for result in results] == [CALL.id, OTHER.id, "x"]
    assert said == Message("user", "so?")


def test_a_turn_kept_chunk_by_chunk_is_one_message() -> None:
    """Clients that keep a streamed turn as one content for each chunk send one turn; two answers are two."""
    chunks = [{"text": "I ", "thought": True}, {"text": "see", "thought": True}, {"text": "Let "}, {"text": "me."}]
    chunks.append({"functionCall": {"name": "look", "args": {}}, "thoughtSignature": seals.seal(ID, "I see")})
    contents = [USER, *({"role": "model", "parts": [chunk]} for chunk in chunks)]
    _, turn = parse(contents).messages
    assert turn == Message("assistant", "Let me.", "I see", (ToolCall("", "look", "{}"),), anchor=ID[4:])
    second = {"text": "again", "thoughtSignature": seals.seal("cmp-" + "f" * 24)}
    assert len(parse([*contents, {"role": "model", "parts": [second]}]).messages) == 3


def test_signatures_come_back() -> None:
    """A signature names its completion and holds the reasoning that was not shown, in either base64 alphabet."""
    for text in ("Hm.", "?>?>?>" * 40 + "\u00ff\u07ff"):
        sealed = seals.seal(ID, text)
        for signature in (sealed, sealed.replace("+", "-").replace("/", "_")):
            part = {"functionCall": {"name": "look"}, "thoughtSignature": signature}
            assert one({"role": "model", "parts": [part]}) == Message(
                "assistant", "", text, (ToolCall("", "look", "{}"),), anchor=ID[4:]
            )
    foreign = {"text": "a", "thoughtSignature": "skip_thought_signature_validator"}
    assert one({"role": "model", "parts": [foreign]}) == Message("assistant", "a")


def test_media() -> None:
    """Pictures are pictures, texts are read, and what cannot be read is told and marked."""
    blob = {"inlineData": {"mimeType": "image/png", "data": PIXEL.replace("+", "-").replace("/", "_")}}
    far = {"fileData": {"fileUri": "gs://a/b.png", "mimeType": "image/png"}}
    text = {"inlineData": {"mimeType": "text/csv", "data": base64.b64encode(b"1,2").decode()}}
    film = {"fileData": {"fileUri": "gs://a/film", "mimeType": "video/mp4"}}
    request = parse([{"parts": [blob, far, text, film]}])
    (message,) = request.messages
    assert [image.source for image in message.images] == [f"data:image/png;base64,{PIXEL}", "gs://a/b.png"]
    assert "1,2" in message.content
    assert "film" in message.content
    assert request.marks == ("content_unread",)


def test_a_tool_may_show_a_picture() -> None:
    """The media of a tool's result are in its message."""
    inner = {"inlineData": {"mimeType": "image/png", "data": PIXEL}}
    part = {"functionResponse": {"name": "look", "response": {"output": "see"}, "parts": [inner]}}
    message = one({"parts": [part]})
    assert message.images == (Image(f"data:image/png;base64,{PIXEL}", 4, len(message.content)),)


def test_tools_are_printed_in_json_schema() -> None:
    """OpenAPI's schemas lose their capitals, JSON Schema stays as it is, and Google's own tools are marks."""
    openapi = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "format": "enum", "enum": ["A"]},
            "many": {"type": "ARRAY", "min_items": "1", "items": {"any_of": [{"type": "INTEGER"}, {"type": "STRING"}]}},
        },
        "required": ["many"],
        "propertyOrdering": ["many", "type"],
    }
    plain = {"type": "object", "properties": {"x": {"type": ["string", "null"]}}, "additionalProperties": False}
    declared = [
        {"name": "one", "description": "One.", "parameters": openapi},
        {"name": "two", "parametersJsonSchema": plain},
        {"name": "three", "description": "Three."},
    ]
    request = parse([USER], tools=[{"functionDeclarations": declared}, {"googleSearch": {}}, {"codeExecution": {}}])
    assert request.marks == ("tool_unavailable:googleSearch", "tool_unavailable:codeExecution")
    one, two, three = request.tools
    assert one.raw == {
        "name": "one",
        "description": "One.",
        "parameters": {
            "type": "object",
            "properties": {
                "type": {"type": ["string", "null"], "format": "enum", "enum": ["A"]},
                "many": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
            },
            "required": ["many"],
        },
    }
    assert two.parameters == plain
    assert three.parameters == {"type": "object", "properties": {}}


@pytest.mark.parametrize("sent", [{"type": "OBJECT", "required": ["x_y"]}, {"type": "object", "required": ["x_y"]}])
def test_json_schemas_may_have_capitals(sent: dict[str, Any]) -> None:
    """Gemini CLI writes OpenAPI's types into the field that is for JSON Schema."""
    config = {"responseMimeType": "application/json", "responseJsonSchema": sent}
    asked = parse([USER], generationConfig=config).sampling.json_schema
    assert json.loads(asked or "") == {"type": "object", "required": ["x_y"]}


@pytest.mark.parametrize(
    ("calling", "choice", "marks"),
    [
        ({"mode": "AUTO"}, "auto", ()),
        ({"mode": "NONE"}, "none", ()),
        ({"mode": "ANY"}, "required", ("tool_choice",)),
        ({"mode": "any", "allowedFunctionNames": ["look"]}, "look", ("tool_choice",)),
        ({"mode": "ANY", "allowedFunctionNames": ["a", "b"]}, "required", ("tool_choice",)),
        ({"mode": "VALIDATED"}, "auto", ("tool_choice",)),
        ({}, "auto", ()),
    ],
)
def test_tool_choice(calling: dict[str, Any], choice: str, marks: tuple[str, ...]) -> None:
    """Which tool may be called, and a mark where that is only a wish."""
    request = parse([USER], toolConfig={"functionCallingConfig": calling})
    assert (request.tool_choice, request.marks) == (choice, marks)


def test_sampling_and_marks() -> None:
    """What can be honoured is sampling, and what cannot is a mark."""
    request = parse(
        [USER],
        {"stream": "yes"},
        generationConfig={
            "temperature": 0.5,
            "topP": 0.9,
            "topK": 40.0,
            "maxOutputTokens": 7,
            "stopSequences": ["x", ""],
            "seed": 1,
            "presencePenalty": 0.1,
            "frequencyPenalty": None,
            "candidateCount": 2,
            "responseLogprobs": True,
            "logprobs": 3,
            "responseMimeType": "application/json",
            "responseSchema": {"type": "STRING"},
            "thinkingConfig": {"thinkingBudget": 100, "thinkingLevel": "HIGH"},
            "responseModalities": ["AUDIO"],
            "speechConfig": {"languageCode": "en"},
        },
        safetySettings=[{"category": "x"}],
        labels={"a": "b"},
    )
    assert request.sampling.asked() == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 7,
        "stop": ("x",),
        "seed": 1,
        "presence_penalty": 0.1,
        "json_schema": '{"type":"string"}',
    }
    assert (request.n, request.stream, request.want_logprobs, request.top_logprobs) == (2, True, True, 3)
    assert set(request.marks) == {
        *("speech_config", "thinking_budget", "thinking_level", "response_modalities", "top_logprobs"),
        "safety_settings",
    }


@pytest.mark.parametrize(
    ("params", "model"),
    [
        ({"model": "x"}, "x"),
        ({"model": "models/x"}, "x"),
        ({"model": "org/x"}, "org/x"),
        ({"model": "x", "publisher": "google"}, "x"),
        ({"model": "x", "publisher": "org"}, "org/x"),
    ],
)
def test_the_path_names_the_model(params: dict[str, str], model: str) -> None:
    """Every way in which Google's clients write a model into the path."""
    assert parse([USER], params).model == model


def test_what_is_counted_may_be_a_whole_request() -> None:
    """countTokens takes contents, or a whole request inside its body."""
    inner = {"model": "models/m", "contents": [USER], "systemInstruction": "be"}
    request = DIALECT.parse({"generateContentRequest": inner}, {"model": "m"})
    assert [message.content for message in request.messages] == ["be", "a"]
    assert DIALECT.counted(3)["totalTokens"] == 3


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"contents": []}, "contents"),
        ({}, "contents"),
        ({"contents": 3}, "contents"),
        ({"contents": [{"role": "wizard"}]}, "contents[0].role"),
        ({"contents": [USER, {"parts": [{"text": 3}]}]}, "contents[1].parts[0].text"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": {}}]}]}, "contents[0].parts[0].functionCall.name"),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0].parts[0].fileData.fileUri"),
        ({"contents": [USER], "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": [USER], "tools": "x"}, "tools"),
        ({"contents": [USER], "tools": [{"functionDeclarations": [{}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"contents": [USER], "generationConfig": {"temperature": "hot"}}, "generationConfig.temperature"),
        ({"contents": [USER], "generationConfig": {"candidateCount": 9}}, "generationConfig.candidateCount"),
        ({"contents": [USER], "generation_config": {"max_output_tokens": 0}}, "generationConfig.maxOutputTokens"),
        ({"contents": [USER], "toolConfig": {"functionCallingConfig": 1}}, "toolConfig.functionCallingConfig"),
    ],
)
def test_refusals_name_the_field(body: dict[str, Any], field: str) -> None:
    """What cannot be read is refused under the name that Google gives it."""
    with pytest.raises(BadRequest) as refused:
        DIALECT.parse(body, {"model": "m"})
    assert refused.value.field == field
    assert field in refused.value.message


@pytest.mark.parametrize(
    ("status", "code", "told", "named", "reason"),
    [
        (400, "invalid_request", 400, "INVALID_ARGUMENT", "INVALID_REQUEST"),
        (401, "invalid_api_key", 401, "UNAUTHENTICATED", "API_KEY_INVALID"),
        (403, "max_turns", 403, "PERMISSION_DENIED", "MAX_TURNS"),
        (404, "model_not_found", 404, "NOT_FOUND", "MODEL_NOT_FOUND"),
        (413, "request_too_large", 400, "INVALID_ARGUMENT", "REQUEST_TOO_LARGE"),
        (429, "engine_error", 429, "RESOURCE_EXHAUSTED", "ENGINE_ERROR"),
        (502, "engine_error", 500, "INTERNAL", "ENGINE_ERROR"),
        (503, "engine_down", 503, "UNAVAILABLE", "ENGINE_DOWN"),
        (504, "engine_timeout", 504, "DEADLINE_EXCEEDED", "ENGINE_TIMEOUT"),
    ],
)
def test_errors(status: int, code: str, told: int, named: str, reason: str) -> None:
    """Status, name and reason are Google's."""
    said = DIALECT.status(status, code)
    error = DIALECT.error(said, code, "why", field="contents")["error"]
    assert (said, error["code"], error["status"], error["message"]) == (told, told, named, "why")
    kinds = {detail["@type"].rpartition(".")[2]: detail for detail in error["details"]}
    assert kinds["ErrorInfo"]["reason"] == reason
    assert kinds["BadRequest"]["fieldViolations"][0]["field"] == "contents"
    assert ("RetryInfo" in kinds) == (status in (429, 503))


def test_an_overflow_is_told_in_googles_words() -> None:
    """Harnesses look for these words before they shorten their history."""
    message = "This model's maximum context length is 10 tokens. However, your messages resulted in 12 tokens."
    told = DIALECT.error(400, "context_length_exceeded", message)["error"]["message"]
    assert told == "The input token count (12) exceeds the maximum number of tokens allowed (10)."
    other = DIALECT.error(400, "context_length_exceeded", "too long")["error"]["message"]
    assert other == "too long"


def test_models() -> None:
    """Models are listed and looked up as Google's client reads them; what is not there is a 404 that says so."""
    models = [{"id": "org/x", "context_length": 9}]
    (listed,) = DIALECT.models("models", models, {})["models"]
    assert listed == DIALECT.models("model", models, {"model": "models/org/x"})
    assert (listed["name"], listed["inputTokenLimit"]) == ("models/org/x", 9)
    with pytest.raises(BadRequest, match="models/y is not found; there is org/x"):
        DIALECT.models("model", models, {"model": "y"})


@pytest.mark.parametrize(
    ("headers", "query", "key"),
    [
        ({"x-goog-api-key": "k"}, {}, "k"),
        ({}, {"key": "k"}, "k"),
        ({"authorization": "Bearer k"}, {}, "k"),
        ({"authorization": "Basic k"}, {}, None),
        ({}, {}, None),
    ],
)
def test_where_the_key_travels(headers: dict[str, str], query: dict[str, str], key: str | None) -> None:
    """In Google's header, in the query, or as a token."""
    assert DIALECT.secret(headers, query) == key


def test_requests_are_read_again_from_the_record() -> None:
    """A recorded body is parsed with its model alone."""
    body = orjson.loads(orjson.dumps({"contents": [USER], "generationConfig": {"temperature": 1}}))
    assert DIALECT.parse(body, {"model": "m"}).messages == (Message("user", "a"),)
