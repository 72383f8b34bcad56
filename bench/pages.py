"""`python -m bench.pages` — the admin pages over 100,000 sessions, and over one session of 200,000 tokens.

Fills a Postgres of its own by SQL, then opens each page in this process: what is measured is the page with its
queries, without a network. Prints one table.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import orjson
import zstandard
from flask.testing import FlaskClient
from sqlalchemy import Engine, event, text

import migrations
from polar.api import create_app
from polar.db import connect, transaction
from polar.embedded import EmbeddedPostgres
from polar.models import TraceRow
from polar.settings import Settings

PER_TASK = 8
LARGE = "ses-00000001"
FILL = """
INSERT INTO nodes (id, gateway_url, draining, heartbeat_at, created_at) VALUES ('n', 'http://n', false, now(), now());
INSERT INTO lanes (name, node_id, engine, max_execute, ready_buffer, max_evaluate, passport, heartbeat_at)
  SELECT 'gpu' || n, 'n', '{"engine": "sglang", "base_url": "http://e"}', 64, 8, 8,
         '{"engine": "sglang", "model": "m", "ids_in": true}', now() FROM generate_series(0, 7) n;
INSERT INTO tasks (id, task_id, current, state, spec, priority, num_samples, created_at, updated_at, ended_at)
  SELECT gen_random_uuid(), 'task-' || n, true, CASE WHEN n % 20 = 0 THEN 'failed' ELSE 'completed' END,
         jsonb_build_object('instruction', repeat('do it well ', 60), 'timeout_seconds', 600,
           'agent', jsonb_build_object('harness', (ARRAY['codex','shell','mini_swe_agent'])[1 + n % 3]),
           'builder', '{"strategy": "prefix_merging"}'::jsonb,
           'evaluator', jsonb_build_object('strategy', (ARRAY['command','session_completed'])[1 + n % 2])),
         0, :per, now() - n * interval '6 s', now(), now() - n * interval '6 s' + interval '90 s'
  FROM generate_series(1, :tasks) n;
INSERT INTO sessions (id, task_pk, number, stage, state, priority, attempt, stage_attempts, execute_attempt, lane,
    node_id, queued_at, claimed_at, runtimes, reward, turns, sampled_tokens, timing, created_at, ended_at, feed_number,
    error)
  SELECT 'ses-' || lpad((row_number() OVER ())::text, 8, '0'), id, n, 'evaluate',
         CASE WHEN random() < 0.05 THEN 'failed' ELSE 'completed' END, 0, 1, 1, 1, 'gpu' || (n % 8), 'n', created_at,
         created_at, '{}', random(), 12, 3000, '{"execute": {"run_ms": 60000}}', created_at,
         created_at + random() * interval '90 s', row_number() OVER (), NULL
  FROM tasks, generate_series(0, :per - 1) n;
UPDATE sessions SET error = jsonb_build_object('stage', 'execute', 'blame', 'harness', 'code', 'no_model_calls',
    'message', 'it made no call')
  WHERE state = 'failed';
INSERT INTO session_events (session_id, at, move, stage, state, attempt, note)
  SELECT s.id, s.created_at + e.n * interval '5 s', e.move, e.stage, e.state, 1, '{}' FROM sessions s,
    (VALUES (0, 'open', 'prewarm', 'queued'), (1, 'claim', 'prewarm', 'running'), (2, 'advance', 'execute', 'queued'),
            (3, 'claim', 'execute', 'running'), (4, 'advance', 'evaluate', 'completed')) AS e (n, move, stage, state);
INSERT INTO traces (session_id, number, prompt_ids, response_ids, loss_mask, logprobs, reward, weight, trainable,
    fidelity, certificate, body)
  SELECT id, 0, decode(repeat('01000000', 40), 'hex'), decode(repeat('02000000', 60), 'hex'),
         decode(repeat('01', 60), 'hex'), decode(repeat('000000bf', 60), 'hex'), reward, 1, true, 'exact',
         '{"flags": [], "completions": 12, "sampled_tokens": 60, "policy_versions": []}', {body} FROM sessions;
"""
CALLS = """
INSERT INTO completions (id, session_id, attempt, outcome, parent_id, parent_reason, dialect, role, model_requested,
    request, answer, parsed, context_len, prompt_len, suffix_ids, output_ids, policy_versions, flags, engine,
    requested_at, finished_at, delivered)
  SELECT 'cmp-' || n, :session, 1, 'answered', CASE WHEN n > 1 THEN 'cmp-' || (n - 1) END, 'anchor', 'openai_chat',
         'main', 'm', :request, NULL, '{"message": {"role": "assistant", "content": "ok"}}', 2 * n, 660 * n,
         decode(repeat('01000000', 330), 'hex'), decode(repeat('02000000', 330), 'hex'), '[]', '[]', '{"ms": 900}',
         now() + n * interval '1 s', now() + n * interval '1 s' + interval '900 ms', true
  FROM generate_series(1, 300) n;
"""
PAGES = {
    "overview, 1 hour": "/admin/",
    "overview, 7 days": "/admin/?span=7d",
    "tasks": "/admin/tasks",
    "tasks, deep": "{deep}",
    "tasks, failed": "/admin/tasks?state=failed",
    "tasks, one harness, oldest": "/admin/tasks?harness=codex&order=oldest",
    "tasks, found by name": "/admin/tasks?q=ask-99",
    "task of 8 sessions": "/admin/tasks/task-1",
    "task of many sessions": "/admin/tasks/task-many",
    "sessions": "/admin/sessions",
    "sessions, failed by harness": "/admin/sessions?state=failed&blame=harness",
    "session, small": "/admin/sessions/ses-00000900",
    "session, 300 calls, 200,000 tokens": f"/admin/sessions/{LARGE}",
    "tokens, first 1,000 of 200,000": f"/admin/sessions/{LARGE}/traces/0",
    "tokens, last 4,000 of 200,000": f"/admin/sessions/{LARGE}/traces/0?from=196000&size=4000&colour=logprob",
    "completion, against its parent": "/admin/completions/cmp-300",
    "compare": "/admin/compare?a=ses-00000900&b=ses-00000901",
    "nodes": "/admin/nodes",
    "policy": "/admin/policy",
}


def fill(database: Engine, sessions: int) -> None:
    """Tasks, sessions, events and traces by SQL, one large session, and one task of very many."""
    body = zstandard.compress(orjson.dumps({"prompt_messages": [], "response_messages": [], "metadata": {}}))
    with database.begin() as connection:
        for statement in FILL.replace("{body}", f"decode('{body.hex()}', 'hex')").split(";\n"):
            if statement.strip():
                values = {"per": PER_TASK, "tasks": sessions // PER_TASK}
                connection.execute(text(statement), {k: v for k, v in values.items() if f":{k}" in statement})
        of = "(SELECT task_pk FROM sessions WHERE id = 'ses-00002000')"
        connection.execute(text(f"UPDATE tasks SET task_id = 'task-many' WHERE id = {of}"))
        connection.execute(
            text(f"UPDATE sessions SET task_pk = {of}, number = 8 + right(id, 8)::int WHERE id > 'ses-00090000'")
        )
        messages = [{"role": "user", "content": "word " * 400} for _ in range(600)]
        request = zstandard.compress(orjson.dumps({"model": "m", "messages": messages}))
        connection.execute(text(CALLS), {"session": LARGE, "request": request})
    with transaction(database) as db:
        _large_trace(db.get_one(TraceRow, (LARGE, 0)))
    with database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE"))


def _large_trace(trace: TraceRow) -> None:
    """200,000 tokens in 300 calls."""
    generator = np.random.default_rng(7)
    trace.prompt_ids = generator.integers(0, 900, 2_000, dtype=np.int32).tobytes()
    trace.response_ids = generator.integers(0, 900, 198_000, dtype=np.int32).tobytes()
    mask = (np.arange(198_000) % 660 < 330).astype(np.uint8)
    trace.loss_mask = mask.tobytes()
    trace.logprobs = (-generator.exponential(1.0, 198_000).astype(np.float32) * mask).tobytes()
    lines = [
        {"completion_id": f"cmp-{n + 1}", "start": n * 660, "end": n * 660 + 330, "role": "main", "trained": True}
        for n in range(300)
    ]
    messages = [{"role": "tool", "content": "word " * 300} for _ in range(600)]
    body = {"prompt_messages": messages[:1], "response_messages": messages, "metadata": {"completion_metadata": lines}}
    trace.body = zstandard.compress(orjson.dumps(body))
    spans = [{"version": str(n // 30), "start": n * 660, "end": n * 660 + 330} for n in range(300)]
    trace.certificate = {"flags": [], "completions": 300, "sampled_tokens": 99_000, "policy_versions": spans}


def deep(client: FlaskClient, steps: int) -> str:
    """The address of a page far down the list of tasks."""
    page = "/admin/tasks"
    for _ in range(steps):
        found = re.search(r'href="([^"]+)" rel="next"', client.get(page).text)
        assert found
        page = found[1].replace("&amp;", "&")
    return page


def measure(client: FlaskClient, database: Engine, path: str, times: int) -> tuple[float, float, float, int, int]:
    """Median and 99th percentile in milliseconds, this process's own share, statements, and kilobytes."""
    seen: list[str] = []
    event.listen(database, "before_cursor_execute", lambda *args: seen.append(args[2]))
    spent = []
    client.get(path)
    busy = time.process_time()
    for _ in range(times):
        seen.clear()
        began = time.perf_counter()
        answer = client.get(path)
        spent.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, (path, answer.status_code)
    busy = (time.process_time() - busy) * 1000 / times
    return statistics.median(spent), float(np.percentile(spent, 99)), busy, len(seen), len(answer.data) // 1000


def main() -> None:
    """Fill, open each page, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=40, help="openings of each page")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedPostgres(Path(folder) / "postgres")
        server.start()
        try:
            migrations.upgrade(server.url)
            database = connect(server.url, pool_size=2)
            fill(database, asked.sessions)
            app = create_app(Settings(database_url=server.url, home=folder, auth="open"), None)  # type: ignore[arg-type]
            client = app.test_client()
            print(f"{'page':<38}{'p50 ms':>9}{'p99 ms':>9}{'CPU ms':>9}{'queries':>9}{'kB':>6}")
            for name, path in PAGES.items():
                path = deep(client, 40) if path == "{deep}" else path
                median, most, busy, queries, size = measure(client, app.config["DATABASE"], path, asked.times)
                print(f"{name:<38}{median:>9.1f}{most:>9.1f}{busy:>9.1f}{queries:>9}{size:>6}", flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
