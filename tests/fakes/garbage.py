"""An engine that answers nonsense: each kind is an answer of SGLang's `/generate` with one thing wrong."""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

HUGE = 10**12
LATER = 100_000


def answer(prompt: list[int], **wrong: Any) -> dict[str, Any]:
    """A good answer but for `wrong`, whose names are fields of it or of its meta_info."""
    ids = wrong.pop("output_ids", [40, 41, 42])
    meta = {
        "finish_reason": {"type": "stop"},
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        **wrong,
    }
    return {"output_ids": ids, "meta_info": meta}


def bodies(prompt: list[int]) -> dict[str, bytes]:
    """By kind; what is no object is the same whether it is streamed or not."""
    pairs = [[-0.5, 40, None], [-0.5, 41, None]]
    objects: dict[str, Any] = {
        "a list": [1, 2, 3],
        "no meta_info": {"output_ids": [40]},
        "no ids": {"text": "hello", "meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2}},
        "too few log-probabilities": answer(prompt, output_token_logprobs=pairs),
        "log-probabilities of other ids": answer(prompt, output_token_logprobs=[[-0.5, 7, None]] * 3),
        "not a number": answer(prompt, output_token_logprobs=[[math.nan, 40, None], *pairs[1:], [-0.5, 42, None]]),
        "no log-probability": answer(prompt, output_token_logprobs=[[None, 40, None], *pairs[1:], [-0.5, 42, None]]),
        "words for ids": answer(prompt, output_ids=["forty", "one"]),
        "an id beyond the vocabulary": answer(prompt, output_ids=[40, LATER]),
        "an id beyond all vocabularies": answer(prompt, output_ids=[40, HUGE]),
        "a negative id": answer(prompt, output_ids=[-1, 40]),
        "another prompt": answer(prompt, prompt_tokens=len(prompt) + 1),
        "no finish reason": answer(prompt, finish_reason=None),
    }
    return {"not JSON": b"<html>Bad gateway", "nothing": b"", **{k: json.dumps(v).encode() for k, v in objects.items()}}


KINDS = (*bodies([]), "cut in the middle", "hung up")


class Garbage:
    """What the next answers are, and how many there were."""

    def __init__(self, url: str, kinds: tuple[str, ...]) -> None:
        self.url = url
        self.kinds = kinds
        self.kind: str | None = None
        """None: each kind in turn."""
        self.told: list[str] = []

    def next(self) -> str:
        """The kind of the next answer."""
        self.told.append(self.kind or self.kinds[len(self.told) % len(self.kinds)])
        return self.told[-1]


@contextmanager
def garbage(port: int = 0, real: str | None = None, kinds: tuple[str, ...] = KINDS) -> Iterator[Garbage]:
    """One that listens; what is asked with GET is asked of the `real` engine, if there is one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:  # noqa: N802 - the library's name
            if real is None:
                self.send_error(500)
                return
            with urllib.request.urlopen(real + self.path) as found:
                self._say(found.read())

        def do_POST(self) -> None:  # noqa: N802 - the library's name
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.path.startswith("/generate"):
                self._say(b"{}")
                return
            kind = made.next()
            if kind == "hung up":
                self.close_connection = True
                return
            found = bodies(asked["input_ids"])
            data = json.dumps(answer(asked["input_ids"])).encode() if kind == "cut in the middle" else found[kind]
            if asked.get("stream"):
                data = b"data: " + data + b"\n\n"
            self._say(data, cut=kind == "cut in the middle")

        def _say(self, data: bytes, cut: bool = False) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if cut else data)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the library's name
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    made = Garbage(f"http://127.0.0.1:{server.server_port}", kinds)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
