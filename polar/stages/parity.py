"""A lane's parity: captured tokens of its latest sessions, scored again by its engine.

The comparison is `engines.parity`'s; here is which tokens may be compared at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import aiohttp
from sqlalchemy import Engine as Database
from sqlalchemy import select
from sqlalchemy.orm import Session

from polar.builders.base import Call
from polar.db import transaction
from polar.engines.logprobs import right_kinds
from polar.engines.parity import TOKENS, Parity, Sample, check
from polar.messages import Sampling
from polar.models import Completion, RolloutSession
from polar.stages.calls import load_calls
from polar.stages.fitness import engine_class
from polar.topology import LaneSpec

SESSIONS = 8
"""Looked through for tokens, latest first."""


def lane_parity(database: Database, lane: LaneSpec, *, tokens: int = TOKENS, alarm: float | None = None) -> Parity:
    """Whether the lane's engine still gives the log-probabilities that were recorded. Raises EngineError.

    With no tokens of the weights in use there is nothing to compare, and the answer has no tokens."""
    return asyncio.run(_check(database, lane, tokens, lane.engine.parity_alarm if alarm is None else alarm))


async def _check(database: Database, lane: LaneSpec, tokens: int, alarm: float) -> Parity:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=lane.engine.timeout_seconds)) as http:
        engine = engine_class(lane.engine)(lane.engine.base_url, http, model=lane.engine.model)
        version = (await engine.passport()).weight_version
        with transaction(database) as db:
            samples = captured(db, lane.name, version, tokens)
        return await check(engine, samples, tokens=tokens, alarm=alarm)


def captured(db: Session, lane: str, version: str | None, tokens: int = TOKENS) -> list[Sample]:
    """Answers of the lane's latest sessions that can be compared, enough for `tokens` of their tokens.

    `version`: the engine's weights; None: it does not say, and whoever asks must know that none were pushed since."""
    latest = (
        select(Completion.session_id, Completion.attempt)
        .join(RolloutSession, RolloutSession.id == Completion.session_id)
        .where(RolloutSession.lane == lane, Completion.outcome == "answered", Completion.logprobs.is_not(None))
        .order_by(Completion.seq.desc())
        .limit(SESSIONS * 16)
    )
    sessions = list(dict.fromkeys((row.session_id, row.attempt) for row in db.execute(latest)))[:SESSIONS]
    found: list[Sample] = []
    for session_id, attempt in sessions:
        for sample in _comparable(load_calls(db, session_id, attempt), version):
            if sum(len(each.output_ids) for each in found) >= tokens:
                return found
            found.append(sample)
    return found


def _comparable(calls: list[Call], version: str | None) -> Iterator[Sample]:
    for call in calls:
        sampled_with = dict(call.metadata.get("sampled_with") or {})
        if "stop" in sampled_with:
            sampled_with["stop"] = tuple(sampled_with["stop"])
        sampling = Sampling(**sampled_with)
        as_it_is = right_kinds(sampling) is None and sampling.json_schema is None
        versions = {str(span.get("version")) for span in call.policy_versions}
        if not as_it_is or not len(call.prompt_ids) or call.logprobs is None or call.prompt_verified is False:
            continue
        if version is not None and versions != {str(version)}:
            continue
        yield Sample(call.prompt_ids.tolist(), call.output_ids.tolist(), call.logprobs.tolist(), call.id)
