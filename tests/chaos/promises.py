"""What must hold after every fault, read from the tables, the API, the callbacks, the agents' notes and the machine."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from polar.lifecycle import ENDED
from polar.models import Completion, RolloutSession, SessionEvent, Task
from tests.chaos.agent import TURNS
from tests.chaos.faults import Fault
from tests.chaos.scene import Scene, until

CLEAN_SECONDS = 25.0
CALLBACK_SECONDS = 80.0
"""A sender that dies in the middle of a callback has it sent again a minute later."""


@dataclass(frozen=True)
class Seen:
    """How a round of sessions came out."""

    completed: int
    sessions: int
    again: int
    """Attempts beyond the first, over all sessions."""
    partial: int
    """Completed sessions whose agent did not end well."""
    seen: int
    """Answers that agents saw, each in the record once."""
    repeated: int
    """Callbacks that came more than once, all alike."""

    def outcome(self) -> str:
        """In a few words."""
        said = f"{self.completed} of {self.sessions} completed"
        if self.partial:
            said += f", {self.partial} with an agent that was killed"
        return said


def check(scene: Scene, fault: Fault | None, names: list[str]) -> Seen:
    """Check every promise for these tasks. Raises AssertionError."""
    until(lambda: not scene.left_behind(), CLEAN_SECONDS, lambda: f"left behind: {scene.left_behind()}")
    until(lambda: not scene.unclean(names), CLEAN_SECONDS, lambda: "rows still name runtimes")
    sessions = scene.read(lambda db: _ended_once(db, names))
    partial = sum((each.agent_exit or {}).get("state") != "completed" for each in sessions)
    assert partial == (fault.ends_agents if fault else 0), [(each.id, each.agent_exit, each.error) for each in sessions]
    seen = scene.read(lambda db: _nothing_lost(db, scene, sessions))
    repeated = _delivered_as_one(scene, names, sessions)
    return Seen(
        completed=sum(each.state == "completed" for each in sessions),
        sessions=len(sessions),
        again=sum(each.attempt - 1 for each in sessions),
        partial=partial,
        seen=seen,
        repeated=repeated,
    )


def _ended_once(db: Session, names: list[str]) -> list[RolloutSession]:
    """Every acknowledged task has ended, and every session of it once."""
    tasks = db.scalars(select(Task).where(Task.task_id.in_(names))).all()
    assert sorted(task.task_id for task in tasks) == sorted(names), "a task is missing, or there twice"
    assert {task.state for task in tasks} == {"completed"}
    assert all(task.ended_at for task in tasks)
    sessions = [session for task in tasks for session in task.sessions]
    assert len(sessions) == sum(task.num_samples for task in tasks)
    query = select(SessionEvent).where(SessionEvent.session_id.in_([each.id for each in sessions]))
    events = db.scalars(query.order_by(SessionEvent.id)).all()
    ends = Counter(event.session_id for event in events if event.state in ENDED)
    assert ends == {each.id: 1 for each in sessions}
    for each in sessions:
        assert [event for event in events if event.session_id == each.id][-1].state in ENDED
        assert (each.state, each.error) == ("completed", None), (each.id, each.state, each.error)
    return list(sessions)


def _nothing_lost(db: Session, scene: Scene, sessions: list[RolloutSession]) -> int:
    """Every answer an agent saw is in the record, once; and the attempt that counts has its three calls, once each."""
    ids = [each.id for each in sessions]
    query = select(Completion).where(Completion.session_id.in_(ids), Completion.outcome == "answered")
    rows = {row.id: row for row in db.scalars(query)}
    total = 0
    counted: dict[str, list[tuple[int, str]]] = {each.id: [] for each in sessions}
    for path in scene.seen.glob("*.jsonl"):
        session_id = path.name.partition(".")[0]
        if session_id not in counted:
            continue
        notes = [json.loads(line) for line in path.read_text().splitlines()]
        assert [note["turn"] for note in notes] == list(range(len(notes)))
        for note in notes:
            completion = "cmp-" + note["id"].removeprefix("chatcmpl-")
            assert completion in rows, f"{completion} of {session_id} was seen and is not in the record"
            total += 1
            counted[session_id].append((rows[completion].attempt, completion))
    for session in sessions:
        answered = {
            row.id for row in rows.values() if (row.session_id, row.attempt) == (session.id, session.execute_attempt)
        }
        seen = [completion for attempt, completion in counted[session.id] if attempt == session.execute_attempt]
        assert len(seen) == len(set(seen)), f"{session.id}: one answer was seen as two"
        assert set(seen) <= answered
        if (session.agent_exit or {}).get("state") == "completed":
            assert len(seen) == TURNS, f"{session.id}: {len(seen)} answers seen"
            assert answered == set(seen), f"{session.id}: answered twice: {answered - set(seen)}"
        else:
            assert len(answered - set(seen)) <= 1
    return total


def _delivered_as_one(scene: Scene, names: list[str], sessions: list[RolloutSession]) -> int:
    """The feed has each session once; callbacks came for all, and all that came of one session are alike."""
    wanted = {each.id for each in sessions}
    counting = {each.id: (each.agent_exit or {}).get("state") == "completed" for each in sessions}

    def called() -> bool:
        done = {body["session_id"] for event, body in list(scene.callbacks.bodies) if event == "session"}
        ended = {body["task_id"] for event, body in list(scene.callbacks.bodies) if event == "task"}
        return wanted <= done and set(names) <= ended

    until(called, CALLBACK_SECONDS, lambda: "callbacks are missing")
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        for result in _feed(scene, name):
            assert result["session_id"] not in results, "the feed has a session twice"
            results[result["session_id"]] = result
    assert results.keys() == wanted
    for session_id, result in results.items():
        (trace,) = result["trajectory"]["traces"]
        metadata = result["trajectory"]["metadata"]
        if counting[session_id]:
            assert metadata["reconstruction_stats"]["completions_merged"] == TURNS, (session_id, metadata)
            assert trace["fidelity"] == "exact" and trace["loss_mask"].count(1) > 0
        assert trace["loss_mask"].count(1) == sum(each["sampled"] for each in _sampled(scene, session_id))
    bodies = [body for event, body in scene.callbacks.bodies if event == "session" and body["session_id"] in wanted]
    for body in bodies:
        assert _essence(body) == _essence(results[body["session_id"]])
    assert _essences(_feed(scene, names[0])) == _essences(_feed(scene, names[0]))
    return len(bodies) - len(wanted)


def _feed(scene: Scene, name: str) -> list[dict[str, Any]]:
    answer = scene.http.get("/rollout/results", params={"task_id": name, "after": "0", "limit": 1000})
    found: list[dict[str, Any]] = answer.raise_for_status().json()["results"]
    return found


def _sampled(scene: Scene, session_id: str) -> list[dict[str, Any]]:
    """The calls that count, with how many tokens each sampled."""

    def ask(db: Session) -> list[dict[str, Any]]:
        session = db.get_one(RolloutSession, session_id)
        query = select(Completion).where(
            Completion.session_id == session_id,
            Completion.attempt == session.execute_attempt,
            Completion.outcome.in_(("answered", "aborted")),
        )
        return [{"id": row.id, "sampled": len(row.output_ids) // 4} for row in db.scalars(query)]

    return scene.read(ask)


def _essence(result: dict[str, Any]) -> str:
    """What makes two results the same one."""
    parts = {key: result[key] for key in ("session_id", "task_id", "status", "trajectory", "metadata")}
    return json.dumps(parts, sort_keys=True)


def _essences(results: list[dict[str, Any]]) -> list[str]:
    return [_essence(each) for each in results]
