"""What both HTTP surfaces share: reading bodies, refusing what cannot be served, running requests, streaming.

The field names of either surface stay in `sglang_api` and `vllm_api`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response, StreamingResponse

from polar.tiny_engine.requests import Completion, Engine, Request
from polar.tiny_engine.sampling import SamplingParams

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)

CLIENT_CLOSED = 499
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_tokens": 0, "min_new_tokens": 0}
CONSTRAINTS = ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "structured_outputs", "guided_json")
Stop = str | list[str] | None
Prompt = list[StrictInt] | list[list[StrictInt]] | str | list[str]


class BadRequest(HTTPException):
    """A 400 that names the field at fault."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(status, message)
        self.field = field


class Sampling(BaseModel):
    """The sampling fields that both surfaces name alike."""

    model_config = ConfigDict(extra="ignore")
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    stop: Stop = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = Field(default=1, ge=1, le=64)

    @model_validator(mode="before")
    @classmethod
    def refuse_the_unsupported(cls, data: Any) -> Any:
        """Answering as if a constraint had been applied would be a lie, so it is refused unless it is neutral."""
        if isinstance(data, dict):
            for name, neutral in NEUTRAL.items():
                if data.get(name) not in (None, neutral):
                    raise ValueError(f"{name} is not supported by this engine")
            for name in CONSTRAINTS:
                if data.get(name):
                    raise ValueError(f"{name} is not supported by this engine")
        return data

    def params(self, max_new_tokens: int, seed: int | None, index: int = 0) -> SamplingParams:
        """The engine's own form; the sequences of one seeded request get seeds that follow each other."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(0, self.top_k),
            min_p=self.min_p,
            seed=None if seed is None else seed + index,
            stop=tuple(text for text in stop if text),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


def error_response(message: str, field: str | None, status: int) -> Response:
    """The error shape that clients of either engine read."""
    kind = "BadRequestError" if status == 400 else "NotFoundError" if status == 404 else "EngineError"
    return json_response(
        {"error": {"message": message, "type": kind, "param": field, "code": status}, "object": "error"}, status
    )


def json_response(content: Any, status: int = 200) -> Response:
    """JSON by way of orjson: token lists of a long context are large."""
    return Response(orjson.dumps(content), status, media_type="application/json")


async def read_body(http: HTTPRequest, model: type[Body]) -> Body:
    """The request body as a model; anything else is a 400 that names the field."""
    raw = await http.body()
    try:
        return model.model_validate(orjson.loads(raw or b"{}"))
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        # pydantic names the branches of a union within the path; a client knows no such field.
        path = [str(part) for part in first["loc"]]
        field = ".".join(part for part in path if part not in ("str", "int") and "[" not in part) or None
        raise BadRequest(f"{field}: {first['msg']}" if field else first["msg"], field) from error


def prompts_of(engine: Engine, prompt: Prompt, field: str) -> tuple[list[list[int]], bool]:
    """Prompts as ids, and whether they came as a batch. Text is encoded with its special tokens read as such."""
    batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    rows: Iterable[Any] = prompt if batch else [prompt]
    out: list[list[int]] = []
    for row in rows:
        ids = engine.tokenizer.encode(row, add_special_tokens=False).ids if isinstance(row, str) else row
        if not ids:
            raise BadRequest(f"{field} is empty", field)
        if min(ids) < 0 or max(ids) >= engine.info.vocab_size:
            raise BadRequest(f"{field} holds an id outside the vocabulary of {engine.info.vocab_size}", field)
        out.append(ids)
    return out, batch


def room(engine: Engine, prompt: list[int], wanted: int | None, default: int, fields: tuple[str, str]) -> int:
    """The completion length to run with. A length that was asked for and does not fit is refused, as engines do."""
    limit, length = engine.info.context_length, len(prompt)
    if length > limit or (length == limit and wanted != 0):
        raise BadRequest(
            f"The input ({length} tokens) is longer than the model's context length ({limit} tokens).", fields[0]
        )
    if wanted is None:
        return min(default, limit - length)
    if length + wanted > limit:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You asked for "
            f"{length + wanted} tokens: {length} tokens from the input and {wanted} tokens for the completion.",
            fields[1],
        )
    return wanted


def admit(engine: Engine, requests: list[Request]) -> list[Request]:
    """The same requests, once the engine has agreed to answer them."""
    for request in requests:
        reason = engine.refuse(request)
        if reason:
            raise BadRequest(reason, "prompt")
    return requests


async def progress(engine: Engine, request: Request) -> AsyncIterator[Completion]:
    """The growing completion after each event."""
    completion = Completion(request)
    async with contextlib.aclosing(engine.generate(request)) as events:
        async for event in events:
            completion.add(event)
            yield completion


async def complete(engine: Engine, request: Request) -> Completion:
    """The whole completion."""
    completion = Completion(request)
    async with contextlib.aclosing(engine.generate(request)) as events:
        async for event in events:
            completion.add(event)
    return completion


async def until_disconnect(http: HTTPRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work, cancelled when the client goes away: nobody would read it."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HTTPException(CLIENT_CLOSED, "the client went away")
    finally:
        watch.cancel()
        task.cancel()


async def _disconnected(http: HTTPRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


async def complete_all(http: HTTPRequest, engine: Engine, requests: list[Request]) -> list[Completion]:
    """All completions of a batch, or an abort of all of them when the client goes away."""

    async def gather() -> list[Completion]:
        return await asyncio.gather(*(complete(engine, request) for request in requests))

    return await until_disconnect(http, gather())


def event_stream(
    engine: Engine, requests: list[Request], chunk: Callable[[Completion], Iterable[dict[str, Any]]]
) -> Response:
    """Server-sent events of one request; closing the response closes the generator, which aborts the request."""
    if len(requests) != 1:
        raise BadRequest("stream takes one sequence at a time", "stream")

    async def body() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(progress(engine, requests[0])) as states:  # type: ignore[type-var]
            async for state in states:
                for data in chunk(state):
                    yield b"data: " + orjson.dumps(data) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")
