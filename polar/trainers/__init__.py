"""What trainers need of results: flat samples, groups, advantages, batches, files; and a bridge for each trainer.

    from polar.trainers import Groups, advantages, padded, samples_of

A bridge is a file named after its trainer; it is imported by name, because only one of them is ever needed.
Needs numpy and the client, none of the server.
"""

from __future__ import annotations

from polar.trainers.advantages import advantages, token_weights
from polar.trainers.batches import packed, padded
from polar.trainers.groups import Group, Groups
from polar.trainers.samples import Sample, SampleError, Span, fresh, reweigh, samples_of, staleness
from polar.trainers.storage import from_arrow, read_jsonl, to_arrow, write_jsonl

__all__ = [
    "Group",
    "Groups",
    "Sample",
    "SampleError",
    "Span",
    "advantages",
    "fresh",
    "from_arrow",
    "packed",
    "padded",
    "read_jsonl",
    "reweigh",
    "samples_of",
    "staleness",
    "to_arrow",
    "token_weights",
    "write_jsonl",
]
