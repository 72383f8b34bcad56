"""The original's JSON: rows become what its clients read. The only place that knows the word "status".

Additions stand beside the original's fields, never instead of them; `timing` keeps its four fields exactly,
because the original refuses others there, and the stages' own figures are in `metadata.stages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import orjson
import zstandard
from sqlalchemy.orm import Session

from polar import queries
from polar.delivery import freshness
from polar.lanes import state as lane_state
from polar.lifecycle import LANE_ALIVE_SECONDS, STAGES, Stage, State
from polar.models import Delivery, Lane, Node, RolloutSession, SessionEvent, Task, TraceRow, TrajectoryRow, now
from polar.queries import counts_at
from polar.topology import shown_url

LIFTED_METADATA = ("group_id", "policy_version", "rollout_step")
RUNNING_WORDS = {
    (Stage.PREWARM, State.QUEUED): "REGISTERED",
    (Stage.PREWARM, State.RUNNING): "INITIALIZING",
    (Stage.EXECUTE, State.QUEUED): "READY",
    (Stage.EXECUTE, State.RUNNING): "RUNNING",
    (Stage.RECONSTRUCT, State.QUEUED): "POST_RUN",
    (Stage.RECONSTRUCT, State.RUNNING): "BUILDING",
    (Stage.EVALUATE, State.QUEUED): "EVALUATING",
    (Stage.EVALUATE, State.RUNNING): "EVALUATING",
}
ENDED_WORDS = {State.FAILED: "ERROR", State.TIMED_OUT: "TIMEOUT", State.CANCELLED: "ERROR"}
AGENT_WORDS = {"timed_out": "TIMEOUT", "failed": "ERROR"}


def session_status(session: RolloutSession) -> str:
    """REGISTERED … EVALUATING, then COMPLETED, ERROR or TIMEOUT; the agent's own failure counts as one."""
    if session.ended_at is None:
        return RUNNING_WORDS[Stage(session.stage), State(session.state)]
    if session.state == State.COMPLETED:
        return AGENT_WORDS.get((session.agent_exit or {}).get("state", ""), "COMPLETED")
    return ENDED_WORDS[State(session.state)]


def timing(session: RolloutSession) -> dict[str, int]:
    """The original's four numbers, in milliseconds."""

    def spent(stage: Stage, part: str) -> int:
        return int(session.timing.get(stage, {}).get(part, 0))

    late = STAGES[2:]
    return {
        "register_to_init_queue_ms": spent(Stage.PREWARM, "queued_ms"),
        "init_ms": spent(Stage.PREWARM, "run_ms"),
        "run_ms": spent(Stage.EXECUTE, "run_ms"),
        "postrun_ms": sum(spent(stage, part) for stage in late for part in ("queued_ms", "run_ms")),
    }


def trace(row: TraceRow, *, full: bool = True) -> dict[str, Any]:
    """One trace; without `full`, its token arrays are left out and counted.

    `decision` is the rule by which it may train or may not, and the reason; None while nothing is decided."""
    body = orjson.loads(zstandard.decompress(row.body))
    certificate = dict(row.certificate)
    decision = certificate.pop("decision", None)
    answer: dict[str, Any] = {
        "finish_reason": body["finish_reason"],
        "reward": row.reward,
        "fidelity": row.fidelity,
        "trainable": row.trainable,
        "weight": row.weight,
        "decision": decision,
        "metadata": {**body["metadata"], "certificate": certificate},
    }
    if not full:
        answer["prompt_tokens"] = len(row.prompt_ids) // 4
        answer["response_tokens"] = len(row.response_ids) // 4
        answer["sampled_tokens"] = int(np.frombuffer(row.loss_mask, np.uint8).sum())
        return answer
    logprobs = None if row.logprobs is None else np.frombuffer(row.logprobs, np.float32).astype(float).tolist()
    return {
        "prompt_ids": np.frombuffer(row.prompt_ids, np.int32).tolist(),
        "response_ids": np.frombuffer(row.response_ids, np.int32).tolist(),
        "loss_mask": np.frombuffer(row.loss_mask, np.uint8).tolist(),
        "response_logprobs": logprobs,
        "prompt_messages": body["prompt_messages"],
        "response_messages": body["response_messages"],
        "tools": body["tools"],
        **answer,
    }


def trajectory(
    session: RolloutSession, task: Task, found: tuple[TrajectoryRow, list[TraceRow]] | None, *, full: bool = True
) -> dict[str, Any]:
    """A session's trajectory; empty, with the error, if none was built."""
    row, traces = found or (None, [])
    own = task.spec.get("metadata") or {}
    metadata: dict[str, Any] = {
        "session_id": session.id,
        "task_id": task.task_id,
        "builder": task.spec["builder"]["strategy"],
        **(row.meta if row else {}),
        "trace_count": len(traces),
        "task_metadata": own,
        "agent_result": session.agent_exit,
        "evaluation": session.verdict,
        **{key: own[key] for key in LIFTED_METADATA if key in own},
    }
    return {
        "status": session_status(session),
        "metadata": metadata,
        "traces": [trace(each, full=full) for each in traces],
        "error": _error_text(session),
    }


def session_result(
    session: RolloutSession, task: Task, found: tuple[TrajectoryRow, list[TraceRow]] | None, *, full: bool = True
) -> dict[str, Any]:
    """SessionResult of the original."""
    metadata = {
        "stage": session.stage,
        "state": session.state,
        "attempt": session.attempt,
        "lane": session.lane,
        "turns": session.turns,
        "sampled_tokens": session.sampled_tokens,
        "reward": session.reward,
        "stages": session.timing,
        "error": session.error,
        "harness": _harness(task),
        "ended_at": session.ended_at.timestamp() if session.ended_at else None,
    }
    return {
        "session_id": session.id,
        "task_id": task.task_id,
        "status": session_status(session),
        "trajectory": trajectory(session, task, found, full=full),
        "timing": timing(session),
        "node_id": session.node_id,
        "error": _error_text(session),
        "metadata": metadata,
    }


def task_status(
    task: Task,
    sessions: Sequence[RolloutSession],
    found: dict[str, tuple[TrajectoryRow, list[TraceRow]]],
    *,
    full: bool = True,
) -> dict[str, Any]:
    """TaskStatus of the original: results of the sessions that have ended."""
    ended = [session for session in sessions if session.ended_at is not None]
    return {
        "task_id": task.task_id,
        "status": task.state,
        "results": [session_result(each, task, found.get(each.id), full=full) for each in ended],
        "result_paths": [],
        "total_sessions": task.num_samples,
        "completed_sessions": len(ended),
        "created_at": task.created_at.timestamp(),
        "updated_at": task.updated_at.timestamp(),
    }


def load_task_status(db: Session, task: Task, *, full: bool = True) -> dict[str, Any]:
    """TaskStatus with everything that it needs read from the tables."""
    ended = queries.sessions_of(db, task.id, ended=True)
    found = freshness.trajectories_of(db, [each.id for each in ended])
    return task_status(task, ended, found, full=full)


def task_result(db: Session, task: Task) -> dict[str, Any]:
    """TaskResult of the original: what a callback carries."""
    whole = load_task_status(db, task)
    return {key: whole[key] for key in ("task_id", "status", "results", "result_paths")}


def callback_body(db: Session, delivery: Delivery) -> dict[str, Any]:
    """What a callback carries: a session's result if it is a session's, else the task's."""
    if delivery.session_id is None:
        return task_result(db, db.get_one(Task, delivery.task_pk))
    session = db.get_one(RolloutSession, delivery.session_id)
    found = freshness.trajectories_of(db, [session.id]).get(session.id)
    return session_result(session, session.task, found)


def task_row(row: dict[str, Any], mean_traces: float | None) -> dict[str, Any]:
    """One line of `/tasks`."""
    task: Task = row["task"]
    return {
        "task_id": task.task_id,
        "status": task.state,
        "harness": _harness(task),
        "model": task.spec["agent"].get("model_name"),
        "num_samples": task.num_samples,
        "completed_sessions": row["completed"],
        "errored_sessions": row["errored"],
        "mean_reward": row["mean_reward"],
        "mean_traces": mean_traces,
        "mean_completions": float(row["mean_completions"]),
        "created_at": task.created_at.timestamp(),
        "updated_at": task.updated_at.timestamp(),
        "source": "live",
    }


def session_row(session: RolloutSession, task: Task) -> dict[str, Any]:
    """One line of `/tasks/{id}/sessions`, with the stage and state of now."""
    return {
        "session_id": session.id,
        "task_id": task.task_id,
        "status": session_status(session),
        "stage": session.stage,
        "state": session.state,
        "attempt": session.attempt,
        "lane": session.lane,
        "node_id": session.node_id,
        "reward": session.reward,
        "turns": session.turns,
        "sampled_tokens": session.sampled_tokens,
        "timing": timing(session),
        "stages": session.timing,
        "error": _error_text(session),
    }


def event(row: SessionEvent) -> dict[str, Any]:
    """One move of a session."""
    return {
        "at": row.at.timestamp(),
        "move": row.move,
        "stage": row.stage,
        "state": row.state,
        "attempt": row.attempt,
        "worker": row.worker,
        "note": row.note,
    }


def node(row: Node, lanes: Sequence[Lane], load: dict[tuple[str, str], int]) -> dict[str, Any]:
    """GatewayNodeInfo of the original, and the node's lanes."""
    own = [lane for lane in lanes if lane.node_id == row.id]
    healthy = now() - row.heartbeat_at < timedelta(seconds=LANE_ALIVE_SECONDS)
    return {
        "node_id": row.id,
        "gateway_url": row.gateway_url,
        "max_init_workers": max(1, sum(lane.ready_buffer for lane in own)),
        "max_run_workers": max(1, sum(lane.max_execute for lane in own)),
        "max_postrun_workers": max(1, sum(lane.max_evaluate for lane in own)),
        "heartbeat_interval_seconds": 30,
        "metrics": counts_at(load),
        "dispatch_reservations": 0,
        "healthy": healthy,
        "draining": row.draining,
        "last_heartbeat": row.heartbeat_at.isoformat(),
        "lanes": [lane_row(lane, draining=row.draining) for lane in own],
    }


def lane_row(lane: Lane, *, draining: bool = False) -> dict[str, Any]:
    """A lane with its engine and what is known of it."""
    alive = now() - lane.heartbeat_at < timedelta(seconds=LANE_ALIVE_SECONDS)
    down_since = lane.engine_down_since
    return {
        "name": lane.name,
        "state": lane_state(lane, alive=alive, draining=draining),
        "engine_down_since": down_since.isoformat() if down_since else None,
        "engine_error": lane.engine_error,
        "engine": {
            "engine": lane.engine.get("engine"),
            "base_url": shown_url(str(lane.engine.get("base_url", ""))),
            "model": lane.engine.get("model"),
        },
        "passport": lane.passport,
        "max_execute": lane.max_execute,
        "ready_buffer": lane.ready_buffer,
        "last_heartbeat": lane.heartbeat_at.isoformat(),
    }


def _harness(task: Task) -> str | None:
    agent = task.spec["agent"]
    return agent.get("harness") or agent.get("import_path")


def _error_text(session: RolloutSession) -> str | None:
    if session.error:
        return f"{session.error['stage']}: {session.error['message']}"
    return (session.agent_exit or {}).get("error")
