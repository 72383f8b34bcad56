"""What faithful tokens cost: merging, matching, storing, and how much of a prompt an engine's cache can use again.

    python -m bench.tokens [--skip-database]

One table. Merging: recorded rows become calls and one trace. A turn: finding the parent and rendering what is new, at
three lengths of history. Stored: a session of 300 turns and 200,000 tokens through the real proxy into Postgres, and
its trajectory built from there. Reusable: the share of all prompt tokens that stood at the beginning of an earlier
prompt with its output, in token mode and where every turn renders the whole history anew without its reasoning.
CPU seconds are of one core; the machine's other work does not enter into them.
"""

from __future__ import annotations

import argparse
import json
import pydoc
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import orjson
from rich.console import Console
from rich.table import Table
from sqlalchemy import text
from sqlalchemy.orm import Session

from bench.proxy import MODEL, Rig
from polar.bodies import pack
from polar.builders.base import Built, Call
from polar.builders.prefix_merging import PrefixMerging
from polar.builders.token_tree import TokenTree
from polar.messages import Message, ModelRequest, Tool, ToolCall
from polar.models import Completion, now
from polar.proxy.ledger import Ledger, anchor, as_ids, make_node
from polar.renderers import for_folder
from polar.stages.calls import load_calls, to_calls
from polar.stages.roles import assign

LENGTHS = ((100, 100_000), (300, 200_000))
HISTORIES = (1_000, 20_000, 100_000)
THINKING = "The failing test points at the parser, so its state after the second token is what to look at first."
TOOLS = (Tool("run", "Run a command.", {"type": "object"}, {"name": "run", "description": "Run a command."}),)
Row = tuple[str, str]


def measured(action: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds of the best of three runs, and the peak of memory in MB in a fourth."""
    best = float("inf")
    for _ in range(3):
        begun = time.process_time()
        action()
        best = min(best, time.process_time() - begun)
    tracemalloc.start()
    action()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return best, peak / 2**20


def results() -> Iterator[str]:
    """Output of tools: lines of Python's own documentation tools, without end."""
    lines = Path(pydoc.__file__).read_text().splitlines()
    for number in count():
        yield f"{number}: {lines[number % len(lines)]}"


class Talk:
    """A tool-using conversation as the proxy sees it, with the tokens that it makes of it."""

    def __init__(self, turns: int, tokens: int) -> None:
        self.renderer = for_folder(MODEL)
        self.ledger = Ledger()
        self.turns, self.per_turn = turns, tokens // turns
        self.messages: list[Message] = [Message("system", "You repair programs."), Message("user", "Repair it.")]
        self.rows: list[Completion] = []
        self.prompts: list[Any] = []
        self.outputs: list[Any] = []
        self._lines = results()

    def result(self) -> str:
        """One tool result of about the length that a turn may have."""
        lines: list[str] = []
        size = 0
        while size < self.per_turn - 70:
            lines.append(next(self._lines))
            size += self.renderer.count(lines[-1] + "\n")
        return "\n".join(lines)

    def turn(self) -> None:
        """One call, recorded."""
        number = len(self.rows)
        name = f"cmp-{number + 1:024x}"
        request = ModelRequest("m", tuple(self.messages), TOOLS)
        made = self.ledger.prompt(self.ledger.place(request), request.messages, TOOLS, self.renderer)
        call = ToolCall(anchor(name, 0), "run", json.dumps({"command": f"pytest -x tests/test_{number}.py"}))
        served = Message("assistant", "Next.", f"{THINKING} {number}", (call,))
        opening = len(self.renderer.render((), ()))
        output = as_ids(self.renderer.render((served,), ())[opening : -opening - 1])
        prompt_len = len(made.prefix) + len(made.suffix)
        node = make_node(
            name,
            made.place,
            served,
            prompt_len=prompt_len,
            suffix_ids=made.suffix,
            output_ids=output,
            body_hash=b"",
            trim=made.trim,
        )
        self.ledger.add(node)
        self.prompts.append(as_ids([*made.prefix, *made.suffix]))
        self.outputs.append(output)
        self.rows.append(self._row(node, made.place.reason, served))
        self.messages += [replace(served, reasoning=None), Message("tool", self.result(), tool_call_id=call.id)]

    def _row(self, node: Any, reason: str, served: Message) -> Completion:
        tools = [{"type": "function", "function": tool.raw} for tool in TOOLS]
        body = orjson.dumps({"model": "m", "messages": [each.chat_form() for each in self.messages], "tools": tools})
        before = self.rows[-1] if self.rows else None
        base = {"base": before.id} if before is not None and len(self.rows) % 100 else {}
        blob = pack(body, self._body if base else None)
        self._body = body
        return Completion(
            id=node.id,
            parent_id=node.parent_id,
            parent_reason=reason,
            dialect="openai_chat",
            role="main",
            model_requested="m",
            outcome="answered",
            request=blob,
            parsed={"ledger": {"fingerprint": node.fingerprint.hex()}, "message": served.chat_form(), **base},
            context_len=len(self.messages),
            prompt_len=node.prompt_len,
            suffix_ids=node.suffix_ids.tobytes(),
            output_ids=node.output_ids.tobytes(),
            logprobs=(-node.output_ids.astype("<f4") / 999).tobytes(),
            finish_reason="stop",
            policy_versions=[],
            prompt_verified=True,
            flags=[],
            requested_at=now(),
            delivered=True,
        )

    def played(self) -> Talk:
        """All its turns."""
        while len(self.rows) < self.turns:
            self.turn()
        return self


def merging() -> Iterator[Row]:
    """Rows to calls to traces."""
    for turns, tokens in LENGTHS:
        talk = Talk(turns, tokens).played()
        what = f"{turns} turns, {len(talk.prompts[-1]) + len(talk.outputs[-1]):,} tokens"

        def load(talk: Talk = talk) -> list[Call]:
            return assign(to_calls(talk.rows), None)

        def build(talk: Talk = talk) -> Built:
            return PrefixMerging().build(load(talk))

        calls = load()
        merged = PrefixMerging().build(calls)
        assert len(merged.traces) == 1
        for name, action in (
            ("rows to calls", load),
            ("prefix_merging", lambda calls=calls: PrefixMerging().build(calls)),
            ("token_tree", lambda calls=calls: TokenTree().build(calls)),
            ("rows to trajectory, requests read", build),
        ):
            seconds, peak = measured(action)
            yield f"{name}, {what}", f"{seconds:.3f} CPU s, {peak:.1f} MB at most"


def matching() -> Iterator[Row]:
    """The proxy's own work on one more turn."""
    for tokens in HISTORIES:
        turns = max(2, tokens // 700)
        talk = Talk(turns, tokens).played()
        request = ModelRequest("m", tuple(talk.messages), TOOLS)
        rounds = 50
        begun = time.process_time()
        for _ in range(rounds):
            place = talk.ledger.place(request)
        matched = time.process_time()
        for _ in range(rounds):
            made = talk.ledger.prompt(place, request.messages, TOOLS, talk.renderer)
        bridged = time.process_time()
        for _ in range(3):
            talk.renderer.render(request.messages, TOOLS)
        rendered = time.process_time()
        assert made.place.parent is not None
        ms = [(matched - begun) / rounds * 1e3, (bridged - matched) / rounds * 1e3, (rendered - bridged) / 3 * 1e3]
        what = f"{ms[0]:.2f} CPU ms to match, {ms[1]:.2f} to bridge; rendering it whole {ms[2]:.1f}"
        yield f"one turn after {len(made.prefix):,} tokens, {len(made.suffix)} new", what


def reusable() -> Iterator[Row]:
    """What a prefix cache can do in both modes."""
    turns, tokens = LENGTHS[0]
    talk = Talk(turns, tokens).played()
    asked = sum(len(prompt) for prompt in talk.prompts)
    kept = sum(
        shared(before, output, prompt)
        for before, output, prompt in zip(talk.prompts, talk.outputs, talk.prompts[1:], strict=False)
    )
    yield f"reusable prompt tokens, token mode, {turns} turns", f"{100 * kept / asked:.2f} %"
    # Rendered anew, a turn's prompt begins like the last one's only up to the first answer that lost its reasoning.
    prompts = [
        as_ids(talk.renderer.render(tuple(talk.messages[:length]), TOOLS)) for length in range(2, 2 * turns + 1, 2)
    ]
    asked = sum(len(prompt) for prompt in prompts)
    kept = sum(
        shared(before, output, prompt)
        for before, output, prompt in zip(prompts, talk.outputs, prompts[1:], strict=False)
    )
    yield f"the same, rendered anew each turn, {turns} turns", f"{100 * kept / asked:.2f} %"


def shared(prompt: Any, output: Any, following: Any) -> int:
    """How many tokens `following` begins with that an engine holds after `prompt` and its output."""
    held = as_ids([*prompt, *output])
    length = min(len(held), len(following))
    unequal = held[:length] != following[:length]
    return int(unequal.argmax()) if unequal.any() else length


def stored() -> Iterator[Row]:
    """A long session through the real proxy and Postgres."""
    turns, tokens = LENGTHS[1]
    talk = Talk(turns, tokens)
    messages = [{"role": "system", "content": "You repair programs."}, {"role": "user", "content": "Repair it."}]
    with Rig(0.0, 1) as rig:
        (key,) = rig.keys(1)
        with httpx.Client(base_url=f"{rig.proxy}/s/{key}", timeout=120) as http:
            for _ in range(turns):
                body = {"model": "m", "messages": messages}
                reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
                messages += [reply["choices"][0]["message"], {"role": "user", "content": talk.result()}]
        with rig.database.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM FULL completions"))
            size = connection.execute(text("SELECT pg_total_relation_size('completions')")).scalar_one()
            requests = connection.execute(text("SELECT sum(pg_column_size(request)) FROM completions")).scalar_one()

        def build() -> Built:
            with Session(rig.database) as db:
                return PrefixMerging().build(assign(load_calls(db, f"ses-{key}", 1), None))

        (trace,) = build().traces
        length = len(trace.prompt_ids) + len(trace.response_ids)
        sampled = int(trace.loss_mask.sum())
        seconds, peak = measured(build)
    what = f"{turns} turns, {length:,} tokens ({sampled:,} sampled)"
    yield f"Postgres, {what}", f"{size / length:.1f} bytes a token, of which {requests / length:.1f} are requests"
    yield f"trajectory from the database, {what}", f"{seconds:.3f} CPU s, {peak:.1f} MB at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--skip-database", action="store_true", help="leave out what needs Postgres and the proxy")
    arguments = parser.parse_args()
    table = Table("what", "figure", title="what faithful tokens cost")
    parts = [merging, matching, reusable, *([] if arguments.skip_database else [stored])]
    for part in parts:
        for row in part():
            table.add_row(*row)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
