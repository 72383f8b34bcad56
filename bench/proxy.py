"""What the proxy adds to a model call: latency, CPU and memory, beside the bare engine in one run.

    python -m bench.proxy [--clients 1 64 256] [--dialects openai_chat …] [--latency 0.2] [--repeat 3]

Agents in conversations of 30 kB call a scripted engine that takes `--latency` seconds: once straight, with token ids,
once the same through a process that only passes it on (`bench.passing`, which is the least that any proxy costs here),
and once through the proxy (gunicorn, capture in Postgres and all) in each dialect, streaming and not. One table:
requests/s, p50 and p99 of the latency, what of it the proxy added, its CPU per call beside Postgres's and the original
system's on the same work, and its memory per captured call. CPU is all that the proxy's processes used meanwhile, what
they use when idle included. With `--repeat`, each figure is the median of so many measurements.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sqlalchemy.orm import Session

import migrations
from bench.measure import server, tree_cpu, tree_memory
from polar.db import connect
from polar.embedded import EmbeddedPostgres, free_port
from polar.models import Lane, Node, RolloutSession, Task
from polar.renderers import for_folder

MODEL = Path(__file__).parents[1] / "polar" / "tiny_engine" / "model"
ANSWER = "The next step is to look at the file and to run its tests again."
BODY_BYTES = 30_000
Turns = list[tuple[str, str]]
ORIGINAL = {1: (8.0, 12.0), 64: (12.0, 16.0), 256: (18.0, 31.0)}
"""Milliseconds of CPU that a call took the original system on this work and a machine like ours, by clients."""
ORIGINAL_KB = 540
"""Memory that a captured call of 8,000 prompt ids took it."""
IDLE_SECONDS = 5.0
PASSING = "only passed on"


def chat(turns: Turns, *, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": role, "content": text} for role, text in turns]
    return "/v1/chat/completions", {"model": "m", "messages": messages, "stream": stream}


def anthropic(turns: Turns, *, stream: bool) -> tuple[str, dict[str, Any]]:
    messages = [{"role": role, "content": text} for role, text in turns[1:]]
    body = {"model": "m", "max_tokens": 1000, "system": turns[0][1], "messages": messages, "stream": stream}
    return "/v1/messages", body


def responses(turns: Turns, *, stream: bool) -> tuple[str, dict[str, Any]]:
    items = [{"type": "message", "role": role, "content": text} for role, text in turns[1:]]
    body = {"model": "m", "instructions": turns[0][1], "input": items, "stream": stream}
    return "/v1/responses", body


def google(turns: Turns, *, stream: bool) -> tuple[str, dict[str, Any]]:
    names = {"user": "user", "assistant": "model"}
    contents = [{"role": names[role], "parts": [{"text": text}]} for role, text in turns[1:]]
    verb = "streamGenerateContent?alt=sse" if stream else "generateContent"
    return f"/v1beta/models/m:{verb}", {
        "systemInstruction": {"parts": [{"text": turns[0][1]}]},
        "contents": contents,
    }


SIDES: dict[str, Callable[..., tuple[str, dict[str, Any]]]] = {
    "openai_chat": chat,
    "openai_responses": responses,
    "anthropic_messages": anthropic,
    "google_generate": google,
}


@dataclass
class Result:
    """One cell of the table."""

    side: str
    stream: bool
    clients: int
    seconds: float
    latencies: list[float]
    cpu: float = 0.0
    postgres: float = 0.0
    """CPU of the database."""
    memory: float = 0.0

    def at(self, share: float) -> float:
        """Milliseconds that this share of the calls stayed below."""
        return sorted(self.latencies)[min(int(len(self.latencies) * share), len(self.latencies) - 1)] * 1000


async def load(clients: int, calls: int, ask: Callable[[int, int], tuple[str, bytes, dict[str, str]]]) -> list[float]:
    """Seconds that each call took, of `clients` agents that make `calls` calls each, one after the other."""
    found: list[float] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as http:

        async def agent(number: int) -> None:
            for turn in range(calls):
                url, body, headers = ask(number, turn)
                begun = time.perf_counter()
                async with http.post(url, data=body, headers=headers) as reply:
                    text = await reply.read()
                    assert reply.status == 200, text[:500]
                found.append(time.perf_counter() - begun)

        await asyncio.gather(*(agent(number) for number in range(clients)))
    return found


class Rig:
    """Engine, database and proxy, up while inside."""

    def __init__(self, latency: float, processes: int) -> None:
        self._latency = latency
        self._processes = processes
        self._stack = ExitStack()

    def __enter__(self) -> Rig:
        home = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        script = home / "script.json"
        script.write_text(
            json.dumps({"scripts": [{"answers": [{"content": ANSWER}], "latency_seconds": self._latency}]})
        )
        self.engine = f"http://127.0.0.1:{(port := free_port())}"
        argv = [sys.executable, "-m", "polar.tiny_engine", "--script", str(script), "--port", str(port)]
        self._stack.enter_context(server(argv, f"{self.engine}/model_info"))
        postgres = EmbeddedPostgres(home / "postgres")
        postgres.start()
        assert postgres.pid is not None
        self.postmaster = postgres.pid
        self._stack.callback(postgres.stop)
        migrations.upgrade(postgres.url)
        self.database = connect(postgres.url, pool_size=2)
        self._stack.callback(self.database.dispose)
        self.proxy, self.process = self._served(
            "workers.proxy:app", POLAR_DATABASE_URL=postgres.url, POLAR_LOG_LEVEL="warning"
        )
        self.passing, self.passing_process = self._served("bench.passing:app", POLAR_ENGINE=self.engine)
        return self

    def _served(self, app: str, **env: str) -> tuple[str, subprocess.Popen[bytes]]:
        """An app as the proxy is deployed; its address and its first process."""
        url = f"http://127.0.0.1:{(port := free_port())}"
        argv = [sys.executable, "-m", "gunicorn", app, "-k", "uvicorn_worker.UvicornWorker", "-w", str(self._processes)]
        argv += ["-b", f"127.0.0.1:{port}", "--backlog", "4096", "--keep-alive", "75", "--log-level", "warning"]
        return url, self._stack.enter_context(server(argv, url, **env))

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keys(self, count: int) -> list[str]:
        """Keys of so many sessions that are executing."""
        found = [uuid.uuid4().hex for _ in range(count)]
        spec = {"sampling": {}, "max_turns": None, "max_session_tokens": None, "agent": {}}
        with Session(self.database) as db, db.begin():
            if db.get(Lane, "gpu0") is None:
                db.add(Node(id="local", gateway_url=self.proxy))
                db.flush()
                lane = {"node_id": "local", "engine": {"base_url": self.engine}, "max_execute": 1, "ready_buffer": 1}
                db.add(Lane(name="gpu0", **lane))
            task = Task(task_id=uuid.uuid4().hex, state="running", spec=spec, num_samples=count)
            db.add(task)
            db.flush()
            for number, key in enumerate(found):
                state = {"stage": "execute", "state": "running", "lane": "gpu0", "execute_attempt": 1}
                digest = hashlib.sha256(key.encode()).digest()
                db.add(RolloutSession(id=f"ses-{key}", task_pk=task.id, number=number, key_hash=digest, **state))
        return found

    def through_proxy(self, side: str, *, stream: bool, clients: int, calls: int) -> Result:
        """Conversations, each of its own session; the first turn, which renders them whole, is not counted."""
        keys = self.keys(clients)

        def ask(number: int, turn: int) -> tuple[str, bytes, dict[str, str]]:
            path, body = SIDES[side](conversation(number, turn), stream=stream)
            headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
            return f"{self.proxy}/s/{keys[number]}{path}", orjson.dumps(body), headers

        asyncio.run(load(clients, 1, ask))
        cpu, database, memory = tree_cpu(self.process.pid), tree_cpu(self.postmaster), tree_memory(self.process.pid)
        begun = time.perf_counter()
        latencies = asyncio.run(load(clients, calls, lambda number, turn: ask(number, turn + 1)))
        seconds = time.perf_counter() - begun
        time.sleep(0.3)
        result = Result(side, stream, clients, seconds, latencies)
        result.cpu = (tree_cpu(self.process.pid) - cpu) / len(latencies)
        result.postgres = (tree_cpu(self.postmaster) - database) / len(latencies)
        result.memory = (tree_memory(self.process.pid) - memory) / len(latencies)
        return result

    def idle(self) -> float:
        """Milliseconds of CPU that the proxy uses in a second without calls."""
        time.sleep(1.0)
        before = tree_cpu(self.process.pid)
        time.sleep(IDLE_SECONDS)
        return (tree_cpu(self.process.pid) - before) / IDLE_SECONDS * 1000

    def bare(self, *, stream: bool, clients: int, calls: int, passed_on: bool = False) -> Result:
        """The same prompts, as token ids, straight to the engine, or passed on to it by `bench.passing`."""
        prompt = for_folder(MODEL).vocabulary.plain("".join(text for _, text in conversation(0, 1)))  # type: ignore[attr-defined]
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1000}, "stream": stream}
        data, headers = orjson.dumps({**body, "return_logprob": True}), {"content-type": "application/json"}
        url, name = (self.passing, PASSING) if passed_on else (self.engine, "the engine alone")
        cpu, begun = tree_cpu(self.passing_process.pid), time.perf_counter()
        latencies = asyncio.run(load(clients, calls, lambda number, turn: (f"{url}/generate", data, headers)))
        result = Result(name, stream, clients, time.perf_counter() - begun, latencies)
        result.cpu = (tree_cpu(self.passing_process.pid) - cpu) / len(latencies)
        return result


def conversation(number: int, turn: int) -> Turns:
    """An agent's history after so many turns; of about 30 kB whichever turn it is."""
    line = "def function_{0}(argument): return argument + {0}  # as it was before\n"
    count = BODY_BYTES // len(line.format(1234))
    system = f"You are agent {number}.\n" + "".join(line.format(1000 + each) for each in range(count))
    turns = [("system", system), ("user", "Repair what is broken.")]
    for each in range(turn):
        turns += [("assistant", ANSWER), ("user", f"The tests say: {each} failed.")]
    return turns


def median(results: list[Result]) -> Result:
    """One measurement, each of its figures the median of several."""
    first = results[0]
    found = replace(first, latencies=[each for result in results for each in result.latencies])
    found.seconds = sum(result.seconds for result in results)
    for name in ("cpu", "postgres", "memory"):
        setattr(found, name, statistics.median(getattr(result, name) for result in results))
    return found


def rows(arguments: argparse.Namespace) -> Iterator[tuple[Result, Result]]:
    """Each measurement with its bare twin."""
    with Rig(arguments.latency, arguments.processes) as rig:
        # What a process does once, its connections and plans, is no part of a call.
        rig.through_proxy(arguments.dialects[0], stream=False, clients=16, calls=4)
        print(f"idle: {rig.idle():.1f} ms of CPU a second, all processes of the proxy together", file=sys.stderr)
        cells = [(clients, stream) for clients in arguments.clients for stream in (False, True)]
        for clients, stream in track(cells, "measuring", console=Console(stderr=True)):
            calls = min(100, max(4, arguments.calls // clients))
            bare = rig.bare(stream=stream, clients=clients, calls=calls)
            yield bare, bare
            passed = [
                rig.bare(stream=stream, clients=clients, calls=calls, passed_on=True) for _ in range(arguments.repeat)
            ]
            yield median(passed), bare
            # One after the other and over again, so that a busy minute of the machine does not fall on one dialect.
            found: dict[str, list[Result]] = {side: [] for side in arguments.dialects}
            for _ in range(arguments.repeat):
                for side, results in found.items():
                    results.append(rig.through_proxy(side, stream=stream, clients=clients, calls=calls))
            for results in found.values():
                yield median(results), bare


def beside_the_original(result: Result) -> list[str]:
    """The original's CPU for a call with so many clients, and how many times ours that is."""
    if result.clients not in ORIGINAL:
        return ["", ""]
    low, high = ORIGINAL[result.clients]
    return [f"{low:g}–{high:g}", f"{low / result.cpu / 1000:.1f}–{high / result.cpu / 1000:.1f}×"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--dialects", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--latency", type=float, default=0.2, help="seconds that the engine takes for an answer")
    parser.add_argument("--calls", type=int, default=512, help="calls per measurement, 4 to 100 per client")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) // 2), help="of the proxy")
    parser.add_argument("--repeat", type=int, default=1, help="measurements per figure, of which the median is shown")
    table = Table(title=f"a call with {BODY_BYTES // 1000} kB of history", caption=f"original: {ORIGINAL_KB} kB/call")
    for name in ("side", "stream", "clients"):
        table.add_column(name)
    for name in ("requests/s", "p50 ms", "p99 ms", "added p50", "added p99"):
        table.add_column(name, justify="right")
    for name in ("CPU ms/call", "Postgres", "original", "factor", "kB/call"):
        table.add_column(name, justify="right")
    for result, bare in rows(parser.parse_args()):
        added = [""] * 7
        if result is not bare:
            added = [f"{result.at(share) - bare.at(share):.1f}" for share in (0.5, 0.99)]
            added += [f"{result.cpu * 1000:.2f}", f"{result.postgres * 1000:.2f}", *beside_the_original(result)]
            added.append(f"{result.memory / 1000:.1f}")
        rate = len(result.latencies) / result.seconds
        figures = [f"{rate:.0f}", f"{result.at(0.5):.1f}", f"{result.at(0.99):.1f}", *added]
        table.add_row(result.side, "yes" if result.stream else "no", str(result.clients), *figures)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
