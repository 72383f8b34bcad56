"""Rich, valid bodies of each dialect: what the fuzzers start from. Path parameters stand beside them."""

from __future__ import annotations

from typing import Any

PNG = "iVBORw0KGgo="
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"where": {"type": "string"}}}
CALL_ID = "call_0123456789abcdef01234567_0"

CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "name": "ann",
            "content": [
                {"type": "text", "text": "Look."},
                {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
                {"type": "file", "file": {"filename": "a.txt", "file_data": "data:text/plain;base64,QUJD"}},
                {"type": "input_audio", "input_audio": {"data": "QUJD", "format": "wav"}},
            ],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": '{"where": "out"}'}},
                {"id": "call_2", "type": "custom", "custom": {"name": "patch", "input": "*** x"}},
            ],
        },
        {"role": "tool", "tool_call_id": CALL_ID, "content": [{"type": "text", "text": "sunny"}]},
        {"role": "tool", "tool_call_id": "call_2", "content": "done"},
        {"role": "assistant", "content": [{"type": "text", "text": "ok"}, {"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "And now?"},
    ],
    "tools": [
        {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": SCHEMA}},
        {
            "type": "custom",
            "custom": {
                "name": "patch",
                "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}},
            },
        },
    ],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    "temperature": 0.5,
    "top_p": 0.9,
    "max_completion_tokens": 100,
    "n": 2,
    "stop": ["END"],
    "seed": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
    "metadata": {"a": "b"},
}

RESPONSES: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"role": "developer", "content": "Be kind."},
        {
            "type": "message",
            "role": "user",
            "content": [
                {"type": "input_text", "text": "Look."},
                {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "auto"},
                {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,QUJD"},
            ],
        },
        {
            "type": "reasoning",
            "id": "rs_0123456789abcdef01234567",
            "summary": [{"type": "summary_text", "text": "Hm."}],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": "cG9sYXIxASNFZ4mrze8BI0Vn",
        },
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_0123456789abcdef01234567",
            "status": "completed",
            "content": [{"type": "output_text", "text": "ok", "annotations": []}],
        },
        {"type": "function_call", "call_id": CALL_ID, "name": "look", "arguments": "{}", "namespace": "eyes"},
        {"type": "function_call_output", "call_id": CALL_ID, "output": [{"type": "input_text", "text": "sunny"}]},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "*** x"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        {
            "type": "local_shell_call",
            "id": "lsh_1",
            "call_id": "call_3",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "lsh_1", "call_id": "call_3", "output": "a b"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "user", "content": "And now?"},
    ],
    "tools": [
        {"type": "function", "name": "look", "description": "Look.", "parameters": SCHEMA, "strict": False},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {
            "type": "namespace",
            "name": "eyes",
            "description": "Seeing.",
            "tools": [{"type": "function", "name": "look", "parameters": SCHEMA}],
        },
        {"type": "local_shell"},
        {"type": "web_search"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "max_output_tokens": 100,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_logprobs": 2,
    "store": False,
    "stream": True,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k",
    "client_metadata": {"x": "y"},
}

ANTHROPIC: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=1"},
        {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Look."},
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
                {
                    "type": "document",
                    "title": "a",
                    "source": {"type": "text", "media_type": "text/plain", "data": "ABC"},
                },
                {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "QUJD"}},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "cG9sYXIxASNFZ4mrze8BI0Vn"},
                {"type": "redacted_thinking", "data": "QUJD"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": CALL_ID, "name": "look", "input": {"where": "out"}},
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}},
            ],
        },
        {"role": "system", "content": "Mind the time."},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": CALL_ID,
                    "is_error": True,
                    "content": [
                        {"type": "text", "text": "sunny"},
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
                    ],
                },
                {"type": "text", "text": "And now?"},
            ],
        },
    ],
    "tools": [
        {"name": "look", "description": "Look.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
    ],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.9,
    "stream": True,
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
}

GOOGLE: dict[str, Any] = {
    "systemInstruction": {"parts": [{"text": "Be brief."}]},
    "contents": [
        {
            "role": "user",
            "parts": [
                {"text": "Look."},
                {"inlineData": {"mimeType": "image/png", "data": PNG}},
                {"inlineData": {"mimeType": "text/plain", "data": "QUJD"}},
                {"fileData": {"mimeType": "image/png", "fileUri": "https://example.com/a.png"}},
            ],
        },
        {
            "role": "model",
            "parts": [
                {"text": "Hm.", "thought": True},
                {"text": "ok"},
                {
                    "functionCall": {"id": CALL_ID, "name": "look", "args": {"where": "out"}},
                    "thoughtSignature": "cG9sYXIxASNFZ4mrze8BI0Vn",
                },
                {"executableCode": {"language": "PYTHON", "code": "1"}},
            ],
        },
        {
            "role": "user",
            "parts": [
                {"functionResponse": {"id": CALL_ID, "name": "look", "response": {"output": "sunny"}}},
                {"text": "And now?"},
            ],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {
                    "name": "look",
                    "description": "Look.",
                    "parameters": {"type": "OBJECT", "properties": {"where": {"type": "STRING"}}},
                },
                {"name": "see", "parametersJsonSchema": SCHEMA},
            ]
        },
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "safetySettings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
    "generationConfig": {
        "temperature": 0.5,
        "topP": 0.9,
        "topK": 3,
        "maxOutputTokens": 100,
        "stopSequences": ["END"],
        "seed": 1,
        "candidateCount": 1,
        "responseMimeType": "application/json",
        "responseJsonSchema": SCHEMA,
        "responseLogprobs": True,
        "logprobs": 2,
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 100},
    },
}

BODIES: dict[str, list[tuple[dict[str, Any], dict[str, str]]]] = {
    "openai_chat": [(CHAT, {})],
    "openai_responses": [(RESPONSES, {}), ({"model": "m", "input": "hello"}, {})],
    "anthropic_messages": [(ANTHROPIC, {})],
    "google_generate": [(GOOGLE, {"model": "m"}), (GOOGLE, {"model": "m", "stream": "true"})],
}
