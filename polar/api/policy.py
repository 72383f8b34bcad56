"""The policy's version, and the gate of every node: pause holds new generations everywhere, resume lets them go.

Answers once every living proxy has done what was asked, or says which has not. The row and its meaning are
`polar.policy`'s.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from flask import Blueprint, Response, current_app, jsonify, request
from pydantic import Field, StrictInt, StrictStr, ValidationError

from polar import policy
from polar.api.problems import problem
from polar.api.tasks import json_body, number
from polar.db import transaction
from polar.errors import ConflictError, SpecError
from polar.models import Policy, Proxy
from polar.policy import GateMode, Standing
from polar.spec import Spec, validation_errors

blueprint = Blueprint("policy", __name__)
LOOK_SECONDS = 0.05
PAUSE_SECONDS = 300.0
RESUME_SECONDS = 10.0
MAX_WAIT_SECONDS = 3600.0
Name = Annotated[StrictStr, Field(min_length=1, max_length=200)]


class PolicyRequest(Spec):
    """What may be said of the policy; a field that is left out stays as it is."""

    name: Name | None = None
    version: StrictInt | Name | None = None
    """Whole numbers can be compared, and only they."""
    max_staleness: StrictInt | None = Field(default=None, ge=0, le=2**31 - 1)


@blueprint.get("/rollout/policy")
def get_policy() -> Response:
    """Name, version, staleness bound, the gate, and every living proxy process."""
    return jsonify(shown())


@blueprint.put("/rollout/policy")
def put_policy() -> Response:
    """Change name, version or staleness bound; completions are stamped with the version from now on."""
    try:
        asked = PolicyRequest.model_validate(json_body())
    except ValidationError as error:
        errors = validation_errors(error)
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors[:5]), errors=errors) from None
    values = asked.model_dump(exclude_unset=True)
    if values.get("version") is not None:
        values["version"] = str(values["version"])
    with transaction(current_app.config["DATABASE"]) as db:
        policy.change(db, **values)
    return jsonify(shown())


@blueprint.post("/rollout/pause")
def pause() -> Response:
    """Hold new generations on every node: 200 once nothing is sampled anywhere, 504 (still paused) if not in time."""
    mode = request.args.get("mode", GateMode.DRAIN.value)
    wait = number("wait", PAUSE_SECONDS, low=0, high=MAX_WAIT_SECONDS)
    if mode not in (GateMode.DRAIN, GateMode.ABORT):
        raise SpecError.at("mode", f"{mode!r} is neither 'drain' nor 'abort'")
    held = hold(mode, wait)
    return jsonify(held.answer) if not held.late else held.problem(wait)


@dataclass(frozen=True, slots=True)
class Held:
    """What came of closing the gate."""

    answer: dict[str, Any]
    late: list[Proxy]
    """Proxies that may still be sampling."""

    def problem(self, wait: float) -> Response:
        """504, with the gate closed still."""
        names = ", ".join(f"{each.id} ({each.in_flight} calls in flight)" for each in self.late)
        detail = (
            f"after {wait:g} s not every proxy holds, and the gate stays closed: {names}; pause again to go on waiting"
        )
        return problem(504, "not_holding", detail, more=self.answer)


def hold(mode: str, wait: float) -> Held:
    """Close the gate and wait until every living proxy holds, or the time is up. Raises ConflictError."""
    began = time.monotonic()
    with transaction(current_app.config["DATABASE"]) as db:
        policy.change(db, gate=mode)
    found = _await(wait, lambda standing: not standing.not_holding() or standing.gate == GateMode.OPEN)
    if found.gate == GateMode.OPEN:
        raise ConflictError("somebody resumed before every proxy was holding; pause again", code="resumed_meanwhile")
    late = found.not_holding()
    answer = shown() | _fate(found, began) | {"holds": not late, "not_holding": [each.id for each in late]}
    return Held(answer, late)


@blueprint.post("/rollout/resume")
def resume() -> Response:
    """Let every node go on; answers with what became of the calls that were in flight."""
    return jsonify(let_go(number("wait", RESUME_SECONDS, low=0, high=MAX_WAIT_SECONDS)))


def let_go(wait: float, **values: Any) -> dict[str, Any]:
    """Open the gate, changing the policy's row by these values in the same step, and wait until all have heard."""
    began = time.monotonic()
    with transaction(current_app.config["DATABASE"]) as db:
        before = policy.standing(db)
        policy.change(db, gate=GateMode.OPEN.value, **values)
    found = _await(wait, lambda standing: not standing.behind() or standing.gate != GateMode.OPEN)
    return shown() | _fate(before, began) | {"not_resumed": [each.id for each in found.behind()]}


def _await(seconds: float, there: Callable[[Standing], bool]) -> Standing:
    """How the proxies stand once that is so, or when the time is up."""
    end = time.monotonic() + seconds
    while True:
        with transaction(current_app.config["DATABASE"]) as db:
            found = policy.standing(db)
        if there(found) or time.monotonic() >= end:
            return found
        time.sleep(LOOK_SECONDS)


def _fate(standing: Standing, began: float) -> dict[str, Any]:
    return {
        "calls": standing.fate(),
        "lost": [_proxy(each) for each in standing.lost],
        "waited_seconds": round(time.monotonic() - began, 3),
    }


def shown() -> dict[str, Any]:
    """The policy's row and every living proxy, for the wire."""
    with transaction(current_app.config["DATABASE"]) as db:
        row: Policy = policy.current(db)
        standing = policy.standing(db)
    return {
        "name": row.name,
        "version": policy.spelled(row.version),
        "max_staleness": row.max_staleness,
        "gate": row.gate,
        "epoch": row.epoch,
        "updated_at": row.updated_at.timestamp(),
        "proxies": [_proxy(each) for each in standing.proxies],
    }


def _proxy(row: Proxy) -> dict[str, Any]:
    names = ("id", "node_id", "epoch", "in_flight", "held", "drained", "aborted")
    return {
        **{name: getattr(row, name) for name in names},
        "started_at": row.started_at.timestamp(),
        "last_heartbeat": row.heartbeat_at.isoformat(),
    }
