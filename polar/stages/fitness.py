"""Whether a lane's engine can give what a task needs: its passport, probed and kept, and the verdict before an agent
starts.

What an engine can do, `engines.probe` finds out; here is when it is asked, and what a task asks of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any

import aiohttp
from sqlalchemy import Engine as Database

from polar import builders, engines, lanes
from polar.db import transaction
from polar.engines.base import Engine
from polar.engines.logprobs import right_kinds
from polar.engines.probe import probe
from polar.errors import EngineError, SpecError
from polar.log import line
from polar.messages import Sampling
from polar.models import now
from polar.registry import load
from polar.spec import TaskRequest
from polar.stages.base import Job
from polar.topology import EngineSpec, LaneSpec, shown_url

logger = logging.getLogger(__name__)
FRESH = timedelta(minutes=5)
"""How long a passport is believed: engines are started again with other flags."""
PATIENCE = 60.0
"""Seconds that a probe may take."""
KNOCK = 10.0
"""Seconds that an engine may take to say who it is."""


def engine_class(spec: EngineSpec) -> type[Engine]:
    """The adapter of a lane. Raises EngineError."""
    try:
        return load("engine", engines.ENGINES, spec.engine, Engine)  # type: ignore[type-abstract]
    except SpecError as error:
        raise EngineError(error.message, code="engine_setup") from error


async def probed(spec: EngineSpec) -> dict[str, Any]:
    """The passport of a lane's engine, tried. Raises EngineError."""
    cls = engine_class(spec)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE)) as http:
        passport = await probe(cls(spec.base_url, http, model=spec.model), canonical=spec.mode == "canonical")
    return {**asdict(passport), "mode": "token" if passport.ids_in else "canonical"}


def is_away(error: EngineError) -> bool:
    """Whether an engine that says this, or nothing, may be back any moment."""
    return error.code in ("engine_down", "engine_cut", "engine_timeout") or error.retryable


def knock(lane: LaneSpec) -> None:
    """Ask the lane's engine who it is, and nothing more. Raises EngineError."""

    async def ask() -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=KNOCK)) as http:
            await engine_class(lane.engine)(lane.engine.base_url, http, model=lane.engine.model).passport()

    asyncio.run(ask())


def look(database: Database, lane: LaneSpec) -> dict[str, Any]:
    """Probe the lane's engine and keep what was found. Raises EngineError."""
    passport = asyncio.run(probed(lane.engine))
    kept = {**passport, "of": lane.engine.model_dump(mode="json"), "probed_at": now().isoformat()}
    with transaction(database) as db:
        lanes.note_passport(db, lane.name, kept)
    told = {name: passport[name] for name in ("engine", "version", "mode", "logprobs", "context_length")}
    logger.info(line("engine probed", lane=lane.name, **told))
    return kept


def kept_passport(database: Database, lane: LaneSpec) -> dict[str, Any] | None:
    """What was found of this very engine lately."""
    with transaction(database) as db:
        passport = lanes.passport(db, lane.name)
    if passport.get("of") != lane.engine.model_dump(mode="json"):
        return None
    return passport if now() - datetime.fromisoformat(passport["probed_at"]) < FRESH else None


def require_fit(job: Job) -> None:
    """Raises EngineError, once and for all, if the lane's engine cannot give what the task needs.

    A refusal rests on a probe of this moment. An engine that is away is no reason to refuse: the proxy waits for it."""
    try:
        passport = kept_passport(job.database, job.lane)
        if passport is None or unfit(passport, job.lane, job.task) is not None:
            passport = look(job.database, job.lane)
    except EngineError as error:
        if is_away(error):
            logger.info(line("engine not probed", lane=job.lane.name, cause=error.message))
            return
        raise
    if (reason := unfit(passport, job.lane, job.task)) is not None:
        raise EngineError(reason, code="engine_unfit")


def unfit(passport: Mapping[str, Any], lane: LaneSpec, task: TaskRequest) -> str | None:
    """Why this engine will not do for the task, with what to do about it; None if it will.

    A scripted engine will do for anything: what it plays is nobody's policy, and says so."""
    builder = builders.create(task.builder)
    if passport.get("scripted") or not builder.NEEDS_IDS:
        return None
    where = f"lane {lane.name} ({passport['engine']} at {shown_url(lane.engine.base_url)})"
    if not passport["ids_out"]:
        return (
            f"{where} gives no token ids, and builder {task.builder.strategy} makes traces of them: take a lane whose "
            "engine gives them, or the builder `messages`, whose traces are read and not trained on"
        )
    needed = right_kinds(Sampling(**task.sampling.model_dump()))
    if needed is None or passport["logprobs"] in needed[1]:
        return None
    fix = engine_class(lane.engine).PROCESSED_BY
    return (
        f"{where} gives {passport['logprobs']} log-probabilities, which are not those of what it draws from under the "
        f"task's sampling.{needed[0]}: {fix}, or leave sampling.{needed[0]} out of the task"
    )
