"""Google generateContent, as the Gemini API and Vertex AI have it: generate, stream, count tokens, list models.

Requests as a whole, errors and models are here; the pieces of requests are read in `google_read`, answers are
written in `google_stream`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from polar.dialects import google_read as read
from polar.dialects import google_stream as write
from polar.dialects.base import BadRequest, Dialect, Route, Stream
from polar.dialects.reading import ANY_OBJECT, flag, integer, listed, mapping, number, string, wrong
from polar.messages import Answer, ModelRequest, Sampling

MODEL = "/{version}/models/{model:path}"
VERTEX = "/{version}/publishers/{publisher}/models/{model:path}"
PROJECT = "/{version}/projects/{project}/locations/{location}/publishers/{publisher}/models/{model:path}"
STREAM = {"stream": "yes"}
VERSIONS = ("v1beta", "v1alpha", "v1beta1")
"""Of Google's alone; `GET /v1/models` is other dialects', too."""
METHODS = ("GET", "POST", "PATCH", "DELETE")
SERVED = "generateContent, streamGenerateContent and countTokens of a model, and GET of models"
STATUSES: Mapping[int, str] = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
REASONS: Mapping[str, str] = {"invalid_api_key": "API_KEY_INVALID"}
OVERFLOW = re.compile(r"context length is (\d+) tokens.*?resulted in (\d+) tokens", re.DOTALL)
RETRY_DELAY = "2s"
TYPE = "type.googleapis.com/google.rpc."
CONFIG = "generationConfig"
MODES: Mapping[str, str] = {"ANY": "required", "NONE": "none"}
UNHEEDED: Mapping[str, str] = {
    "speechConfig": "speech_config",
    "imageConfig": "image_config",
    "mediaResolution": "media_resolution",
    "responseFormat": "response_format",
    "routingConfig": "routing_config",
    "modelSelectionConfig": "model_selection_config",
}
"""Asked for in the configuration and not done; kept on the completion as marks."""
MAX_TOKENS = 2**31 - 1
MAX_CANDIDATES = 8


class GoogleGenerate(Dialect):
    """See the module."""

    name = "google_generate"
    routes = (
        *(Route(f"{path}:generateContent") for path in (MODEL, VERTEX, PROJECT)),
        *(Route(f"{path}:streamGenerateContent", fixed=STREAM) for path in (MODEL, VERTEX, PROJECT)),
        *(Route(f"{path}:countTokens", kind="count") for path in (MODEL, VERTEX, PROJECT)),
        Route("/v1beta1/publishers/{publisher}/models", "GET", "models"),
        Route("/v1beta1/publishers/{publisher}/models/{model:path}", "GET", "model"),
        *(Route(f"/{version}/models", "GET", "models") for version in ("v1", *VERSIONS)),
        *(Route(f"/{version}/models/{{model:path}}", "GET", "model") for version in ("v1", *VERSIONS)),
        *(Route(f"{path}:{{method}}", "POST", "absent") for path in (MODEL, VERTEX, PROJECT)),
        *(Route("/{version}/cachedContents{rest:path}", method, "absent") for method in METHODS),
        *(Route(f"/{version}/{{rest:path}}", method, "absent") for version in VERSIONS for method in METHODS),
    )
    keepalive = b"\n\n"
    """Empty lines, which are space inside an array too. A comment is no choice: Google's Python client takes it for
    the beginning of an error and fails to parse it."""
    RESETS = False

    def claims(self, headers: Mapping[str, str]) -> bool:
        return "x-goog-api-key" in headers

    def secret(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer = token.strip() if scheme.lower() == "bearer" else ""
        return headers.get("x-goog-api-key") or query.get("key") or bearer or None

    def parse(self, body: dict[str, Any], params: Mapping[str, str]) -> ModelRequest:
        asked = read.fields(body, "body")
        if asked.get("generateContentRequest") is not None:
            asked = read.fields(asked["generateContentRequest"], "generateContentRequest")
        if asked.get("cachedContent"):
            raise wrong("cachedContent", "there are no cached contents here; send the contents themselves")
        marks: list[str] = []
        instruction = read.system(asked.get("systemInstruction"), "systemInstruction", marks)
        config = _config(asked)
        limit = integer(config, f"{CONFIG}.logprobs", 0, 20) or 0
        offered = read.offered(asked.get("tools"), marks)
        choice = _tool_choice(asked.get("toolConfig"), marks)
        marks += _marks(asked, config)
        return ModelRequest(
            model=_model(params) or _bare(string(asked.get("model"), "model")),
            messages=(*instruction, *read.conversation(asked.get("contents"), "contents", marks)),
            tools=tuple(offered),
            tool_choice=choice,
            sampling=_sampling(config, marks),
            n=integer(config, f"{CONFIG}.candidateCount", 1, MAX_CANDIDATES) or 1,
            stream="stream" in params,
            want_logprobs=flag(config, f"{CONFIG}.responseLogprobs"),
            top_logprobs=limit,
            marks=tuple(dict.fromkeys(marks)),
            raw={
                **body,
                "thoughts": flag(_thinking(config), f"{CONFIG}.thinkingConfig.includeThoughts"),
                "alt": params.get("alt"),
            },
        )

    def answer(self, request: ModelRequest, answers: list[Answer]) -> dict[str, Any]:
        return write.whole(answers, thoughts=request.raw["thoughts"], logprobs=request.want_logprobs)

    def open_stream(self, request: ModelRequest, completion_id: str) -> Stream:
        kind = write.GenerateStream if request.raw["alt"] == "sse" else write.GenerateArray
        return kind(request, completion_id, thoughts=request.raw["thoughts"])

    def status(self, status: int, code: str) -> int:
        return {413: 400, 426: 400, 502: 500}.get(status, status)

    def error(self, status: int, code: str, message: str, *, field: str | None = None) -> dict[str, Any]:
        if code == "context_length_exceeded" and (numbers := OVERFLOW.search(message)):
            message = (
                f"The input token count ({numbers[2]}) exceeds the maximum number of tokens allowed ({numbers[1]})."
            )
        elif code == "not_found":
            message = f"{message}; there are {SERVED}"
        details: list[dict[str, Any]] = [
            {"@type": f"{TYPE}ErrorInfo", "reason": REASONS.get(code, code.upper()), "domain": "polar"}
        ]
        if field is not None:
            violation = {"field": field, "description": message}
            details.append({"@type": f"{TYPE}BadRequest", "fieldViolations": [violation]})
        if status in (429, 503):
            details.append({"@type": f"{TYPE}RetryInfo", "retryDelay": RETRY_DELAY})
        named = STATUSES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        return {"error": {"code": status, "message": message, "status": named, "details": details}}

    def error_event(self, status: int, code: str, message: str) -> bytes:
        """A bare object without an end of line. Google's clients raise it with its code where it comes as a piece of
        its own, which it does; and where something on the way has glued it to the chunk before, they fail on it as
        on a chunk that was cut off, which an event or a complete line would let pass for the end of an answer."""
        return orjson.dumps(self.error(status, code, message))

    def models(self, kind: str, models: list[dict[str, Any]], params: Mapping[str, str]) -> dict[str, Any]:
        prefix = f"publishers/{params['publisher']}/models/" if "publisher" in params else "models/"
        cards = {
            model["id"]: {
                "name": prefix + model["id"],
                "version": "polar",
                "displayName": model["id"],
                "inputTokenLimit": model["context_length"],
                "outputTokenLimit": model["context_length"],
                "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
            }
            for model in models
        }
        if kind == "models":
            return {"publisherModels" if "publisher" in params else "models": list(cards.values())}
        if (name := _bare(params["model"])) in cards:
            return cards[name]
        message = f"models/{name} is not found; there is {', '.join(cards)}"
        raise BadRequest(message, field="model", code="model_not_found", status=404)

    def counted(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens, "promptTokensDetails": [{"modality": "TEXT", "tokenCount": tokens}]}


def _bare(name: str) -> str:
    return name.removeprefix("models/")


def _model(params: Mapping[str, str]) -> str:
    """The model that the path names. Vertex's splits a name with a slash in it into publisher and model."""
    name = _bare(params.get("model", ""))
    publisher = params.get("publisher", "google")
    return name if publisher == "google" else f"{publisher}/{name}"


def _config(asked: dict[str, Any]) -> dict[str, Any]:
    """The configuration, its fields under their whole names, as refusals have them."""
    value = asked.get(CONFIG)
    config = read.fields(value, CONFIG) if value is not None else {}
    return {f"{CONFIG}.{name}": _whole(item) for name, item in config.items()}


def _whole(value: Any) -> Any:
    """Google's clients write whole numbers as 40.0, too."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _thinking(config: dict[str, Any]) -> dict[str, Any]:
    value, where = config.get(f"{CONFIG}.thinkingConfig"), f"{CONFIG}.thinkingConfig"
    return {f"{where}.{name}": item for name, item in read.fields(value, where).items()} if value is not None else {}


def _sampling(config: dict[str, Any], marks: list[str]) -> Sampling:
    stops = listed(config.get(f"{CONFIG}.stopSequences"), f"{CONFIG}.stopSequences")
    return Sampling(
        temperature=number(config, f"{CONFIG}.temperature", 0, 5),
        top_p=number(config, f"{CONFIG}.topP", 0, 1) or None,
        top_k=integer(config, f"{CONFIG}.topK", -1, MAX_TOKENS),
        presence_penalty=number(config, f"{CONFIG}.presencePenalty", -2, 2),
        frequency_penalty=number(config, f"{CONFIG}.frequencyPenalty", -2, 2),
        seed=integer(config, f"{CONFIG}.seed", -(2**63), 2**63 - 1),
        max_tokens=integer(config, f"{CONFIG}.maxOutputTokens", 1, MAX_TOKENS),
        stop=tuple(string(text, f"{CONFIG}.stopSequences[{i}]") for i, text in enumerate(stops) if text),
        json_schema=_json_schema(config, marks),
    )


def _json_schema(config: dict[str, Any], marks: list[str]) -> str | None:
    kind = string(config.get(f"{CONFIG}.responseMimeType"), f"{CONFIG}.responseMimeType")
    if kind != "application/json":
        if kind not in ("", "text/plain"):
            marks.append("response_mime_type")
        return None
    plain, openapi = config.get(f"{CONFIG}.responseJsonSchema"), config.get(f"{CONFIG}.responseSchema")
    if plain is not None:
        return orjson.dumps(read.plain_schema(mapping(plain, f"{CONFIG}.responseJsonSchema"))).decode()
    if openapi is not None:
        return orjson.dumps(read.json_schema(mapping(openapi, f"{CONFIG}.responseSchema"))).decode()
    return ANY_OBJECT


def _tool_choice(value: Any, marks: list[str]) -> str:
    if value is None:
        return "auto"
    inner = read.fields(value, "toolConfig").get("functionCallingConfig")
    calling = read.fields(inner, "toolConfig.functionCallingConfig") if inner is not None else {}
    where = "toolConfig.functionCallingConfig"
    mode = string(calling.get("mode"), f"{where}.mode").upper()
    allowed = listed(calling.get("allowedFunctionNames"), f"{where}.allowedFunctionNames")
    names = [string(name, f"{where}.allowedFunctionNames[{i}]") for i, name in enumerate(allowed)]
    if mode in ("ANY", "VALIDATED") or names:
        marks.append("tool_choice")
    return names[0] if mode == "ANY" and len(names) == 1 else MODES.get(mode, "auto")


def _marks(asked: dict[str, Any], config: dict[str, Any]) -> list[str]:
    marks = [mark for name, mark in UNHEEDED.items() if config.get(f"{CONFIG}.{name}")]
    thinking = _thinking(config)
    if thinking.get(f"{CONFIG}.thinkingConfig.thinkingBudget") not in (None, -1):
        marks.append("thinking_budget")
    if thinking.get(f"{CONFIG}.thinkingConfig.thinkingLevel"):
        marks.append("thinking_level")
    if config.get(f"{CONFIG}.responseModalities") not in (None, [], ["TEXT"]):
        marks.append("response_modalities")
    if config.get(f"{CONFIG}.logprobs"):
        marks.append("top_logprobs")
    if asked.get("safetySettings"):
        marks.append("safety_settings")
    return marks
