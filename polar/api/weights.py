"""`POST /rollout/policy/push`: new weights on every lane in one call, and not one token sampled by the wrong ones.

Closes the gate, has each lane's engine take the checkpoint, sets the version and opens the gate again, in this order.
If anything fails the gate stays closed: some engines may have the new weights and some the old. The engines are asked
by their nodes' proxies; `polar.weights` holds the rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from flask import Blueprint, Response, current_app, jsonify
from pydantic import Field, StrictInt, ValidationError, model_validator

from polar import lanes, policy, weights
from polar.api.policy import PAUSE_SECONDS, RESUME_SECONDS, Name, hold, let_go, shown
from polar.api.problems import problem
from polar.api.tasks import json_body
from polar.db import transaction
from polar.engines import ENGINES
from polar.engines.base import Engine
from polar.errors import ConflictError, SpecError
from polar.models import Lane, WeightPush
from polar.registry import load
from polar.spec import Spec, validation_errors
from polar.weights import UNFINISHED, PushState

blueprint = Blueprint("weights", __name__)
LOOK_SECONDS = 0.05


class ProbeSpec(Spec):
    """A few tokens that the trainer has scored with the new weights, at temperature 1: the engines are held to them."""

    prompt_ids: Annotated[tuple[StrictInt, ...], Field(min_length=1, max_length=4096)]
    output_ids: Annotated[tuple[StrictInt, ...], Field(min_length=1, max_length=512)]
    logprobs: tuple[float, ...]
    """One for each of `output_ids`."""

    @model_validator(mode="after")
    def _as_many(self) -> ProbeSpec:
        if len(self.logprobs) != len(self.output_ids):
            raise ValueError(f"logprobs: has {len(self.logprobs)} values for {len(self.output_ids)} output_ids")
        return self


class PushRequest(Spec):
    """A checkpoint that becomes the policy."""

    version: StrictInt | Name
    """What the new weights are called; whole numbers can be compared."""
    path: Name
    """Folder of the checkpoint, as the engines' machines see it."""
    mode: Literal["drain", "abort"] = "drain"
    """What becomes of calls in flight: they end, or are cut and go on with the new weights."""
    lanes: tuple[str, ...] | None = None
    """Lanes whose engines take it; None: every lane that is alive."""
    probe: ProbeSpec | None = None
    """Checked on each engine before the gate opens."""
    wait: float = Field(default=PAUSE_SECONDS, gt=0, le=3600)
    """Seconds for the gate to hold, and again for the engines."""
    resume: bool = True
    """False: the gate stays closed after all went well."""


@blueprint.post("/rollout/policy/push")
def push() -> Response:
    """Give every lane's engine new weights: 200 once all have them and the gate is open. Else it stays closed."""
    try:
        asked = PushRequest.model_validate(json_body())
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors[:5]), errors=errors) from None
    with transaction(current_app.config["DATABASE"]) as db:
        chosen = _chosen(lanes.alive(db), asked.lanes)
    held = hold(asked.mode, asked.wait)
    if held.late:
        return held.problem(asked.wait)
    pushed = _pushed(asked, chosen)
    told = {"lanes": {row.lane: _row(row) for row in pushed}}
    failed = [row for row in pushed if row.state != PushState.DONE]
    if failed:
        reasons = "; ".join(f"{row.lane}: {row.error}" for row in failed)
        detail = f"the gate stays closed, for not every engine has version {asked.version}: {reasons}. Push again"
        return problem(502, "push_failed", detail, more=held.answer | told)
    version = {"version": str(asked.version)}
    if asked.resume:
        return jsonify(let_go(RESUME_SECONDS, **version) | {"calls": held.answer["calls"]} | told)
    with transaction(current_app.config["DATABASE"]) as db:
        policy.change(db, **version)
    return jsonify(shown() | {"calls": held.answer["calls"]} | told)


def _chosen(alive: Sequence[Lane], names: Sequence[str] | None) -> list[Lane]:
    """The lanes to push to. Raises SpecError and ConflictError before anything has happened."""
    known = {lane.name: lane for lane in alive}
    for number, name in enumerate(names or ()):
        if name not in known:
            raise SpecError.at(f"lanes.{number}", f"{name!r} is no lane that is alive; there are: {_list(known)}")
    chosen = [known[name] for name in dict.fromkeys(names if names is not None else known)]
    if not chosen:
        raise ConflictError("no lane is alive, so no engine can take weights; start a worker", code="no_lane")
    unable = [lane.name for lane in chosen if not _takes_weights(lane)]
    if unable:
        said = f"the engines of {_list(unable)} take no weights over HTTP; name the other lanes in `lanes`, "
        raise ConflictError(f"{said}and give these their weights yourself", code="takes_no_weights")
    return chosen


def _takes_weights(lane: Lane) -> bool:
    member = load("engine", ENGINES, lane.engine["engine"], Engine)  # type: ignore[type-abstract]
    return member.TAKES_WEIGHTS and not lane.passport.get("scripted")


def _list(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _pushed(asked: PushRequest, chosen: Sequence[Lane]) -> Sequence[WeightPush]:
    """What came of it at each lane, once all have ended or the time is up."""
    database, end = current_app.config["DATABASE"], time.monotonic() + asked.wait
    probe = asked.probe.model_dump(mode="json") if asked.probe else None
    with transaction(database) as db:
        push_id = weights.begin(db, chosen, str(asked.version), asked.path, probe)
    while True:
        late = time.monotonic() >= end
        with transaction(database) as db:
            if late:
                weights.give_up(db, push_id, f"not done after {asked.wait:g} s: is the node's proxy running?")
            rows = weights.outcome(db, push_id)
        if not any(row.state in UNFINISHED for row in rows):
            return rows
        time.sleep(LOOK_SECONDS)


def _row(row: WeightPush) -> dict[str, Any]:
    return {"state": row.state, "error": row.error, "seconds": row.seconds, "difference": row.difference}
