"""`/metrics` of both doors read by Prometheus' own parser, and a real session's spans as a collector gets them."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import Engine, delete, update
from sqlalchemy.orm import Session

from polar import keys, lanes, lifecycle, tracing
from polar.api import create_app
from polar.db import transaction
from polar.delivery import feed
from polar.errors import HarnessError
from polar.fleet import Fleet
from polar.leases import LeaseKeeper
from polar.lifecycle import STAGES
from polar.metrics import FLEET, PROXY, Metric
from polar.models import Consumer, Delivery, Policy, RolloutSession, SessionEvent, Task
from polar.settings import Settings
from polar.stages.runner import Lane
from tests.fakes.dispatcher import FakeDispatcher
from tests.fakes.tasks import task, topology
from tests.integration.rig import KEY, client, free_port, open_session, process, until

pytestmark = pytest.mark.integration
Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(page: str, metrics: tuple[Metric, ...]) -> Figures:
    """Every sample of a page, by name and labels; the page shows exactly these metrics, with kinds and sentences."""
    found: Figures = {}
    families = list(text_string_to_metric_families(page))
    said = {(family.name, family.type, family.documentation) for family in families}
    assert said == {(metric.name.removesuffix("_total"), metric.kind, metric.text) for metric in metrics}
    labels = {metric.name: set(metric.labels) for metric in metrics}
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.endswith(("_bucket", "_sum", "_count", "_created")):
            assert set(sample.labels) == labels[sample.name]
        found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def key_of(database: Engine, *scopes: str) -> dict[str, str]:
    """Headers with a new key of these scopes."""
    with transaction(database) as db:
        return {"Authorization": f"Bearer {keys.make(db, 'prometheus', scopes)}"}


def value(figures: Figures, name: str, **labels: str) -> float:
    """One sample; 0 if it is not there."""
    return figures.get((name, tuple(sorted(labels.items()))), 0.0)


def sampled(fleet: Fleet) -> dict[tuple[str, tuple[str, ...]], float]:
    """What the database says, by name and labels."""
    return {(name, labels): figure for name, labels, figure in fleet.samples()}


def test_the_api_shows_the_fleet(database: Engine, database_url: str) -> None:
    """Queues, lanes, ends, feed and callbacks as rows have them; a key of scope read is enough, and needed."""
    node, lane = topology(max_execute=7).lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, lane)
        lifecycle.submit(db, task(num_samples=3, callback_url="http://127.0.0.1:9/"))
        db.add(Consumer(name="trainer", cursor=0))
    with transaction(database) as db:
        first, second, _ = db.query(RolloutSession).order_by(RolloutSession.number)
        first.turns, first.sampled_tokens = 3, 50
        second.turns, second.sampled_tokens = 1, 10
        claimed = lifecycle.claim(db, first.id, lifecycle.Stage.PREWARM, "w")
        assert claimed is not None
        lifecycle.fail(db, claimed, HarnessError("it broke", code="broken"))
        db.add(Delivery(task_pk=first.task_pk, url="http://127.0.0.1:9/"))
    feed.number_ended(database)
    app = create_app(Settings(database_url=database_url), FakeDispatcher())
    with app.test_client() as api:
        assert api.get("/metrics").status_code == 401
        assert api.get("/metrics", headers=key_of(database, "submit")).status_code == 403
        answer = api.get("/metrics", headers=key_of(database, "read"))
        figures = parsed(answer.text, FLEET)
        with transaction(database) as db:
            db.execute(update(RolloutSession).values(turns=99))
        again = api.get("/metrics", headers=key_of(database, "read")).text
    app.config["DATABASE"].dispose()
    assert answer.content_type.startswith("text/plain; version=")
    assert again == answer.text, "kept for a few seconds"
    assert value(figures, "polar_sessions", stage="prewarm", state="queued", lane="") == 2
    assert value(figures, "polar_queue_depth", stage="prewarm", lane="") == 2
    assert 0 < value(figures, "polar_queue_age_seconds", stage="prewarm", lane="") < 60
    assert value(figures, "polar_sessions_ended_total", state="failed", stage="prewarm", blame="harness") == 1
    assert value(figures, "polar_tasks_open") == 1
    assert value(figures, "polar_completions_total") == 4
    assert value(figures, "polar_sampled_tokens_total") == 60
    assert value(figures, "polar_lane_alive", node="node-1", lane="gpu0") == 1
    assert value(figures, "polar_lane_max_execute", node="node-1", lane="gpu0") == 7
    assert (value(figures, "polar_node_alive", node="node-1"), value(figures, "polar_gate_open")) == (1, 1)
    assert (value(figures, "polar_feed_last"), value(figures, "polar_feed_lag", consumer="trainer")) == (1, 1)
    assert value(figures, "polar_deliveries_owed") == 1


def test_the_fleet_counts_each_end_once(database: Engine) -> None:
    """Before it has a number, after, and in each later reading; and what is deleted does not count backwards."""
    fleet = Fleet(database)
    label = ("polar_sessions_ended_total", ("cancelled", "prewarm", "cancelled"))
    for count in (1, 2, 3):
        with transaction(database) as db:
            lifecycle.submit(db, task(task_id=f"t{count}"))
            lifecycle.cancel_task(db, f"t{count}")
            db.execute(update(RolloutSession).where(RolloutSession.feed_number.is_(None)).values(turns=2))
        found = sampled(fleet)
        assert (found[label], found["polar_completions_total", ()]) == (count, 2 * count)
        assert found["polar_feed_unnumbered", ()] == 1
        feed.number_ended(database)
        assert sampled(fleet) == sampled(fleet)
        found = sampled(fleet)
        assert (found[label], found["polar_feed_unnumbered", ()]) == (count, 0)
        assert found["polar_completions_total", ()] == 2 * count
    assert sampled(Fleet(database))[label] == 3, "a process that starts later counts the same"
    with transaction(database) as db:
        lifecycle.submit(db, task(task_id="t4"))
        lifecycle.cancel_task(db, "t4")
    assert sampled(fleet)[label] == 4
    with transaction(database) as db:
        gone = db.query(RolloutSession).filter(RolloutSession.feed_number.is_(None)).one()
        db.execute(delete(SessionEvent).where(SessionEvent.session_id == gone.id))
        db.execute(delete(Task).where(Task.id == gone.task_pk))
    assert sampled(fleet)[label] == 4


def test_a_silent_lane_and_a_paused_policy_are_seen(database: Engine) -> None:
    """What an alarm would be set on."""
    node, lane = topology().lane("gpu0")
    with transaction(database) as db:
        lanes.beat(db, node, lane)
        db.add(Policy(gate="drain"))
    with transaction(database) as db:
        db.connection().exec_driver_sql("UPDATE lanes SET heartbeat_at = now() - interval '1 minute'")
    found = sampled(Fleet(database))
    assert found["polar_lane_alive", ("node-1", "gpu0")] == 0
    assert found["polar_node_alive", ("node-1",)] == 1
    assert found["polar_gate_open", ()] == 0


def test_the_proxy_shows_its_calls(database: Engine, session_id: str, proxy: str) -> None:
    """Calls, statuses, places, tokens, times and commits; a session's own key does not open the page."""
    head = key_of(database, "read")

    def figures() -> Figures:
        answer = httpx.get(f"{proxy}/metrics", headers=head)
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert KEY not in answer.text and session_id not in answer.text
        return parsed(answer.text, PROXY)

    assert httpx.get(f"{proxy}/metrics").status_code == 401
    assert httpx.get(f"{proxy}/metrics", headers={"Authorization": f"Bearer {KEY}"}).status_code == 401
    assert httpx.get(f"{proxy}/metrics", headers=key_of(database, "submit")).status_code == 401
    before = figures()
    ask = client(proxy).chat.completions.create
    whole = ask(model="m", messages=[{"role": "user", "content": "hello"}])
    for _ in ask(model="m", messages=[{"role": "user", "content": "hello again"}], stream=True):
        pass
    with pytest.raises(openai.AuthenticationError):
        client(proxy, "wrong").chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
    after = figures()

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    chat = {"dialect": "openai_chat"}
    assert more("polar_calls_total", **chat, outcome="answered") == 2
    assert more("polar_responses_total", **chat, route="generate", status="200") == 2
    assert more("polar_responses_total", **chat, route="generate", status="401") == 1
    assert sum(more("polar_places_total", reason=reason) for reason in reasons(after)) == 2
    assert more("polar_call_engine_seconds_count", **chat) == 2
    assert more("polar_call_added_seconds_count", **chat) == 2
    assert 0 < more("polar_call_added_seconds_sum", **chat) < 10
    assert more("polar_call_prompt_tokens_total", **chat) > whole.usage.prompt_tokens
    assert more("polar_call_sampled_tokens_total", **chat) > whole.usage.completion_tokens
    assert more("polar_recorded_bytes_total") > 100
    assert more("polar_commit_records_sum") >= more("polar_commit_seconds_count") >= 2
    assert (value(after, "polar_calls_in_flight"), value(after, "polar_calls_held")) == (0, 0)


def reasons(figures: Figures) -> set[str]:
    """Of the ledger's places that were counted."""
    return {dict(labels)["reason"] for name, labels in figures if name == "polar_places_total"}


def test_calls_in_flight_are_seen(database: Engine, session_id: str, proxy: str) -> None:
    """While one waits for the engine, and not after it."""
    head = key_of(database, "read")

    def flying() -> float:
        return value(parsed(httpx.get(f"{proxy}/metrics", headers=head).text, PROXY), "polar_calls_in_flight")

    with client(proxy).chat.completions.create(
        model="m", messages=[{"role": "user", "content": "slowly"}], stream=True
    ) as stream:
        next(iter(stream))
        until(lambda: flying() == 1)
    until(lambda: flying() == 0)


def test_processes_answer_for_each_other(database: Engine, database_url: str, engine_url: str, tmp_path: Path) -> None:
    """gunicorn with three processes: any of them shows all calls, also those of one that was killed in the middle."""
    open_session(database, engine_url)
    port, head = free_port(), key_of(database, "read")
    url = f"http://127.0.0.1:{port}"
    settings = Settings(database_url=database_url, home=str(tmp_path), proxy_port=port).environ()
    argv = [sys.executable, "-m", "gunicorn", "workers.proxy:app", "-k", "uvicorn_worker.UvicornWorker"]
    with process([*argv, "-w", "3", "-b", f"127.0.0.1:{port}"], f"{url}/health", settings):

        def figures() -> Figures:
            # A connection of its own each time, so that the kernel chooses a process.
            return parsed(httpx.get(f"{url}/metrics", headers=head).text, PROXY)

        def counted(name: str, **labels: str) -> float:
            return value(figures(), name, **labels)

        for number in range(9):
            client(url).chat.completions.create(model="m", messages=[{"role": "user", "content": f"hello {number}"}])
        answered = {"dialect": "openai_chat", "outcome": "answered"}
        assert [counted("polar_calls_total", **answered) for _ in range(6)] == [9.0] * 6
        stream = client(url).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "slowly"}], stream=True
        )
        next(iter(stream))
        until(lambda: counted("polar_calls_in_flight") == 1)
        (shared,) = (tmp_path / "metrics").iterdir()
        for path in shared.glob("gauge_livesum_*.db"):
            os.kill(int(path.stem.rpartition("_")[2]), signal.SIGKILL)
        until(lambda: answers_again(url, head))
        assert counted("polar_calls_in_flight") == 0
        assert counted("polar_calls_total", **answered) == 9


def answers_again(url: str, head: dict[str, str]) -> bool:
    """Whether a process is there to be asked."""
    try:
        return httpx.get(f"{url}/metrics", headers=head).status_code == 200
    except httpx.TransportError:
        return False


CALL = (
    f"{sys.executable} -c 'import json, os, urllib.request as u; "
    'body = {"model": "m", "temperature": 0.5, "messages": [{"role": "user", "content": "my secret plan"}]}; '
    'head = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}; '
    'u.urlopen(u.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(), head))\''
)


def test_a_session_is_one_trace(
    database: Engine, database_url: str, proxy: str, engine_url: str, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    """A real shell session through all stages: session, four stages and the call, in place, and without any text."""
    node, spec = topology(engine_url).lane("gpu0")
    node = node.model_copy(update={"public_url": proxy})
    settings = Settings(database_url=database_url, home=str(tmp_path))
    lane = Lane(database, settings, node, spec, FakeDispatcher(), LeaseKeeper(database), "worker-1")
    with transaction(database) as db:
        lanes.beat(db, node, spec)
        agent = {"harness": "shell", "custom_shell": {"command": CALL}, "model_name": "m"}
        lifecycle.submit(db, task(agent=agent))
    assert lane.look() == 1
    with Session(database) as db:
        session_id = db.query(RolloutSession).one().id
    for stage in STAGES:
        assert lane.run(session_id, stage), stage
    found = {span.name: span for span in spans.get_finished_spans()}
    assert found.keys() == {"session", *STAGES, "chat m"}
    assert {span.context.trace_id for span in found.values()} == {tracing.number(16, session_id)}
    root = found["session"]
    assert root.parent is None
    for stage in STAGES:
        said: Any = found[stage].attributes
        assert found[stage].parent.span_id == root.context.span_id  # type: ignore[union-attr]
        assert (said["polar.task"], said["polar.session"], said["polar.lane"]) == ("task-1", session_id, "gpu0")
        assert (said["polar.stage"], said["polar.attempt"], said["polar.node"]) == (stage, 1, "node-1")
        assert "error.type" not in said
    call, execute = found["chat m"], found["execute"]
    assert call.parent.span_id == execute.context.span_id  # type: ignore[union-attr]
    assert execute.start_time <= call.start_time < call.end_time <= execute.end_time  # type: ignore[operator]
    facts: Any = call.attributes
    assert call.kind.name == "CLIENT"
    assert (facts["gen_ai.operation.name"], facts["gen_ai.request.model"]) == ("chat", "m")
    assert (facts["gen_ai.provider.name"], facts["gen_ai.request.temperature"]) == ("sglang", 0.5)
    assert facts["gen_ai.usage.input_tokens"] > 0 and facts["gen_ai.usage.output_tokens"] > 0
    assert facts["gen_ai.conversation.id"] == session_id
    outcome: Any = root.attributes
    assert (outcome["polar.state"], outcome["polar.turns"]) == ("completed", 1)
    assert outcome["polar.sampled_tokens"] == facts["gen_ai.usage.output_tokens"]
    assert not any("secret plan" in span.to_json() or "Bearer" in span.to_json() for span in found.values())
