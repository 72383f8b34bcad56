"""Where a group ends: by a hash of its name and a seed, so that no group is ever in two splits.

The same seed puts the same group into the same split on every machine, in every later export, whatever else there is.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

NAME = re.compile(r"[A-Za-z0-9_\-]+")


class SplitError(ValueError):
    """The shares of a split do not make a whole."""


@dataclass(frozen=True, slots=True)
class Split:
    """Named shares of all groups."""

    shares: tuple[tuple[str, float], ...] = (("train", 1.0),)
    seed: int = 0

    @classmethod
    def read(cls, text: str, seed: int = 0) -> Split:
        """From `train=0.9,test=0.1`. Raises SplitError."""
        shares = []
        for part in text.split(","):
            name, _, share = part.strip().partition("=")
            try:
                shares.append((name, float(share)))
            except ValueError:
                raise SplitError(f"{part!r} is no share; write it as train=0.9,test=0.1") from None
            if not NAME.fullmatch(name):
                raise SplitError(f"{name!r} is no name for a file; use letters, digits, - and _")
        total = sum(share for _, share in shares)
        if len({name for name, _ in shares}) < len(shares):
            raise SplitError(f"{text!r} names a split twice")
        if any(not share > 0 for _, share in shares) or abs(total - 1) > 1e-6:
            raise SplitError(f"the shares of {text!r} are not positive, or add up to {total:g} instead of 1")
        return cls(tuple(shares), seed)

    def of(self, group: str) -> str:
        """The split that has this group."""
        place, end = fraction(self.seed, group), 0.0
        for name, share in self.shares:
            end += share
            if place < end:
                return name
        return self.shares[-1][0]  # shares that add up to a hair less than 1


def fraction(seed: int, name: str) -> float:
    """A number in [0, 1) that looks random and is always the same."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:7]) / (1 << 56)
