"""Engines end to end: canonical mode, engines that lose ids, passports, and lanes that refuse what they cannot give."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar import queries
from polar.api import wire
from polar.builders.prefix_merging import PrefixMerging
from polar.cli import main
from polar.leases import LeaseKeeper
from polar.lifecycle import Stage
from polar.models import Completion, RolloutSession, Task
from polar.models import Lane as LaneRow
from polar.proxy.limits import Limits
from polar.renderers import for_folder
from polar.settings import Settings
from polar.spec import parse_task
from polar.stages import fitness
from polar.stages.calls import load_calls
from polar.stages.parity import lane_parity
from polar.stages.runner import Lane
from polar.topology import EngineSpec, LaneSpec, NodeSpec
from tests.fakes.dispatcher import FakeDispatcher
from tests.integration.rig import (
    KEY,
    MODEL,
    WEATHER,
    client,
    completions,
    free_port,
    ids,
    open_session,
    process,
    serve,
    until,
)
from tests.integration.test_proxy import second_turn

pytestmark = pytest.mark.integration
HELLO = [{"role": "user", "content": "hello"}]
ASK = (
    "import json, os, sys, urllib.request as r\n"
    "body = json.dumps({'model': 'm', 'max_tokens': 8, 'messages': [{'role': 'user', 'content': 'find a'}]}).encode()\n"
    "headers = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY'], 'content-type': 'application/json'}\n"
    "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
    "print(r.urlopen(r.Request(url, body, headers)).status)\n"
)
"""An agent that makes one call and dies of an error."""


@pytest.fixture(scope="module")
def tiny_url() -> Iterator[str]:
    """The tiny engine, which really samples."""
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--model", str(MODEL), "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info", {"OPENBLAS_NUM_THREADS": "1"}):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def routers(tiny_url: str) -> Iterator[dict[str, str]]:
    """Two routers that strip ids; one of them spares probes."""
    ports = {"strips": free_port(), "spares": free_port()}
    argv = [sys.executable, "-m", "tests.fakes.router", "--engine", tiny_url]
    with (
        process([*argv, "--port", str(ports["strips"])], f"http://127.0.0.1:{ports['strips']}/model_info"),
        process(
            [*argv, "--port", str(ports["spares"]), "--spare-probes"], f"http://127.0.0.1:{ports['spares']}/model_info"
        ),
    ):
        yield {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}


def put_on(database: Engine, **spec: Any) -> LaneSpec:
    """Change the lane's engine; its entry of the topology."""
    engine = EngineSpec.model_validate(spec)
    with Session(database) as db, db.begin():
        db.execute(update(LaneRow).values(engine=engine.model_dump(mode="json")))
    return LaneSpec(name="gpu0", engine=engine)


def task_of(database: Engine, session_id: str, command: str, **spec: Any) -> None:
    """Make the session's task whole, and put the session before execute."""
    whole = {
        "task_id": "t",
        "instruction": "find a",
        "agent": {"harness": "shell", "custom_shell": {"command": command}, "model_name": "m"},
        "runtime": {"backend": "local"},
        **spec,
    }
    with Session(database) as db, db.begin():
        db.execute(update(Task).values(spec=parse_task(whole).model_dump(mode="json")))
        changes = {"state": "queued", "key_hash": None, "execute_attempt": None}
        db.execute(update(RolloutSession).where(RolloutSession.id == session_id).values(**changes))


def execute(database: Engine, proxy: str, lane: LaneSpec, session_id: str, home: Path) -> RolloutSession:
    """Run the execute stage as a worker does; the session's row afterwards."""
    settings = Settings(database_url=str(database.url.render_as_string(hide_password=False)), home=str(home))
    node = NodeSpec(id="local", public_url=proxy, lanes=(lane,))
    worker = Lane(database, settings, node, lane, FakeDispatcher(), LeaseKeeper(database), "test")
    worker.run(session_id, Stage.EXECUTE)
    with Session(database) as db:
        row = db.get(RolloutSession, session_id)
        assert row is not None
        db.expunge(row)
        return row


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_canonical_mode(database: Engine, proxy: str, engine_url: str, kind: str) -> None:
    """The engine renders: its own prompt ids are on record, no parent is claimed, and the drift is found and named."""
    session_id = open_session(database, engine_url)
    put_on(database, engine=kind, base_url=engine_url, mode="canonical")
    ask = client(proxy).chat.completions.create
    user = {"role": "user", "content": "How is the weather?"}
    first = ask(model="m", messages=[user], tools=[WEATHER], logprobs=True).choices[0]
    assert first.message.content == "Let me look."
    assert first.message.reasoning_content == "I should look."
    assert first.finish_reason == "tool_calls"
    again = ask(model="m", messages=second_turn(first.message.model_dump()), tools=[WEATHER])
    assert again.choices[0].message.content == "It is sunny. ☀"
    one, two = completions(database)
    assert {(row.parent_id, row.parent_reason, row.prompt_verified) for row in (one, two)} == {
        (None, "canonical", True)
    }
    assert again.usage.prompt_tokens == two.prompt_len == len(ids(two.suffix_ids)) > one.prompt_len > 0
    text = for_folder(MODEL).decode(ids(two.suffix_ids))
    assert "sunny" in text
    assert "I should look." not in text, "the harness dropped the reasoning, so this engine never saw it"
    until(lambda: all(row.delivered for row in completions(database)))
    with Session(database) as db:
        built = PrefixMerging().build(load_calls(db, session_id, 1))
    assert [trace.completion_ids for trace in built.traces] == [[one.id], [two.id]]
    assert built.traces[1].certificate["first_difference"]["kind"] == "parent_mismatch"


def test_canonical_streams(database: Engine, proxy: str, engine_url: str) -> None:
    """A streaming harness gets a stream of the finished answer."""
    open_session(database, engine_url)
    put_on(database, engine="vllm", base_url=engine_url, mode="canonical")
    chunks = list(client(proxy).chat.completions.create(model="m", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks).startswith("Let me look.")
    assert chunks[-1].choices[0].finish_reason in ("stop", "tool_calls")


def test_openai_compatible(database: Engine, proxy: str, routers: dict[str, str]) -> None:
    """A frozen model without ids answers; the record has its message, its token count, and no ids."""
    open_session(database, routers["strips"])
    put_on(database, engine="openai_compatible", base_url=f"{routers['strips']}/v1")
    answer = client(proxy).chat.completions.create(model="m", messages=HELLO, max_tokens=8)
    assert answer.usage.completion_tokens > 0
    (row,) = completions(database)
    assert (row.outcome, row.output_ids, row.suffix_ids, row.logprobs) == ("answered", b"", b"", None)
    assert row.parsed["message"]["content"] == (answer.choices[0].message.content or "")
    counted = httpx.post(
        f"{proxy}/v1/messages/count_tokens",
        json={"model": "m", "messages": HELLO},
        headers={"x-api-key": KEY},
    )
    assert counted.json()["input_tokens"] > 0


def test_hang_up_in_canonical_mode(database: Engine, proxy: str, engine_url: str) -> None:
    """A harness that hangs up ends the chat endpoint's work too."""
    open_session(database, engine_url)
    put_on(database, engine="vllm", base_url=engine_url, mode="canonical")
    body = {"model": "m", "messages": [{"role": "user", "content": "count slowly"}]}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{proxy}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=0.7)
    row = until(lambda: [row for row in completions(database) if row.outcome != "asked"], 3.0)[0]
    assert row.outcome == "aborted"
    until(lambda: httpx.get(f"{engine_url}/server_info").json()["running_requests"] == 0, 3.0)


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("stream", [False, True])
def test_ids_lost_on_the_way(
    database: Engine, database_url: str, routers: dict[str, str], kind: str, stream: bool
) -> None:
    """An answer without ids is a refusal that no harness tries again, and the record says whose fault it is."""
    open_session(database, routers["strips"])
    put_on(database, engine=kind, base_url=routers["strips"])
    # Without the rig's early keep-alives, after the first of which an error has no status any more.
    refusal = pytest.raises(openai.BadRequestError, match="router in front of it strips them")
    with serve(database_url, Limits(retry=1.0)) as proxy, refusal as caught:
        client(proxy).chat.completions.create(model="m", messages=HELLO, max_tokens=8, stream=stream)
    assert caught.value.code == "no_token_ids"
    (row,) = completions(database)
    assert row.error is not None
    assert (row.outcome, row.error["code"], row.error["blame"]) == ("failed", "no_token_ids", "engine")


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize("after", ["", "; true"])
def test_a_session_without_ids_fails(
    database: Engine, proxy: str, routers: dict[str, str], tmp_path: Path, kind: str, after: str
) -> None:
    """Whether its agent fails of it or not, the session fails by the engine's fault, and leaves no trace."""
    session_id = open_session(database, routers["spares"])
    lane = put_on(database, engine=kind, base_url=routers["spares"])
    agent = tmp_path / "agent.py"
    agent.write_text(ASK)
    task_of(database, session_id, f"{sys.executable} {agent}{after}")
    row = execute(database, proxy, lane, session_id, tmp_path)
    assert row.error is not None
    assert (row.stage, row.state) == ("execute", "failed")
    assert (row.error["blame"], row.error["code"]) == ("engine", "no_token_ids")
    assert "base_url" in row.error["message"]


def test_a_lane_refuses_before_the_agent_starts(
    database: Engine, proxy: str, routers: dict[str, str], tmp_path: Path
) -> None:
    """What the probe shows to be missing costs no agent: the session ends with the fix in its error."""
    session_id = open_session(database, routers["strips"])
    lane = put_on(database, base_url=routers["strips"])
    task_of(database, session_id, f"touch {tmp_path}/started")
    row = execute(database, proxy, lane, session_id, tmp_path)
    assert row.error is not None
    assert (row.state, row.error["blame"], row.error["code"]) == ("failed", "engine", "engine_unfit")
    assert "gives no token ids" in row.error["message"]
    assert not (tmp_path / "started").exists()


def test_a_frozen_model_has_its_builder(database: Engine, proxy: str, routers: dict[str, str], tmp_path: Path) -> None:
    """With the builder that needs no ids, an engine without them will do."""
    session_id = open_session(database, routers["strips"])
    lane = put_on(database, engine="openai_compatible", base_url=routers["strips"])
    agent = tmp_path / "agent.py"
    agent.write_text(ASK)
    task_of(database, session_id, f"{sys.executable} {agent}", builder={"strategy": "messages"})
    row = execute(database, proxy, lane, session_id, tmp_path)
    assert (row.stage, row.state, row.error) == ("reconstruct", "queued", None)


def test_an_engine_that_is_away_is_no_reason_to_refuse(database: Engine, proxy: str, tmp_path: Path) -> None:
    """Then the agent starts, and the proxy waits for the engine."""
    session_id = open_session(database, "http://127.0.0.1:9")
    lane = put_on(database, base_url="http://127.0.0.1:9")
    task_of(database, session_id, f"touch {tmp_path}/started")
    row = execute(database, proxy, lane, session_id, tmp_path)
    assert (tmp_path / "started").exists()
    assert (row.error or {})["code"] == "no_model_calls"


def test_the_passport_is_kept_and_shown(database: Engine, tiny_url: str) -> None:
    """What a worker finds out stands with the lane, on the wire too, and is not asked again while it is fresh."""
    open_session(database, tiny_url)
    lane = put_on(database, engine="vllm", base_url=tiny_url)
    assert fitness.kept_passport(database, lane) is None
    found = fitness.look(database, lane)
    assert fitness.kept_passport(database, lane) == found
    with Session(database) as db:
        shown = wire.lane_row(queries.lanes(db)[0])["passport"]
    assert (shown["logprobs"], shown["ids_out"], shown["weight_versions"]) == ("processed", True, True)
    other = LaneSpec(name="gpu0", engine=EngineSpec(engine="sglang", base_url=tiny_url))
    assert fitness.kept_passport(database, other) is None, "another engine's passport is nobody's"


def test_raw_logprobs_are_flagged(database: Engine, proxy: str, tiny_url: str) -> None:
    """Where the engine's log-probabilities are not those of what the harness asked to draw from, the record says so."""
    open_session(database, tiny_url)
    with Session(database) as db, db.begin():
        db.execute(update(LaneRow).values(passport={"logprobs": "raw"}))
    ask = client(proxy).chat.completions.create
    ask(model="m", messages=HELLO, max_tokens=4)
    ask(model="m", messages=HELLO, max_tokens=5, temperature=0.5)
    ask(model="m", messages=HELLO, max_tokens=6, temperature=0.0)
    assert [row.flags for row in completions(database)] == [[], ["sibling", "raw_logprobs"], ["sibling"]]


def test_parity_of_a_lane(
    database: Engine, database_url: str, proxy: str, tiny_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured tokens score as they were sampled; tampered with, or asked by the command, they say so."""
    open_session(database, tiny_url)
    lane = put_on(database, base_url=tiny_url)
    assert lane_parity(database, lane).tokens == 0
    ask = client(proxy).chat.completions.create
    messages: list[Any] = list(HELLO)
    for _ in range(2):
        answer = ask(model="m", messages=messages, max_tokens=30, temperature=1.0).choices[0].message
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": "more"}]
    ask(model="m", messages=messages, max_tokens=30, temperature=0.3)
    found = lane_parity(database, lane)
    compared = sum(len(ids(row.output_ids)) for row in completions(database)[:2])
    assert (found.tokens, found.well) == (min(64, compared), True)
    assert found.worst < 1e-4
    topology = tmp_path / "topology.yaml"
    topology.write_text(f"gateway: {{nodes: [{{lanes: [{{engine: {{base_url: '{tiny_url}'}}}}]}}]}}")
    monkeypatch.setenv("POLAR_DATABASE_URL", database_url)
    good = CliRunner().invoke(main, ["parity", "-c", str(topology)])
    assert (good.exit_code, "ok" in good.output) == (0, True), good.output
    httpx.post(f"{tiny_url}/update_weight_version", json={"new_version": "later"})
    try:
        assert lane_parity(database, lane).tokens == 0, "tokens of other weights are no measure of these"
    finally:
        httpx.post(f"{tiny_url}/update_weight_version", json={"new_version": "default"})
    with Session(database) as db, db.begin():
        rows = completions(database)
        zeros = bytes(len(rows[0].logprobs or b""))
        db.execute(update(Completion).where(Completion.id == rows[0].id).values(logprobs=zeros))
    bad = CliRunner().invoke(main, ["parity", "-c", str(topology)])
    assert (bad.exit_code, "push them again" in bad.output) == (1, True), bad.output


def test_doctor_shows_what_an_engine_can(tiny_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`polar doctor` tries each lane's engine and says what it found."""
    topology = tmp_path / "topology.yaml"
    topology.write_text(
        f"gateway: {{nodes: [{{lanes: [{{name: a, engine: {{engine: vllm, base_url: '{tiny_url}'}}}}, "
        "{name: b, engine: {base_url: 'http://127.0.0.1:9'}}]}]}"
    )
    monkeypatch.setenv("POLAR_HOME", str(tmp_path))
    found = CliRunner().invoke(main, ["doctor", "-c", str(topology)]).output
    assert "processed log-probabilities" in found
    assert "no engine answers at http://127.0.0.1:9" in found


def test_the_worker_looks_by_itself(database: Engine, tiny_url: str, tmp_path: Path) -> None:
    """A lane's engine is looked at when the lane is there, before any session is."""
    open_session(database, tiny_url)
    lane = put_on(database, base_url=tiny_url)
    node = NodeSpec(id="local", lanes=(lane,))
    settings = Settings(database_url=str(database.url.render_as_string(hide_password=False)), home=str(tmp_path))
    worker = Lane(database, settings, node, lane, FakeDispatcher(), LeaseKeeper(database), "test")
    thread = threading.Thread(target=worker.look_at_engine)
    thread.start()
    thread.join(20)
    assert (fitness.kept_passport(database, lane) or {})["engine"] == "sglang"
