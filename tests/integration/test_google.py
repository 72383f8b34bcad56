"""Google's own client against the proxy: conversations, streams, tools that run by themselves, counts and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types
from pydantic import BaseModel
from sqlalchemy import Engine

from polar.renderers import for_folder
from tests.integration.rig import KEY, MODEL, completions, ids, open_session, until

pytestmark = pytest.mark.integration
QUESTION = "How is the weather?"
LOOK = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(
            name="look",
            description="Look somewhere.",
            parameters=types.Schema(
                type=types.Type.OBJECT,
                properties={"where": types.Schema(type=types.Type.STRING), "n": types.Schema(type=types.Type.INTEGER)},
            ),
        )
    ]
)
OFF = types.AutomaticFunctionCallingConfig(disable=True)
CONFIG = types.GenerateContentConfig(tools=[LOOK], automatic_function_calling=OFF)


def client(url: str, key: str = KEY, **options: Any) -> genai.Client:
    """The official client."""
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, **options))


def result(call: types.FunctionCall, *, with_id: bool = True) -> types.Content:
    """What the tool said."""
    response = types.FunctionResponse(id=call.id if with_id else None, name=call.name, response={"result": "sunny"})
    return types.Content(role="user", parts=[types.Part(function_response=response)])


def asked() -> types.Content:
    """The first message."""
    return types.Content(role="user", parts=[types.Part(text=QUESTION)])


def check_two_turns(database: Engine) -> None:
    """The second prompt is the first, its output, and the tool's result, token for token."""
    first, second = completions(database)
    renderer = for_folder(MODEL)
    assert (second.parent_id, second.parent_reason) == (first.id, "anchor")
    assert second.prompt_len == len(ids(first.suffix_ids) + ids(first.output_ids) + ids(second.suffix_ids))
    assert renderer.decode(ids(first.output_ids)).endswith("</tool_call><|im_end|>")
    assert renderer.decode(ids(second.suffix_ids)) == (
        "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert [(row.outcome, row.dialect) for row in (first, second)] == [("answered", "google_generate")] * 2
    assert all(row.prompt_verified for row in (first, second))
    assert KEY.encode() not in first.request
    until(lambda: all(row.delivered for row in completions(database)))


def test_two_turns(database: Engine, proxy: str, session_id: str) -> None:
    """A tool conversation, with the turn given back as it came."""
    with client(proxy) as google:
        first = google.models.generate_content(model="m", contents=QUESTION, config=CONFIG)
        (call,) = first.function_calls
        assert (call.name, call.args) == ("look", {"where": "outside", "n": 1})
        history = [asked(), first.candidates[0].content, result(call)]
        second = google.models.generate_content(model="m", contents=history, config=CONFIG)
    assert second.text == "It is sunny. ☀"
    rows = completions(database)
    assert (first.usage_metadata.prompt_token_count, first.model_version) == (rows[0].prompt_len, "m")
    assert second.usage_metadata.total_token_count == rows[1].prompt_len + len(rows[1].output_ids) // 4
    check_two_turns(database)


@pytest.mark.parametrize("kept", ["id", "signature", "neither"])
def test_what_a_harness_keeps_of_a_turn(database: Engine, proxy: str, session_id: str, kept: str) -> None:
    """The call's id or the signature is enough to find the turn; with neither, an unchanged turn is still found."""
    with client(proxy) as google:
        first = google.models.generate_content(model="m", contents=QUESTION, config=CONFIG)
        text, part = first.candidates[0].content.parts
        signature = part.thought_signature if kept == "signature" else None
        call = part.function_call.model_copy(update={} if kept == "id" else {"id": None})
        turn = types.Content(role="model", parts=[text, types.Part(function_call=call, thought_signature=signature)])
        history = [asked(), turn, result(call, with_id=kept == "id")]
        google.models.generate_content(model="m", contents=history, config=CONFIG)
    if kept == "neither":
        _, second = completions(database)
        assert (second.parent_reason, second.parent_id) == ("exact", completions(database)[0].id)
    else:
        check_two_turns(database)


@pytest.mark.parametrize("thoughts", [False, True])
def test_two_turns_streamed(database: Engine, proxy: str, session_id: str, thoughts: bool) -> None:
    """The same in chunks, each kept as a content of its own; thoughts only if they were asked for."""
    thinking = types.ThinkingConfig(include_thoughts=thoughts)
    config = CONFIG.model_copy(update={"thinking_config": thinking})
    with client(proxy) as google:
        chunks = list(google.models.generate_content_stream(model="m", contents=QUESTION, config=config))
        parts = [part for chunk in chunks for part in chunk.candidates[0].content.parts]
        assert "".join(part.text or "" for part in parts if not part.thought) == "Let me look."
        assert "".join(part.text for part in parts if part.thought) == ("I should look." if thoughts else "")
        assert chunks[-1].candidates[0].finish_reason == types.FinishReason.STOP
        (call,) = [part.function_call for part in parts if part.function_call]
        history = [asked(), *(chunk.candidates[0].content for chunk in chunks), result(call)]
        again = google.models.generate_content_stream(model="m", contents=history, config=config)
        assert "".join(chunk.text or "" for chunk in again) == "It is sunny. ☀"
    check_two_turns(database)


def test_async_client(database: Engine, proxy: str, session_id: str) -> None:
    """The asynchronous client, which reads streams by other means; known by its base URL."""

    async def converse() -> None:
        google = client(f"{proxy}/s/{KEY}", "anything").aio
        first = await google.models.generate_content(model="models/m", contents=QUESTION, config=CONFIG)
        (call,) = first.function_calls
        history = [asked(), first.candidates[0].content, result(call)]
        stream = await google.models.generate_content_stream(model="m", contents=history, config=CONFIG)
        assert "".join([chunk.text or "" async for chunk in stream]) == "It is sunny. ☀"
        await google.aclose()

    asyncio.run(converse())
    check_two_turns(database)


def look(where: str, n: int) -> str:
    """Look somewhere."""
    return "sunny"


@pytest.mark.parametrize("stream", [False, True])
def test_functions_called_by_the_client(database: Engine, proxy: str, session_id: str, stream: bool) -> None:
    """The client runs the tool itself and asks again, all in one call of ours."""
    config = types.GenerateContentConfig(tools=[look])
    with client(proxy) as google:
        if stream:
            chunks = google.models.generate_content_stream(model="m", contents=QUESTION, config=config)
            text = "".join(chunk.text or "" for chunk in chunks)
            assert text == "Let me look.It is sunny. ☀"
        else:
            answer = google.models.generate_content(model="m", contents=QUESTION, config=config)
            assert answer.text == "It is sunny. ☀"
            assert len(answer.automatic_function_calling_history) == 3
    check_two_turns(database)


@pytest.mark.parametrize("stream", [False, True])
def test_chats_go_on(database: Engine, proxy: str, session_id: str, stream: bool) -> None:
    """A chat keeps its own history, chunk by chunk where it is streamed, and each turn continues the one before."""
    with client(proxy) as google:
        chat = google.chats.create(model="m")
        for message in ("please wait", "and wait again", "wait once more"):
            if stream:
                said = "".join(chunk.text or "" for chunk in chat.send_message_stream(message))
            else:
                said = chat.send_message(message).text
            assert said == "waited"
    rows = completions(database)
    assert [row.parent_reason for row in rows] == ["root", "anchor", "anchor"]
    assert [row.parent_id for row in rows[1:]] == [row.id for row in rows[:2]]


def test_counts_and_models(database: Engine, proxy: str, session_id: str) -> None:
    """Counting is exact and makes no turn; models are listed under Google's names, for both of its services."""
    with client(proxy) as google:
        counted = google.models.count_tokens(model="m", contents=QUESTION).total_tokens
        answer = google.models.generate_content(model="m", contents=QUESTION)
        assert answer.usage_metadata.prompt_token_count == counted
        (listed,) = list(google.models.list())
        assert listed.name == "models/polar-scripted"
        assert "generateContent" in listed.supported_actions
        assert google.models.get(model="polar-scripted").input_token_limit == listed.input_token_limit
        with pytest.raises(errors.ClientError, match="models/other is not found; there is polar-scripted"):
            google.models.get(model="other")
    with client(proxy, api_version="v1") as google:
        assert [model.name for model in google.models.list()] == ["models/polar-scripted"]
    assert len(completions(database)) == 1


def test_vertex(database: Engine, proxy: str, session_id: str) -> None:
    """Vertex's paths, by key and by project."""
    options = types.HttpOptions(base_url=proxy)
    with genai.Client(vertexai=True, api_key=KEY, http_options=options) as google:
        assert google.models.generate_content(model="m", contents="wait").text == "waited"
        assert google.models.count_tokens(model="m", contents="wait").total_tokens > 1
        stream = google.models.generate_content_stream(model="org/m", contents="now wait")
        assert "".join(chunk.text or "" for chunk in stream) == "waited"
    path = "/v1/projects/p/locations/global/publishers/google/models/m:generateContent"
    body = {"contents": {"role": "user", "parts": {"text": "or wait"}}}
    reply = httpx.post(proxy + path, json=body, headers={"authorization": f"Bearer {KEY}"})
    assert reply.json()["candidates"][0]["content"]["parts"][0]["text"] == "waited"
    assert [row.model_requested for row in completions(database)] == ["m", "org/m", "m"]


class Seen(BaseModel):
    """What an answer in JSON is to hold."""

    many: list[int]
    note: str | None


def test_an_answer_in_json(database: Engine, proxy: str, session_id: str) -> None:
    """A schema of the client's own class reaches the engine as JSON Schema."""
    config = types.GenerateContentConfig(response_mime_type="application/json", response_schema=Seen)
    with client(proxy) as google:
        google.models.generate_content(model="m", contents=QUESTION, config=config)
    asked_for = json.loads(completions(database)[0].parsed["asked"]["json_schema"])
    assert asked_for["properties"]["many"] == {"type": "array", "title": "Many", "items": {"type": "integer"}}
    assert asked_for["properties"]["note"]["type"] == ["string", "null"]


def test_several_candidates(database: Engine, proxy: str, session_id: str) -> None:
    """Each candidate is a completion of its own."""
    config = types.GenerateContentConfig(candidate_count=3, response_logprobs=True)
    with client(proxy) as google:
        answer = google.models.generate_content(model="m", contents="wait", config=config)
        chunks = list(google.models.generate_content_stream(model="m", contents="wait more", config=config))
    rows = completions(database)
    assert [row.flags for row in rows] == [[], ["sibling"], ["sibling"]] * 2
    assert [len(one.logprobs_result.chosen_candidates) for one in answer.candidates] == [
        len(row.output_ids) // 4 for row in rows[:3]
    ]
    assert {candidate.index for chunk in chunks for candidate in chunk.candidates} == {0, 1, 2}


def test_keep_alives(database: Engine, proxy: str, session_id: str) -> None:
    """While the engine is silent there are empty lines, which no client takes for anything, nor any JSON reader."""
    with client(proxy) as google:
        chunks = google.models.generate_content_stream(model="m", contents="wait")
        assert "".join(chunk.text or "" for chunk in chunks) == "waited"

    async def ask() -> str:
        google = client(proxy).aio
        stream = await google.models.generate_content_stream(model="m", contents="do wait")
        text = "".join([chunk.text or "" async for chunk in stream])
        await google.aclose()
        return text

    assert asyncio.run(ask()) == "waited"
    body, key = {"contents": [{"parts": [{"text": "wait now"}]}]}, {"x-goog-api-key": KEY}
    events = httpx.post(f"{proxy}/v1beta/models/m:streamGenerateContent?alt=sse", json=body, headers=key)
    assert events.text.startswith("\n\n\n\n")
    array = httpx.post(f"{proxy}/v1beta/models/m:streamGenerateContent", json=body, headers=key)
    assert array.headers["content-type"].startswith("application/json")
    assert array.text.startswith("\n\n\n\n")
    parts = [chunk["candidates"][0]["content"]["parts"][0] for chunk in array.json()]
    assert "".join(part["text"] for part in parts) == "waited"


def test_errors_are_googles(database: Engine, proxy: str, engine_url: str) -> None:
    """A wrong key, a wrong body, an unknown model and a spent budget arrive as the client's own errors."""
    spent = {"max_turns": 1, "agent": {"model_name": "m", "other_models": "refuse"}}
    open_session(database, engine_url, **spent)

    def ask(google: genai.Client, model: str = "m", **config: Any) -> errors.APIError:
        with google, pytest.raises(errors.ClientError) as raised:
            google.models.generate_content(model=model, contents="wait", config=types.GenerateContentConfig(**config))
        return raised.value

    unknown = ask(client(proxy, "wrong"))
    assert (unknown.code, unknown.status) == (401, "UNAUTHENTICATED")
    assert "belongs to no session" in unknown.message
    wrong = ask(client(proxy), temperature=9)
    assert (wrong.code, wrong.status) == (400, "INVALID_ARGUMENT")
    assert "generationConfig.temperature" in wrong.message
    absent = ask(client(proxy), model="other")
    assert (absent.code, absent.status) == (404, "NOT_FOUND")
    with client(proxy) as google:
        google.models.generate_content(model="m", contents="wait")
    over = ask(client(proxy))
    assert (over.code, over.status) == (403, "PERMISSION_DENIED")


def test_what_only_google_has(proxy: str, session_id: str) -> None:
    """Embeddings and caches are refused by name, in Google's shape; so is all else under its beta's paths."""
    with client(proxy) as google, client(proxy, api_version="v1beta") as beta:
        for call in (
            lambda: google.models.embed_content(model="m", contents="x"),
            lambda: google.caches.create(model="m", config=types.CreateCachedContentConfig(contents="x")),
            lambda: google.caches.delete(name="cachedContents/x"),
            lambda: beta.files.list(),
        ):
            with pytest.raises(errors.ClientError, match="there are generateContent") as raised:
                call()
            assert (raised.value.code, raised.value.status) == (404, "NOT_FOUND")


@pytest.fixture
def breaking_engine(engine_url: str) -> Iterator[str]:
    """The scripted engine, but every generation dies after a second of silence, when a stream has long begun."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = httpx.get(engine_url + self.path)
            self.answer(reply.status_code, reply.content)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            threading.Event().wait(1)
            self.answer(500, b'{"error": {"message": "it broke"}}')

        def answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_error_in_a_stream(database: Engine, proxy: str, breaking_engine: str) -> None:
    """Both clients hear of it as an error with its code, and the response ends cleanly."""
    open_session(database, breaking_engine)

    async def listen() -> None:
        google = client(proxy).aio
        async for _ in await google.models.generate_content_stream(model="m", contents="b"):
            pass

    def read() -> None:
        with client(proxy) as google:
            list(google.models.generate_content_stream(model="m", contents="a"))

    found: list[errors.APIError] = []
    for ask in (read, lambda: asyncio.run(listen())):
        with pytest.raises(errors.ServerError, match="it broke") as raised:
            ask()
        found.append(raised.value)
    assert [(error.code, error.status) for error in found] == [(500, "INTERNAL")] * 2
    body, key = {"contents": [{"parts": [{"text": "c"}]}]}, {"x-goog-api-key": KEY}
    array = httpx.post(f"{proxy}/v1beta/models/m:streamGenerateContent", json=body, headers=key)
    assert array.json()[-1]["error"]["status"] == "INTERNAL"
