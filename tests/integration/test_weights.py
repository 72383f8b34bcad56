"""New weights on every lane in one call: real API, real proxies of two nodes, real engines, real Postgres."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, select, update

from polar import lifecycle, queries
from polar.db import transaction
from polar.delivery.freshness import RULE
from polar.models import Lane, Node, TraceRow, WeightPush, now
from tests.fakes.checkpoints import MODEL, shifted
from tests.fakes.tasks import task_body
from tests.integration.rig import client as openai_client
from tests.integration.rig import completions, free_port, open_session, process, serve, until
from tests.integration.test_feed import submit, traced

pytestmark = pytest.mark.integration
SAID = {"role": "user", "content": "find a"}


@pytest.fixture
def engines() -> Iterator[list[str]]:
    """Two engines with the packaged model, each its own process."""
    with ExitStack() as stack:
        urls = []
        for _ in range(2):
            url = f"http://127.0.0.1:{free_port()}"
            argv = [sys.executable, "-m", "polar.tiny_engine", "--model", str(MODEL), "--port", url.rpartition(":")[2]]
            stack.enter_context(process(argv, f"{url}/model_info"))
            urls.append(url)
        yield urls


@pytest.fixture
def lanes(database: Engine, engines: list[str]) -> list[str]:
    """A lane for each engine; gpu0 has an executing session."""
    # Hot, so that an answer goes on for long; and always the same one.
    open_session(database, engines[0], sampling={"temperature": 5.0, "seed": 3})
    with transaction(database) as db:
        db.add(Lane(name="gpu1", node_id="local", engine={"base_url": engines[1]}, max_execute=1, ready_buffer=1))
        specs = {"gpu0": engines[0], "gpu1": engines[1]}
        for name, url in specs.items():
            engine = {"engine": "sglang", "base_url": url}
            db.execute(update(Lane).where(Lane.name == name).values(engine=engine, heartbeat_at=now()))
        db.execute(update(Node).values(heartbeat_at=now()))
    return ["gpu0", "gpu1"]


def version(url: str) -> str:
    found: str = httpx.get(f"{url}/model_info").json()["weight_version"]
    return found


def scored(url: str, ids: list[int]) -> list[float]:
    """Log-probability of each of these ids but the first."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    pairs = httpx.post(f"{url}/generate", json=body).json()["meta_info"]["input_token_logprobs"]
    return [pair[0] for pair in pairs[1:]]


def test_a_push_reaches_every_engine(
    api: FlaskClient, database: Engine, database_url: str, engines: list[str], lanes: list[str], tmp_path: Path
) -> None:
    """Both engines have the weights and the version, the gate is open, and what is sampled then says so."""
    folder = shifted(tmp_path / "step-7")
    before = scored(engines[0], [1, 2, 3])
    with serve(database_url) as one, serve(database_url):
        openai_client(one).chat.completions.create(model="m", messages=[SAID], max_tokens=3)
        pushed = api.post("/rollout/policy/push", json={"version": 7, "path": str(folder), "wait": 30})
        assert pushed.status_code == 200, pushed.json
        assert (pushed.json["version"], pushed.json["gate"], pushed.json["not_resumed"]) == (7, "open", [])
        assert {name: row["state"] for name, row in pushed.json["lanes"].items()} == dict.fromkeys(lanes, "done")
        assert [version(url) for url in engines] == ["7", "7"]
        assert scored(engines[0], [1, 2, 3]) == scored(engines[1], [1, 2, 3]) != before
        openai_client(one).chat.completions.create(model="m", messages=[SAID, SAID], max_tokens=3)
    assert [[span["version"] for span in row.policy_versions] for row in completions(database)] == [["default"], ["7"]]


def test_a_call_in_flight_goes_on_with_the_new_weights(
    api: FlaskClient, database: Engine, database_url: str, lanes: list[str], tmp_path: Path
) -> None:
    """Mode abort: one answer of two spans, the second by the weights that were pushed in its middle."""
    folder = shifted(tmp_path / "step-8")
    with serve(database_url) as url:
        call: dict[str, Any] = {"model": "m", "messages": [SAID], "max_tokens": 2000, "stream": True}
        answer = openai_client(url, timeout=60).chat.completions.create(**call)
        next(chunk for chunk in answer if chunk.choices[0].delta.content)  # the engine is at it
        pushed = api.post("/rollout/policy/push", json={"version": 8, "path": str(folder), "mode": "abort"}).json
        assert [chunk.choices[0].finish_reason for chunk in answer][-1] is not None
    (row,) = completions(database)
    assert pushed["calls"]["aborted"] == 1
    assert [span["version"] for span in row.policy_versions] == ["default", "8"]


def test_a_failed_push_keeps_the_gate_closed(
    api: FlaskClient, database_url: str, engines: list[str], lanes: list[str], tmp_path: Path
) -> None:
    """One engine that refuses: 502 that names its lane, the version unchanged, the gate closed; pushed again, open."""
    folder = shifted(tmp_path / "step-7")
    api.put("/rollout/policy", json={"version": 6})
    with serve(database_url):
        refused = api.post("/rollout/policy/push", json={"version": 7, "path": str(tmp_path / "none")})
        assert (refused.status_code, refused.json["code"]) == (502, "push_failed")
        assert "gpu0" in refused.json["detail"] and "gpu1" in refused.json["detail"]
        assert {row["state"] for row in refused.json["lanes"].values()} == {"failed"}
        standing = api.get("/rollout/policy").json
        assert (standing["version"], standing["gate"]) == (6, "drain")
        again = api.post("/rollout/policy/push", json={"version": 7, "path": str(folder)}).json
        assert (again["version"], again["gate"]) == (7, "open")


def test_a_probe_is_held_to(
    api: FlaskClient, database_url: str, engines: list[str], lanes: list[str], tmp_path: Path
) -> None:
    """Engines that score the probe as the trainer did pass; with a trainer's other numbers the gate stays closed."""
    folder, ids = shifted(tmp_path / "step-7"), [5, 6, 7, 8, 9]
    wrong = {"prompt_ids": ids[:2], "output_ids": ids[2:], "logprobs": scored(engines[0], ids)[1:]}
    with serve(database_url):
        push: dict[str, Any] = {"version": 7, "path": str(folder), "lanes": ["gpu0"], "probe": wrong}
        refused = api.post("/rollout/policy/push", json=push)
        assert (refused.status_code, refused.json["gate"]) == (502, "drain")
        assert "scores the probe" in refused.json["lanes"]["gpu0"]["error"]
        push["probe"] = {**wrong, "logprobs": scored(engines[0], ids)[1:]}
        taken = api.post("/rollout/policy/push", json=push).json
        assert (taken["gate"], list(taken["lanes"])) == ("open", ["gpu0"])
        assert taken["lanes"]["gpu0"]["difference"] < 1e-5


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"version": 7}, "path"),
        ({"version": 7, "path": "/x", "lanes": ["gpu9"]}, "lanes.0"),
        ({"version": 7, "path": "/x", "probe": {"prompt_ids": [1], "output_ids": [2, 3], "logprobs": [0]}}, "probe"),
    ],
)
def test_a_wrong_push_is_refused_by_name(api: FlaskClient, lanes: list[str], body: dict[str, Any], field: str) -> None:
    """422 that names the field, with the gate as it was."""
    answer = api.post("/rollout/policy/push", json=body)
    assert answer.status_code == 422
    assert answer.json["errors"][0]["field"].endswith(field)
    assert api.get("/rollout/policy").json["gate"] == "open"


def test_an_engine_that_takes_no_weights(api: FlaskClient, database: Engine, lanes: list[str]) -> None:
    """409 before anything happens, naming the lane; so is a push with no lane alive."""
    with transaction(database) as db:
        engine = {"engine": "llama_cpp", "base_url": "http://127.0.0.1:1"}
        db.execute(update(Lane).where(Lane.name == "gpu1").values(engine=engine))
    refused = api.post("/rollout/policy/push", json={"version": 7, "path": "/x"})
    assert (refused.status_code, refused.json["code"]) == (409, "takes_no_weights")
    assert "gpu1" in refused.json["detail"]
    with transaction(database) as db:
        db.execute(update(Lane).values(heartbeat_at=now().replace(year=2020)))
    assert api.post("/rollout/policy/push", json={"version": 7, "path": "/x"}).json["code"] == "no_lane"
    assert api.get("/rollout/policy").json["gate"] == "open"


def test_without_a_proxy_a_push_ends(api: FlaskClient, database: Engine, lanes: list[str]) -> None:
    """Nobody there to ask the engines: 502 when the time is up, and a proxy that comes later begins nothing."""
    refused = api.post("/rollout/policy/push", json={"version": 7, "path": "/x", "wait": 0.3})
    assert (refused.status_code, refused.json["code"]) == (502, "push_failed")
    assert "is the node's proxy running?" in refused.json["detail"]
    with transaction(database) as db:
        assert set(db.scalars(select(WeightPush.state))) == {"failed"}


def test_a_push_is_taken_over(
    api: FlaskClient, database: Engine, database_url: str, engines: list[str], lanes: list[str], tmp_path: Path
) -> None:
    """A proxy that died with a push in hand is followed by another; one that still renews it blocks a second push."""
    folder = shifted(tmp_path / "step-7")
    with transaction(database) as db:
        row = WeightPush(
            push_id=uuid.uuid4(), lane="gpu0", node_id="local", version="7", path=str(folder), state="running",
            claimed_by="a proxy", claimed_at=now(), probe=None,
        )  # fmt: skip
        db.add(row)
    busy = api.post("/rollout/policy/push", json={"version": 8, "path": str(folder), "wait": 5})
    assert (busy.status_code, busy.json["code"]) == (409, "push_running")
    with transaction(database) as db:
        db.execute(update(WeightPush).values(claimed_at=now().replace(year=2020)))
    with serve(database_url):
        until(lambda: version(engines[0]) == "7")
    with transaction(database) as db:
        assert db.scalars(select(WeightPush.state)).one() == "done"


def test_a_task_that_is_too_old_is_refused(api: FlaskClient) -> None:
    """Its own bound or the policy's counts; one that says no version is taken."""
    api.put("/rollout/policy", json={"version": 9, "max_staleness": 2})
    old = task_body(task_id="old", metadata={"policy_version": 6})
    refused = api.post("/rollout/task/submit", json=old)
    assert (refused.status_code, refused.json["errors"][0]["field"]) == (422, "metadata.policy_version")
    assert "3 versions behind" in refused.json["detail"]
    assert api.post("/rollout/task/submit", json={**old, "max_staleness": 3}).status_code == 200
    assert api.post("/rollout/task/submit", json=task_body(task_id="new")).status_code == 200


def test_what_became_too_old_is_not_handed_out_for_training(api: FlaskClient, database: Engine) -> None:
    """Fresh when judged, stale when read: not trainable, its weight with the others, and the row as it was."""
    (session_id,) = submit(database, "task-1", max_staleness=1)
    traced(database, session_id)
    spans = {"flags": [], "policy_versions": [{"version": "7", "start": 0, "end": 2}]}
    with transaction(database) as db:
        db.execute(update(TraceRow).values(certificate=spans, weight=0.5))
        first = db.scalars(select(TraceRow)).one()
        again = {column.name: getattr(first, column.name) for column in TraceRow.__table__.columns}
        fresh = {"flags": [], "policy_versions": [{"version": "8", "start": 0, "end": 2}]}
        db.add(TraceRow(**{**again, "number": 1, "certificate": fresh}))
        lifecycle.cancel(db, queries.session(db, session_id))

    def handed_out() -> list[tuple[bool, float, str | None]]:
        (result,) = api.get("/rollout/results").json["results"]
        traces = result["trajectory"]["traces"]
        return [(each["trainable"], each["weight"], (each["decision"] or {}).get("rule")) for each in traces]

    api.put("/rollout/policy", json={"version": 8})
    assert handed_out() == [(True, 0.5, None), (True, 0.5, None)]
    api.put("/rollout/policy", json={"version": 9})
    assert handed_out() == [(False, 0.0, RULE), (True, 1.0, None)]
    task = api.get("/rollout/task/task-1").json["results"][0]["trajectory"]["traces"]
    assert [each["trainable"] for each in task] == [False, True]
    assert task[0]["metadata"]["certificate"]["staleness"]["behind"] == 2
    with transaction(database) as db:
        assert set(db.scalars(select(TraceRow.trainable))) == {True}
