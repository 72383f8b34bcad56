"""Which log-probabilities are right for which sampling. What an engine gives, the probe finds out."""

from __future__ import annotations

from polar.engines.base import LogprobKind
from polar.messages import Sampling


def right_kinds(sampling: Sampling) -> tuple[str, frozenset[LogprobKind]] | None:
    """The field by which the policy is not sampled as it is, and the kinds that are right all the same.

    None: it is sampled as it is, and any log-probability is right."""
    cut = {
        "top_p": sampling.top_p not in (None, 1.0),
        "top_k": (sampling.top_k or 0) > 0,
        "min_p": (sampling.min_p or 0.0) > 0.0,
    }
    moved = {
        # At zero nothing is drawn, and every engine gives the untempered value.
        "temperature": sampling.temperature not in (None, 0.0, 1.0),
        "presence_penalty": bool(sampling.presence_penalty),
        "frequency_penalty": bool(sampling.frequency_penalty),
        "repetition_penalty": sampling.repetition_penalty not in (None, 1.0),
    }
    for name in (name for name, is_so in cut.items() if is_so):
        return name, frozenset({"processed"})
    for name in (name for name, is_so in moved.items() if is_so):
        return name, frozenset({"processed", "tempered"})
    return None
