"""Pause, resume and versions over real proxies, a real engine and real Postgres."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from flask.testing import FlaskClient
from sqlalchemy import Engine, update
from sqlalchemy.orm import Session

from polar import keys
from polar.db import transaction
from polar.models import RolloutSession, now
from polar.proxy.sessions import FIND
from tests.integration.rig import (
    FAST,
    KEY,
    MODEL,
    client,
    completions,
    free_port,
    ids,
    open_session,
    process,
    serve,
    until,
)

pytestmark = pytest.mark.integration
SLOW = {"role": "user", "content": "count steadily"}
SLOW_TEXT = "one two three four five six seven " * 10


class Asking(threading.Thread):
    """A harness's call in the background."""

    def __init__(self, url: str, content: str, **options: Any) -> None:
        super().__init__(daemon=True)
        self.url, self.content, self.options = url, content, options
        self.text = ""
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        ask = {"role": "user", "content": self.content}
        try:
            reply = client(self.url, timeout=60).chat.completions.create(model="m", messages=[ask], **self.options)
            if not self.options.get("stream"):
                self.text = reply.choices[0].message.content
                return
            for chunk in reply:
                self.text += chunk.choices[0].delta.content or ""
        except openai.OpenAIError as error:
            self.error = error

    def answer(self, seconds: float = 30) -> str:
        self.join(seconds)
        assert not self.is_alive() and self.error is None, self.error
        return self.text


@contextmanager
def gunicorn(database_url: str, workers: int = 2) -> Iterator[str]:
    """A node's proxy as it is run."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    argv = [sys.executable, "-m", "gunicorn", "workers.proxy:app", "-k", "uvicorn_worker.UvicornWorker"]
    argv += ["-w", str(workers), "-b", f"127.0.0.1:{port}", "--log-level", "warning"]
    with process(argv, url, {"POLAR_DATABASE_URL": database_url}):
        yield url


def proxies(api: FlaskClient) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/rollout/policy").json["proxies"]
    return found


def in_flight(api: FlaskClient) -> int:
    return sum(each["in_flight"] for each in proxies(api))


def at_the_engine(database: Engine, calls: int) -> None:
    """Wait until so many calls are on record, and give their engine a moment to begin."""
    until(lambda: len(completions(database)) == calls)
    time.sleep(0.4)


def spans(row: Any) -> list[tuple[Any, int, int]]:
    return [(span["version"], span["start"], span["end"]) for span in row.policy_versions]


def test_the_policy_is_kept_and_checked(api: FlaskClient, database: Engine) -> None:
    """What is put stays, what is left out is left alone, and what cannot be is refused by name."""
    empty = api.get("/rollout/policy").json
    assert (empty["version"], empty["gate"], empty["epoch"], empty["proxies"]) == (None, "open", 0, [])
    assert api.put("/rollout/policy", json={"name": "p", "version": 7}).json["version"] == 7
    after = api.put("/rollout/policy", json={"max_staleness": 2}).json
    assert (after["name"], after["version"], after["max_staleness"], after["epoch"]) == ("p", 7, 2, 2)
    assert api.put("/rollout/policy", json={"max_staleness": 2}).json["epoch"] == 2
    assert api.put("/rollout/policy", json={"version": "step-8"}).json["version"] == "step-8"
    for body, field in (({"max_staleness": -1}, "max_staleness"), ({"versoin": 1}, "versoin"), ({"name": ""}, "name")):
        answer = api.put("/rollout/policy", json=body)
        assert (answer.status_code, answer.json["errors"][0]["field"]) == (422, field)
    assert api.post("/rollout/pause?mode=stop").status_code == 422
    with transaction(database) as db:
        submitter = keys.make(db, "submitter", ["submit", "read"])
    for method, path in (("PUT", "/rollout/policy"), ("POST", "/rollout/pause"), ("POST", "/rollout/resume")):
        assert (
            api.open(path, method=method, json={}, headers={"Authorization": f"Bearer {submitter}"}).status_code == 403
        )


def test_the_gate_costs_no_query() -> None:
    """Every call reads the policy in the one query that it begins with."""
    assert "LEFT OUTER JOIN policy ON true" in str(FIND)


def test_drain_under_load(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """Two nodes: what is in flight ends, what comes later waits on both, and both let go."""
    with serve(database_url) as one, serve(database_url) as two:
        early = [Asking(url, f"wait {n}") for n, url in enumerate((one, two, one, two))]
        at_the_engine(database, 4)
        held = api.post("/rollout/pause?mode=drain&wait=20").json
        assert (held["holds"], held["gate"], len(held["proxies"])) == (True, "drain", 2)
        assert held["calls"] == {"drained": 4, "aborted": 0, "held": 0, "in_flight": 0}
        assert [each.answer() for each in early] == ["waited"] * 4
        late = [Asking(url, f"wait later {n}", stream=True) for n, url in enumerate((one, two))]
        until(lambda: sum(each["held"] for each in proxies(api)) == 2)
        assert [row.outcome for row in completions(database)][4:] == ["asked", "asked"]
        again = api.post("/rollout/pause?mode=drain").json
        assert (again["epoch"], again["calls"]["held"]) == (held["epoch"], 2)
        resumed = api.post("/rollout/resume").json
        assert (resumed["gate"], resumed["not_resumed"], resumed["calls"]["held"]) == ("open", [], 2)
        assert [each.answer() for each in late] == ["waited"] * 2
        until(lambda: in_flight(api) == 0)
    assert [row.flags for row in completions(database)] == [[]] * 6
    assert proxies(api) == []


def test_a_pause_that_does_not_hold_says_so(
    api: FlaskClient, database: Engine, database_url: str, session_id: str
) -> None:
    """Not in time is a 504 that names the proxy, and stays paused; abort then cuts what drain would wait for."""
    with serve(database_url) as url:
        asking = Asking(url, "count steadily")
        at_the_engine(database, 1)
        late = api.post("/rollout/pause?mode=drain&wait=0.3")
        assert (late.status_code, late.json["code"], late.json["holds"]) == (504, "not_holding", False)
        assert late.json["not_holding"] == [each["id"] for each in proxies(api)]
        assert late.json["not_holding"][0] in late.json["detail"]
        held = api.post("/rollout/pause?mode=abort&wait=10").json
        assert (held["holds"], held["gate"]) == (True, "abort")
        assert held["calls"] == {"drained": 0, "aborted": 1, "held": 1, "in_flight": 0}
        api.post("/rollout/resume")
        assert asking.answer() == SLOW_TEXT


@pytest.mark.parametrize("stream", [True, False])
def test_abort_goes_on_after_resume(
    api: FlaskClient, database: Engine, database_url: str, session_id: str, stream: bool
) -> None:
    """A slow answer, cut in the middle, is one answer to its harness and to the record: two parts, two versions."""
    api.put("/rollout/policy", json={"version": 7})
    with serve(database_url, replace(FAST, keepalive=0.2)) as url:
        asking = Asking(url, "count steadily", stream=stream)
        at_the_engine(database, 1)
        time.sleep(0.5)
        held = api.post("/rollout/pause?mode=abort&wait=10").json
        assert held["calls"] == {"drained": 0, "aborted": 1, "held": 1, "in_flight": 0}
        shown = asking.text
        assert bool(shown) == stream
        time.sleep(0.5)
        assert asking.text == shown and asking.is_alive()
        api.put("/rollout/policy", json={"version": 8})
        assert api.post("/rollout/resume").json["calls"]["aborted"] == 1
        assert asking.answer() == SLOW_TEXT
        (row,) = completions(database)
        first, second = row.engine["timings"]["parts"]
        assert first > 3 and second > 3
        assert (row.outcome, row.flags, row.finish_reason, row.engine["tries"]) == (
            "answered",
            ["continued"],
            "stop",
            2,
        )
        assert spans(row) == [(7, 0, first), (8, first, first + second)]
        assert len(ids(row.output_ids)) == len(row.logprobs or b"") // 4 == first + second
        # The same answer without a pause: the two parts are its tokens, each once.
        until(lambda: completions(database)[0].delivered)
        client(url).chat.completions.create(model="m", messages=[SLOW])
        assert ids(completions(database)[1].output_ids) == ids(row.output_ids)
        assert spans(completions(database)[1]) == [(8, 0, first + second)]


def test_keep_alives_go_out_while_held(api: FlaskClient, database_url: str, session_id: str) -> None:
    """A streaming harness hears that somebody is there."""
    with serve(database_url) as url:
        assert api.post("/rollout/pause").json["holds"]
        replies: list[str] = []
        body = {"model": "m", "messages": [{"role": "user", "content": "wait"}], "stream": True}

        def ask() -> None:
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, headers={"api-key": KEY}, timeout=10)
            replies.append(reply.text)

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        until(lambda: [each["held"] for each in proxies(api)] == [1])
        time.sleep(1.2)
        api.post("/rollout/resume")
        thread.join(10)
        assert replies[0].count(": keep-alive\n\n") >= 6
        assert replies[0].endswith("data: [DONE]\n\n")


def test_a_hang_up_while_waiting(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """Ends the wait, is recorded as aborted, and never reaches the engine."""
    with serve(database_url) as url:
        api.post("/rollout/pause")
        with pytest.raises(openai.APITimeoutError):
            client(url, timeout=0.5).chat.completions.create(model="m", messages=[SLOW])
        until(lambda: completions(database)[0].outcome == "aborted")
        (row,) = completions(database)
        assert (ids(row.output_ids), row.engine["tries"]) == ([], 0)
        until(lambda: sum(each["held"] for each in proxies(api)) == 0)


def test_a_hang_up_after_a_cut(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """What was sampled before the cut is on record."""
    with serve(database_url) as url:
        asking = Asking(url, "count steadily", timeout=1.5)
        at_the_engine(database, 1)
        assert api.post("/rollout/pause?mode=abort&wait=10").json["calls"]["held"] == 1
        asking.join(5)
        assert isinstance(asking.error, openai.APITimeoutError)
        until(lambda: completions(database)[0].outcome == "aborted")
        (row,) = completions(database)
        assert len(ids(row.output_ids)) > 3
        assert len(row.logprobs or b"") == len(row.output_ids)


def test_a_sessions_clock_stands_still_while_held(
    api: FlaskClient, database: Engine, database_url: str, session_id: str
) -> None:
    """A call that is held for longer than its session had left is answered after the pause."""
    with serve(database_url) as url:
        with Session(database) as db, db.begin():
            db.execute(update(RolloutSession).values(deadline_at=now() + timedelta(seconds=3)))
        api.post("/rollout/pause?wait=10")
        asking = Asking(url, "wait")
        until(lambda: sum(each["held"] for each in proxies(api)) == 1)
        time.sleep(3.5)
        assert sum(each["held"] for each in proxies(api)) == 1
        api.post("/rollout/resume")
        assert asking.answer() == "waited"


def test_a_session_that_is_out_of_time_is_told_so(
    api: FlaskClient, database: Engine, database_url: str, session_id: str
) -> None:
    """Time that was used up before the pause does not come back with it."""
    with serve(database_url) as url:
        with Session(database) as db, db.begin():
            db.execute(update(RolloutSession).values(deadline_at=now() - timedelta(seconds=1)))
        api.post("/rollout/pause?wait=10")
        with pytest.raises(openai.PermissionDeniedError, match="while generation was paused"):
            client(url).chat.completions.create(model="m", messages=[SLOW])
        assert completions(database)[0].error["code"] == "session_timeout"


def test_a_proxy_that_dies_while_paused(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """Two processes: one is killed with a call in flight; the pause holds without it, and says that it was lost."""
    with gunicorn(database_url) as url:
        until(lambda: len(proxies(api)) == 2)
        asking = Asking(url, "count steadily")
        until(lambda: in_flight(api) == 1)
        (busy,) = [each["id"] for each in proxies(api) if each["in_flight"]]
        os.kill(int(busy.rpartition(":")[2].partition("/")[0]), signal.SIGKILL)
        held = api.post("/rollout/pause?mode=drain&wait=20").json
        assert held["holds"] and held["calls"]["in_flight"] == 0
        assert [each["id"] for each in held["lost"]] == [busy]
        assert busy not in [each["id"] for each in held["proxies"]]
        asking.join(10)
        assert isinstance(asking.error, openai.APIConnectionError)
        # Its successor knows that it must hold.
        until(lambda: len(proxies(api)) == 2)
        later = Asking(url, "wait")
        until(lambda: sum(each["held"] for each in proxies(api)) == 1)
        api.post("/rollout/resume")
        assert later.answer() == "waited"


def test_several_processes_under_load(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """Sixteen calls on two processes, aborted twice: every harness gets its one whole answer."""
    with gunicorn(database_url) as url:
        until(lambda: len(proxies(api)) == 2)
        asking = [Asking(url, f"count steadily {n}", stream=n % 2 == 0) for n in range(16)]
        at_the_engine(database, 16)
        for version in (1, 2):
            held = api.post("/rollout/pause?mode=abort&wait=20").json
            assert held["holds"] and held["calls"]["aborted"] == 16, held
            api.put("/rollout/policy", json={"version": version})
            assert api.post("/rollout/resume").json["not_resumed"] == []
            time.sleep(1.0)
        assert [each.answer(60) for each in asking] == [SLOW_TEXT] * 16
    rows = completions(database)
    assert len({row.output_ids for row in rows}) == 1
    assert all(row.flags == ["continued"] and len(row.engine["timings"]["parts"]) == 3 for row in rows)


def test_lost_notifications_cost_a_second(
    api: FlaskClient, database: Engine, database_url: str, session_id: str
) -> None:
    """A proxy that is told nothing looks by itself."""
    with serve(database_url) as url:
        until(lambda: len(proxies(api)) == 1)
        with Session(database) as db, db.begin():
            db.connection().exec_driver_sql("UPDATE policy SET gate = 'drain', epoch = epoch + 1")
        until(lambda: [each["epoch"] for each in proxies(api)] == [1], 3)
        assert Asking(url, "wait").is_alive()
        until(lambda: [each["held"] for each in proxies(api)] == [1], 3)
        with Session(database) as db, db.begin():
            db.connection().exec_driver_sql("UPDATE policy SET gate = 'open', epoch = epoch + 1")
        until(lambda: completions(database)[0].outcome == "answered", 5)


def test_a_call_brings_the_news_itself(database_url: str, database: Engine, session_id: str, api: FlaskClient) -> None:
    """Before the watch has looked, a call that begins after the pause has read that it must wait."""
    with serve(database_url, replace(FAST, beat=30.0)) as url:
        until(lambda: len(proxies(api)) == 1)
        with Session(database) as db, db.begin():
            db.connection().exec_driver_sql("UPDATE policy SET gate = 'drain', epoch = epoch + 1")
        asking = Asking(url, "wait")
        until(lambda: [each["held"] for each in proxies(api)] == [1], 3)
        assert completions(database)[0].outcome == "asked"
        api.post("/rollout/resume")
        assert asking.answer() == "waited"


def test_versions_change_while_sampling(api: FlaskClient, database: Engine, database_url: str, session_id: str) -> None:
    """Streamed, the boundary is known to the token that was heard; not streamed, it is not, and the record says so."""
    api.put("/rollout/policy", json={"version": 1})
    with serve(database_url) as url:
        for version, stream in ((2, True), (3, False)):
            asking = Asking(url, f"count steadily {version}", stream=stream)
            at_the_engine(database, version - 1)
            time.sleep(0.5)
            api.put("/rollout/policy", json={"version": version})
            assert asking.answer() == SLOW_TEXT
    streamed, whole = completions(database)
    (first, start, at), (second, after, end) = spans(streamed)
    assert (first, second, start, end) == (1, 2, 0, len(ids(streamed.output_ids)))
    assert 3 < at == after < end
    assert (spans(whole), whole.flags) == ([], ["unknown_policy_version"])


@pytest.fixture(scope="module")
def tiny_engine() -> Iterator[str]:
    """The numpy engine with the packaged checkpoint."""
    port = free_port()
    argv = [sys.executable, "-m", "polar.tiny_engine", "--port", str(port)]
    with process(argv, f"http://127.0.0.1:{port}/model_info", {"OPENBLAS_NUM_THREADS": "1"}):
        yield f"http://127.0.0.1:{port}"


def test_what_the_engine_reports_wins(api: FlaskClient, database: Engine, database_url: str, tiny_engine: str) -> None:
    """Weights that were pushed under a name carry it, whatever the policy's row says; until then the row counts."""
    open_session(database, tiny_engine, sampling={"temperature": 1.0, "max_tokens": 8})
    api.put("/rollout/policy", json={"version": 41})
    with serve(database_url) as url:
        client(url).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello"}])
        assert api.post("/rollout/pause?wait=10").json["holds"]
        push = {"model_path": str(MODEL), "weight_version": "42"}
        assert httpx.post(f"{tiny_engine}/update_weights_from_disk", json=push).json()["success"]
        api.post("/rollout/resume")
        client(url).chat.completions.create(model="m", messages=[{"role": "user", "content": "hello again"}])
    before, after = completions(database)
    assert spans(before) == [(41, 0, len(ids(before.output_ids)))]
    assert spans(after) == [("42", 0, len(ids(after.output_ids)))]


def test_parts_are_what_the_model_would_have_said(
    api: FlaskClient, database: Engine, database_url: str, tiny_engine: str
) -> None:
    """A real model, cut and gone on with: each log-probability is that of its token after prompt and earlier parts."""
    open_session(database, tiny_engine, sampling={"temperature": 0.0, "max_tokens": 1500})
    with serve(database_url) as url:
        asking = Asking(url, "count " * 50, stream=True)
        until(lambda: asking.text)
        held = api.post("/rollout/pause?mode=abort&wait=10").json
        assert held["holds"]
        api.post("/rollout/resume")
        asking.answer(60)
    (row,) = completions(database)
    prompt, output = ids(row.suffix_ids), ids(row.output_ids)
    body = {"input_ids": prompt + output, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    scored = httpx.post(f"{tiny_engine}/generate", json={**body, "logprob_start_len": 0}, timeout=60).json()
    expected = [pair[0] for pair in scored["meta_info"]["input_token_logprobs"]][len(prompt) :]
    assert "continued" in row.flags
    assert len(row.engine["timings"]["parts"]) == 2
    np.testing.assert_allclose(np.frombuffer(row.logprobs or b"", "<f4"), expected, atol=1e-3)
