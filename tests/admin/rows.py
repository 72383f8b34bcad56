"""Rows as a run leaves them: a task whose sessions went through every stage, with calls, a trace and a verdict."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy import Engine
from sqlalchemy.orm import Session

from polar import lanes, lifecycle
from polar.bodies import pack
from polar.db import transaction
from polar.lifecycle import STAGES, Stage
from polar.models import Completion, RolloutSession, TraceRow, TrajectoryRow, now
from tests.fakes.tasks import task, topology
from tests.integration.rig import MODEL

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}
CERTIFICATE = {
    "fidelity": "exact",
    "flags": ["truncated"],
    "completions": 2,
    "sampled_tokens": 6,
    "policy_versions": [{"version": "1", "start": 0, "end": 4}, {"version": "2", "start": 8, "end": 10}],
    "prompt_verified": True,
    "first_difference": None,
    "decision": {"rule": "trainable", "reason": "the evaluator's reward"},
}


def lane_is_there(database: Engine) -> None:
    """Node node-1 with lane gpu0, whose tokenizer is the tiny model's."""
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, lane)
        lanes.note_passport(db, lane.name, {"engine": "sglang", "model": "tiny", "tokenizer": str(MODEL)})


def open_task(database: Engine, task_id: str = "task-1", samples: int = 1, **changes: Any) -> list[str]:
    """A task that has just been submitted; the ids of its sessions."""
    changes = {"evaluator": {"strategy": "command", "config": {"command": "true"}}, **changes}
    with transaction(database) as db:
        row = lifecycle.submit(db, task(task_id=task_id, num_samples=samples, **changes))
        db.flush()
        return [each.id for each in row.sessions]


def run(database: Engine, session_id: str, text: str = "All done.", reward: float | None = 1.0) -> list[str]:
    """Take an open session to its end; the ids of its two calls."""
    with transaction(database) as db:
        session = db.get_one(RolloutSession, session_id)
        session.lane, session.node_id = "gpu0", "node-1"
    calls: list[str] = []
    for stage in STAGES:
        with transaction(database) as db:
            claimed = lifecycle.claim(db, session_id, stage, "worker-1")
            assert claimed is not None
            values: dict[str, Any] = {}
            if stage is Stage.EXECUTE:
                calls = _calls(db, session_id, text)
                values = {"turns": 2, "sampled_tokens": 6, "agent_exit": {"state": "completed", "exit_code": 0}}
            if stage is Stage.RECONSTRUCT:
                _trace(db, session_id, text, calls)
            if stage is Stage.EVALUATE:
                evidence = {"stdout": text.replace("\0", ""), "exit_code": 0}
                verdict = {"strategy": "command", "outcome_reward": reward, "trace_rewards": None, "evidence": evidence}
                values = {"reward": reward, "verdict": verdict}
            lifecycle.advance(db, claimed, **values)
    return calls


def _calls(db: Session, session_id: str, text: str) -> list[str]:
    ids = [f"cmp-{uuid.uuid4().hex[:24]}" for _ in range(2)]
    asked: list[dict[str, Any]] = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    first = {"role": "assistant", "content": "", "tool_calls": [call]}
    later = [*asked, first, {"role": "tool", "tool_call_id": "call_1", "content": text}]
    last = {"role": "assistant", "content": text}
    bodies = [orjson.dumps({"model": "m", "messages": each, "tools": [TOOL]}) for each in (asked, later)]
    for number, (messages, answer) in enumerate([(asked, first), (later, last)]):
        base = bodies[0] if number else None
        db.add(
            Completion(
                id=ids[number],
                session_id=session_id,
                attempt=1,
                outcome="answered",
                parent_id=ids[0] if number else None,
                parent_reason="anchor" if number else "root",
                dialect="openai_chat",
                model_requested="m",
                model_used="tiny",
                request=pack(bodies[number], base),
                answer=pack(orjson.dumps({"choices": [{"message": _without_nul(answer)}]})),
                parsed={"message": _without_nul(answer), **({"base": ids[0]} if number else {})},
                context_len=len(messages),
                prompt_len=5 if not number else 13,
                suffix_ids=np.arange(40, 45 if not number else 44, dtype="<i4").tobytes(),
                output_ids=np.arange(60, 64 if not number else 62, dtype="<i4").tobytes(),
                logprobs=np.full(4 if not number else 2, -0.5, "<f4").tobytes(),
                finish_reason="stop",
                policy_versions=[{"version": "1", "start": 0, "end": 4}],
                prompt_verified=True,
                engine={"ms": 12, "name": "sglang"},
                finished_at=now(),
                delivered=True,
            )
        )
        db.flush()
    return ids


def _without_nul(value: Any) -> Any:
    """As the recorder keeps it: jsonb refuses NUL."""
    return orjson.loads(orjson.dumps(value).replace(b"\\u0000", b""))


def _trace(db: Session, session_id: str, text: str, calls: list[str]) -> None:
    db.add(TrajectoryRow(session_id=session_id, attempt=1, builder="prefix_merging"))
    db.flush()
    put_trace(db, session_id, np.arange(40, 45), np.arange(60, 70), [1] * 4 + [0] * 4 + [1] * 2, text, calls)


def put_trace(db: Session, session_id: str, prompt: Any, response: Any, mask: Any, text: str, calls: list[str]) -> None:
    """A trace of these tokens, sampled at -0.5 each."""
    mask = np.asarray(mask, np.uint8)
    starts = [(0, 4), (8, 10)]
    lines = [
        {"completion_id": call, "start": start, "end": end, "role": "main", "trained": True}
        for call, (start, end) in zip(calls, starts, strict=False)
    ]
    body = {
        "prompt_messages": [{"role": "user", "content": text}],
        "response_messages": [{"role": "assistant", "content": text}],
        "tools": [TOOL],
        "finish_reason": "stop",
        "metadata": {"completion_metadata": lines},
    }
    db.add(
        TraceRow(
            session_id=session_id,
            number=0,
            prompt_ids=np.asarray(prompt, "<i4").tobytes(),
            response_ids=np.asarray(response, "<i4").tobytes(),
            loss_mask=mask.tobytes(),
            logprobs=(mask * np.float32(-0.5)).astype("<f4").tobytes(),
            reward=1.0,
            weight=1.0,
            trainable=True,
            fidelity="exact",
            certificate=CERTIFICATE,
            body=zstandard.compress(orjson.dumps(body)),
        )
    )
