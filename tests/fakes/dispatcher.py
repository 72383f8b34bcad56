"""A dispatcher that only remembers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class FakeDispatcher:
    """Keeps what was published, in order."""

    woken: list[tuple[str, str, str]] = field(default_factory=list)
    looked: list[str] = field(default_factory=list)

    def wake(self, session_id: str, stage: str, lane: str) -> None:
        self.woken.append((session_id, str(stage), lane))

    def look(self, lane: str) -> None:
        self.looked.append(lane)
