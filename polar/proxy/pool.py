"""Engines and renderers of lanes: made at a lane's first call, kept while its EngineSpec stays the same.

Knows the engine's passport. Which lane a call belongs to is the session's row to say.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from polar.engines import ENGINES
from polar.engines.base import Engine, Passport
from polar.errors import EngineError, SpecError
from polar.proxy.unrendered import NoRenderer
from polar.registry import load
from polar.renderers import for_folder
from polar.renderers.base import Renderer
from polar.renderers.selftest import doubt_of
from polar.topology import EngineSpec, shown_url

KEEPALIVE_SECONDS = 3.0
"""Engines under uvicorn close an idle connection after 5 s; a pool that keeps it longer sends into a closed one."""
CONNECT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class EngineLink:
    """What a call needs of its lane's engine."""

    spec: EngineSpec
    engine: Engine
    passport: Passport
    renderer: Renderer
    doubt: str | None = None
    """Why the renderer's prompts cannot be trusted to be exact; None if its self-test went well."""
    canonical: bool = False
    """The engine renders and parses; `renderer` only counts and decodes."""


class EnginePool:
    """One aiohttp session and one link per EngineSpec."""

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        # How long an answer may take is the lane's affair; only the connect has a limit here.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, cookie_jar=aiohttp.DummyCookieJar())
        self._links: dict[bytes, EngineLink] = {}
        self._locks: dict[bytes, asyncio.Lock] = {}

    async def link(self, lane: str | None, spec: dict[str, Any] | None) -> EngineLink:
        """The link of a lane. Raises EngineError, retryable while the engine is away."""
        if spec is None:
            raise EngineError(f"lane {lane!r} is not registered; is its worker running?", code="no_lane")
        key = orjson.dumps(spec, option=orjson.OPT_SORT_KEYS)
        if (found := self._links.get(key)) is not None:
            return found
        async with self._locks.setdefault(key, asyncio.Lock()):
            if key not in self._links:
                self._links[key] = await self._make(EngineSpec.model_validate(spec))
            return self._links[key]

    async def close(self) -> None:
        """Let the connections go."""
        await self._http.close()

    async def _make(self, spec: EngineSpec) -> EngineLink:
        try:
            cls = load("engine", ENGINES, spec.engine, Engine)  # type: ignore[type-abstract]
            engine = cls(spec.base_url, self._http, model=spec.model)
            passport = await engine.passport()
            if spec.mode == "canonical" or not cls.TAKES_IDS:
                return await self._canonical(spec, engine, passport)
            folder = tokenizer_folder(spec, passport)
            renderer = await asyncio.to_thread(for_folder, folder, spec.renderer, spec.model or passport.model)
            doubt = await asyncio.to_thread(doubt_of, renderer)
        except SpecError as error:
            raise EngineError(error.message, code="engine_setup") from error
        return EngineLink(spec, engine, passport, renderer, doubt)

    async def _canonical(self, spec: EngineSpec, engine: Engine, passport: Passport) -> EngineLink:
        if not engine.CHATS:
            raise EngineError(
                f"the {spec.engine} engine has no chat endpoint that Polar speaks: set `mode: token` for its lane",
                code="engine_setup",
            )
        try:
            folder = tokenizer_folder(spec, passport)
            renderer = await asyncio.to_thread(for_folder, folder, spec.renderer, spec.model or passport.model)
        except (EngineError, SpecError):
            renderer = NoRenderer()
        return EngineLink(spec, engine, passport, renderer, canonical=True)


def tokenizer_folder(spec: EngineSpec, passport: Passport) -> Path:
    """The folder with tokenizer.json. Raises EngineError that says how to name one."""
    named = spec.tokenizer or passport.tokenizer
    if named and (Path(named) / "tokenizer.json").is_file():
        return Path(named)
    where = f"`tokenizer: {spec.tokenizer}`" if spec.tokenizer else f"the engine's own, {passport.tokenizer!r},"
    raise EngineError(
        f"{where} is no folder on this node with a tokenizer.json: "
        f"set `tokenizer` of the engine at {shown_url(spec.base_url)} in the topology",
        code="no_tokenizer",
    )
