"""Messages without tokens: what was said, one trace for each conversation, to be read and judged and never trained on.

For engines that give no token ids. Ids are left out even where there are some, so that nobody takes such a trace for
one to train on; its certificate says `unverified`, and no token of it carries the mask.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import orjson

from polar.builders.assemble import assemble
from polar.builders.base import Builder, Built, Call, Trace
from polar.builders.config import BuilderConfig, read_config
from polar.builders.intake import AUXILIARY, EMPTY_ENDS, Intake


class Messages(Builder):
    """A call goes on from the latest one whose messages its own begin with."""

    name: ClassVar[str] = "messages"
    NEEDS_IDS: ClassVar[bool] = False

    def __init__(self, **config: Any) -> None:
        self.config = read_config(BuilderConfig, config)

    def build(self, calls: list[Call]) -> Built:
        intake = Intake(calls)
        for call in calls:
            if call.role == AUXILIARY and not self.config.include_auxiliary:
                intake.left_out[call.id] = AUXILIARY
            elif call.outcome in EMPTY_ENDS:
                intake.left_out[call.id] = EMPTY_ENDS[call.outcome]
            else:
                nothing = np.zeros(0, np.int32)
                intake.placed.append(replace(call, prompt_ids=nothing, output_ids=nothing, logprobs=None))
        traces: list[Trace] = []
        stands_in: dict[str, int] = {}
        for number, path in enumerate(_paths(intake.placed)):
            traces.append(assemble(path, [call.id not in stands_in for call in path], ()))
            for call in path:
                stands_in.setdefault(call.id, number)
        return Built(traces, intake.stats(traces, stands_in, 0))


def _paths(calls: list[Call]) -> list[list[Call]]:
    """From each beginning to each end, in order of the ends."""
    parents: dict[str, Call | None] = {}
    asked: dict[bytes, Call] = {}
    for call in calls:
        name, parent = b"", None
        for message in call.request.get("messages") or []:
            parent = asked.get(name, parent)
            name = hashlib.blake2b(name + orjson.dumps(message), digest_size=16).digest()
        parents[call.id] = parent
        if name:
            asked[name] = call
    continued = {parent.id for parent in parents.values() if parent is not None}
    found = []
    for call in (call for call in calls if call.id not in continued):
        path = [call]
        while (before := parents[path[-1].id]) is not None:
            path.append(before)
        found.append(path[::-1])
    return found
