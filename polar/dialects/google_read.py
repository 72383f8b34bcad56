"""What Google's clients send, piece by piece: contents, parts, tools and schemas.

Both spellings of every field are read, `functionCall` and `function_call`, as Google's servers do. What a request
is as a whole is `google_generate`'s affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import orjson

from polar.dialects import seals, tools
from polar.dialects.content import Content, data_url
from polar.dialects.reading import listed, mapping, required, string, wrong
from polar.messages import Message, Role, Tool, ToolCall, plain_message

ROLES: Mapping[str, Role] = {"user": "user", "function": "user", "model": "assistant", "system": "system"}
URL_SAFE = str.maketrans("-_", "+/")
"""Google's Python client writes bytes in this alphabet, others in the ordinary one."""
BESIDE = frozenset({"thought", "thoughtSignature", "videoMetadata", "mediaResolution", "partMetadata"})
"""Fields of a part that say something about it and are not its data."""
DECLARATIONS = "functionDeclarations"
OPENAPI_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
DROPPED = frozenset({"propertyOrdering", "nullable"})
RENAMED: Mapping[str, str] = {"defs": "$defs", "ref": "$ref"}
COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
"""64-bit numbers, which Google's JSON may write as strings."""
_UNDERSCORE = re.compile(r"_([a-z0-9])")


@lru_cache(maxsize=1024)
def camel(name: str) -> str:
    """A field's name as Google's reference spells it."""
    return _UNDERSCORE.sub(lambda found: found[1].upper(), name)


def fields(value: Any, where: str) -> dict[str, Any]:
    """An object that must be there, its own field names spelt one way."""
    return {camel(name): item for name, item in mapping(value, where).items()}


def alone_or_listed(value: Any, where: str) -> list[Any]:
    """A list, or the one thing that stands where a list may."""
    return [value] if isinstance(value, dict | str) else listed(value, where)


def system(value: Any, where: str, marks: list[str]) -> list[Message]:
    """The system instruction: a text, a part, a content, or a list of parts."""
    if isinstance(value, dict) and "parts" in value:
        value = value["parts"]
    content = Content()
    for index, part in enumerate(alone_or_listed(value, where)):
        _block(content, {"text": part} if isinstance(part, str) else fields(part, f"{where}.parts[{index}]"), where)
    marks += content.marks
    return [Message("system", content.text, images=tuple(content.images))] if content.text else []


def conversation(value: Any, where: str, marks: list[str]) -> list[Message]:
    """The messages of `contents`."""
    contents = alone_or_listed(value, where)
    if not contents:
        raise wrong(where, "must hold at least one content")
    reader = _Reader(marks)
    for index, entry in enumerate(contents):
        at = f"{where}[{index}]"
        entry = {"parts": [{"text": entry}]} if isinstance(entry, str) else fields(entry, at)
        named = entry.get("role") or "user"
        role = ROLES.get(named) if isinstance(named, str) else None
        if role is None:
            raise wrong(f"{at}.role", f"must be one of {', '.join(ROLES)}, not {named!r}")
        parts = alone_or_listed(entry.get("parts"), f"{at}.parts")
        places = [f"{at}.parts[{i}]" for i in range(len(parts))]
        read = [
            ({"text": part} if isinstance(part, str) else fields(part, place), place)
            for part, place in zip(parts, places, strict=True)
        ]
        reader.model(read) if role == "assistant" else reader.asked(role, read)
    return reader.messages


@dataclass(slots=True)
class _Reader:
    """Contents become messages: a model's turn may be spread over several, and a user's may hold several results."""

    marks: list[str]
    messages: list[Message] = field(default_factory=list)
    _unanswered: list[ToolCall] = field(default_factory=list)
    _open: bool = False
    """The last message is a model's turn, which the next content may go on with."""

    def asked(self, role: Role, parts: list[tuple[dict[str, Any], str]]) -> None:
        """What is not the model's: texts and pictures, and the results of tools in between."""
        before, content = len(self.messages), Content()
        for part, where in parts:
            if part.get("functionResponse") is None:
                _block(content, part, where)
                continue
            self._say(role, content)
            content = Content()
            self.messages.append(self._result(fields(part["functionResponse"], f"{where}.functionResponse"), where))
        self._say(role, content, needed=len(self.messages) == before)
        self._open = False

    def model(self, parts: list[tuple[dict[str, Any], str]]) -> None:
        """A turn of the model, or more of it: clients keep a streamed turn as one content for each chunk."""
        text, thoughts, calls, others = "", "", [], Content()
        anchor, sealed = None, ""
        for part, where in parts:
            seal = _unsealed(part, where)
            if seal is not None and anchor is None:
                anchor, sealed = seal.anchor, seal.reasoning
            if part.get("functionCall") is not None:
                calls.append(_call(fields(part["functionCall"], f"{where}.functionCall"), f"{where}.functionCall"))
            elif part.get("thought") is True:
                thoughts += string(part.get("text"), f"{where}.text")
            elif "text" in part:
                text += string(part["text"], f"{where}.text")
            else:
                _block(others, part, where)
        self.marks += others.marks
        turn = Message(
            "assistant",
            "\n".join(said for said in (text, others.text) if said),
            thoughts or sealed or None,
            tuple(calls),
            anchor=anchor,
        )
        last = self.messages[-1] if self._open else None
        if last is None or (last.anchor and anchor and last.anchor != anchor):
            self._unanswered = []
            self.messages.append(turn)
        else:
            # What a signature holds is all of the reasoning, of which thoughts that were shown are pieces.
            shown = (last.reasoning or "") + thoughts
            self.messages[-1] = Message(
                "assistant",
                last.content + turn.content,
                shown or turn.reasoning,
                last.tool_calls + turn.tool_calls,
                anchor=last.anchor or anchor,
            )
        self._unanswered += calls
        self._open = True

    def _say(self, role: Role, content: Content, *, needed: bool = False) -> None:
        if content.text or needed:
            images = tuple(content.images)
            self.messages.append(
                Message(role, content.text, images=images) if images else plain_message(role, content.text)
            )
        self.marks += content.marks

    def _result(self, entry: dict[str, Any], where: str) -> Message:
        name = string(entry.get("name"), f"{where}.functionResponse.name")
        id_ = string(entry.get("id"), f"{where}.functionResponse.id")
        for call in self._unanswered:
            # Clients that drop ids answer calls of one name in the order in which they were made.
            if call.id == id_ if id_ else call.name == name:
                self._unanswered.remove(call)
                id_ = id_ or call.id
                break
        said, failed = _said(entry.get("response"))
        content = Content()
        content.add(said)
        for index, part in enumerate(listed(entry.get("parts"), f"{where}.functionResponse.parts")):
            at = f"{where}.functionResponse.parts[{index}]"
            _block(content, fields(part, at), at)
        self.marks += content.marks
        images = tuple(content.images)
        return Message(
            "tool", content.text, tool_call_id=id_ or None, name=name or None, images=images, is_error=failed
        )


def _said(response: Any) -> tuple[str, bool]:
    """What a tool said and whether it failed: Google's clients wrap either into an object with one field."""
    failed = False
    if isinstance(response, dict) and len(response) == 1:
        (name, value), *_ = response.items()
        if name in ("output", "result", "error"):
            failed, response = name == "error", value
    if response is None:
        return "", failed
    return response if isinstance(response, str) else orjson.dumps(response).decode(), failed


def _unsealed(part: dict[str, Any], where: str) -> seals.Seal | None:
    signature = string(part.get("thoughtSignature"), f"{where}.thoughtSignature")
    return seals.unseal(signature.translate(URL_SAFE)) if signature else None


def _call(entry: dict[str, Any], where: str) -> ToolCall:
    arguments = entry.get("args")
    written = orjson.dumps(mapping(arguments, f"{where}.args")).decode() if arguments is not None else "{}"
    return ToolCall(string(entry.get("id"), f"{where}.id"), required(entry, "name", f"{where}."), written)


def _block(content: Content, part: dict[str, Any], where: str) -> None:
    """A part as the model is shown it."""
    if "text" in part:
        content.add(string(part["text"], f"{where}.text"))
    elif part.get("inlineData") is not None:
        blob = fields(part["inlineData"], f"{where}.inlineData")
        media_type = string(blob.get("mimeType"), f"{where}.inlineData.mimeType")
        data = string(blob.get("data"), f"{where}.inlineData.data").translate(URL_SAFE)
        if media_type.startswith("image/"):
            content.picture(data_url(media_type, data))
        else:
            title = string(blob.get("displayName"), f"{where}.inlineData.displayName") or "file"
            content.document(title, media_type, data)
    elif part.get("fileData") is not None:
        file = fields(part["fileData"], f"{where}.fileData")
        url = required(file, "fileUri", f"{where}.fileData.")
        media_type = string(file.get("mimeType"), f"{where}.fileData.mimeType")
        if media_type.startswith("image/"):
            content.picture(url)
        else:
            content.unread(f"file: {url}, {media_type or 'of unknown type'}")
    elif part.get("executableCode") is not None:
        code = string(fields(part["executableCode"], where).get("code"), f"{where}.executableCode.code")
        content.add(f"[code that was run]\n{code}")
        content.marks.append("code_execution")
    elif part.get("codeExecutionResult") is not None:
        output = string(fields(part["codeExecutionResult"], where).get("output"), f"{where}.codeExecutionResult.output")
        content.add(f"[its output]\n{output}")
        content.marks.append("code_execution")
    else:
        for name in part.keys() - BESIDE:
            content.unread(name)


def offered(value: Any, marks: list[str]) -> list[Tool]:
    """The functions among the tools; a mark for each tool that only Google's servers have."""
    found: list[Tool] = []
    for index, entry in enumerate([value] if isinstance(value, dict) else listed(value, "tools")):
        for name, inner in fields(entry, f"tools[{index}]").items():
            where = f"tools[{index}].{name}"
            if name == DECLARATIONS:
                declared = listed(inner, where)
                found += [_declared(fields(one, f"{where}[{i}]"), f"{where}[{i}]") for i, one in enumerate(declared)]
            elif inner is not None:
                marks.append(f"tool_unavailable:{name}")
    return found


def _declared(entry: dict[str, Any], where: str) -> Tool:
    parameters = entry.get("parametersJsonSchema")
    if parameters is not None:
        parameters = plain_schema(mapping(parameters, f"{where}.parametersJsonSchema"))
    elif entry.get("parameters") is not None:
        parameters = json_schema(mapping(entry["parameters"], f"{where}.parameters"))
    else:
        parameters = {"type": "object", "properties": {}}
    description = string(entry.get("description"), f"{where}.description")
    return tools.function(required(entry, "name", f"{where}."), description, parameters)


def plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema as it came; or what is sent for it and has OpenAPI's capitals, as by Gemini CLI's router."""
    kind = schema.get("type")
    known = isinstance(kind, str) and kind in OPENAPI_TYPES
    found: dict[str, Any] = json_schema(schema) if known else schema
    return found


def json_schema(schema: Any) -> Any:
    """Google's schemas are OpenAPI's, types in capitals; models and engines know JSON Schema."""
    if not isinstance(schema, dict):
        return schema
    found = dict(_rules(schema))
    if schema.get("nullable") is True:
        if isinstance(found.get("type"), str):
            found["type"] = [found["type"], "null"]
        elif isinstance(found.get("anyOf"), list):
            found["anyOf"] = [*found["anyOf"], {"type": "null"}]
    return found


def _rules(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        name = RENAMED.get(name) or (name if name.startswith("$") else camel(name))
        if value is None or name in DROPPED or value == "TYPE_UNSPECIFIED":
            continue
        if name == "type":
            yield name, value.lower() if isinstance(value, str) else value
        elif name in ("properties", "$defs") and isinstance(value, dict):
            yield name, {key: json_schema(inner) for key, inner in value.items()}
        elif name in ("items", "additionalProperties", "not"):
            yield name, json_schema(value)
        elif name in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            yield name, [json_schema(inner) for inner in value]
        elif name in COUNTS and isinstance(value, str) and value.isdigit():
            yield name, int(value)
        else:
            yield name, value
