"""A runtime is the sandbox an agent lives in: started once, run in many times, removed at the end.

A runtime can be left by one process and taken up by another: `handle()` is plain JSON that is kept on the
session's row, and `attach` makes the object again from it. Whoever ends a session, or sweeps after it,
calls `destroy` on what the handle names; that call is idempotent and leaves no process and no folder.
Which program runs inside is the harness's affair.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from polar.errors import RuntimeFault
from polar.spec import RuntimeSpec

OUTPUT_LIMIT = 1_000_000
"""Bytes kept of each of a command's output streams; the middle is cut out and said so."""


CANNOT_KEEP = "state_cannot_be_kept"
"""The code of a fault of `freeze` that will come every time: sessions then prepare their own."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How a command went. `exit_code` is the program's own, never masked; None if it was killed by us."""

    exit_code: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    cancelled: bool = False
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def summary(self, limit: int = 400) -> str:
        """One line for errors and events: how it ended, and the end of what it said."""
        if self.timed_out:
            how = f"timed out after {self.seconds:.1f} s"
        elif self.cancelled:
            how = "was stopped"
        else:
            how = f"exited with {self.exit_code}"
        said = (self.stderr.strip() or self.stdout.strip())[-limit:]
        return f"{how}: {said}" if said else how


@dataclass(slots=True)
class Limits:
    """What bounds a call into a runtime: seconds left, and a flag that someone else may set."""

    seconds: float | None = None
    cancelled: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    """What the seconds are counted by: a clock that stands still takes none away."""
    started: float = field(init=False)

    def __post_init__(self) -> None:
        self.started = self.clock()

    def left(self) -> float | None:
        """Seconds left, never negative; None means without limit."""
        return None if self.seconds is None else max(0.0, self.seconds - (self.clock() - self.started))


@dataclass(frozen=True, slots=True)
class Orphan:
    """A sandbox that a runtime found without its handle."""

    session_id: str
    workspace: Path
    destroy: Callable[[], None]


class Runtime(ABC):
    """One sandbox. Abilities are class attributes, checked when a task is submitted."""

    name: ClassVar[str]
    NEEDS_IMAGE: ClassVar[bool] = False
    """Starts from an image; a spec without one is refused."""
    ISOLATES_NETWORK: ClassVar[bool] = False
    """Can keep a harness from reaching anything but the proxy (network 'none', allow_internet false)."""
    LIMITS_RESOURCES: ClassVar[bool] = False
    """Honours memory_mb and cpus."""
    LIMITS_PIDS: ClassVar[bool] = False
    """Honours pids: processes and threads inside, all together."""
    LIMITS_STORAGE: ClassVar[bool] = False
    """Honours storage_mb, where the node's file system can."""
    COPIES_PREPARED: ClassVar[bool] = False
    """Can keep what the prepare steps made, for other sessions to start from a copy (prepare_once)."""
    HAS_GPUS: ClassVar[bool] = False
    """Can pass GPUs on."""
    TAKES_IMAGE: ClassVar[bool] = True
    """Has a use for an image; a spec with one is refused elsewhere."""
    NETWORKS: ClassVar[frozenset[str] | None] = None
    """The values of `network` it knows, "none" apart; None: any name."""
    KWARGS: ClassVar[frozenset[str] | None] = None
    """The keys of `kwargs` it knows; None: any."""

    def __init__(self, spec: RuntimeSpec, session_id: str, workspace: Path) -> None:
        """`workspace` is this runtime's own folder on the node; it does not exist yet."""
        self.spec = spec
        self.session_id = session_id
        self.workspace = workspace
        self.labels: dict[str, str] = {}
        """Home, node, attempt and use, for whoever finds it without its handle."""
        self.exposable: tuple[Path, ...] = ()
        """Folders of the node that `expose` may be asked for; known before it starts, for those that must know."""

    @classmethod
    def unavailable(cls) -> str | None:
        """Why this node cannot run this runtime, with what to do; None if it can."""
        return None

    @classmethod
    def problems(cls, spec: RuntimeSpec) -> list[tuple[str, str]]:
        """What `spec` asks for that this runtime cannot give, as (field, reason) pairs."""
        asked = {
            "image": (cls.NEEDS_IMAGE and not spec.image, "is required: it starts from an image"),
            "gpus": (spec.gpus > 0 and not cls.HAS_GPUS, "cannot be passed on"),
            "memory_mb": (spec.memory_mb is not None and not cls.LIMITS_RESOURCES, "cannot be limited"),
            "cpus": (spec.cpus is not None and not cls.LIMITS_RESOURCES, "cannot be limited"),
            "pids": (spec.pids is not None and not cls.LIMITS_PIDS, "cannot be limited"),
            "storage_mb": (spec.storage_mb is not None and not cls.LIMITS_STORAGE, "cannot be limited"),
            "prepare_once": (spec.prepare_once and not cls.COPIES_PREPARED, "its prepared state cannot be copied"),
            "allow_internet": (not spec.allow_internet and not cls.ISOLATES_NETWORK, "cannot be taken away"),
        }
        found = [(name, reason) for name, (wrong, reason) in asked.items() if wrong]
        if spec.image and not cls.TAKES_IMAGE:
            found.append(("image", "has no use: it does not start from images"))
        if spec.network == "none" and not cls.ISOLATES_NETWORK:
            found.append(("network", "cannot be 'none': it does not isolate the network"))
        elif spec.network not in (None, "none") and cls.NETWORKS is not None and spec.network not in cls.NETWORKS:
            found.append(("network", f"{spec.network!r} is not known; there are {', '.join(sorted(cls.NETWORKS))}"))
        if cls.KWARGS is not None and (unknown := sorted(spec.kwargs.keys() - cls.KWARGS)):
            found.append(("kwargs", f"{', '.join(unknown)}: not known"))
        return [(name, f"runtime {cls.name!r}: {reason}") for name, reason in found]

    @classmethod
    def sources(cls, spec: RuntimeSpec) -> list[Path]:
        """Folders of the node that `spec` wants to be seen inside; whether it may is the caller's to say."""
        return []

    @classmethod
    def orphans(cls, home: str) -> Iterator[Orphan]:
        """What it finds on this node, by its own labels, of the Polar home that is labelled `home`; most look nowhere,
        because their sandboxes are folders and processes that end with their handles."""
        yield from ()

    @property
    @abstractmethod
    def workdir(self) -> str:
        """Where commands run unless told otherwise: a path inside the runtime."""

    @property
    def home(self) -> str:
        """HOME inside: configuration and logs of programs, apart from the task's own files."""
        return "/polar/home"

    def fetch(self, limits: Limits, log: Path) -> str:
        """Bring to the node what it starts from, once, with its progress in `log`; what that is, by content."""
        return ""

    def freeze(self, store: Path) -> None:
        """Keep the state in the folder `store`, which exists: all that `start_from` needs. Nothing may be running."""
        raise RuntimeFault(f"runtime {self.name!r} cannot keep its state", code=CANNOT_KEEP)

    def start_from(self, store: Path, limits: Limits) -> None:
        """As `start`, with a copy of the kept state: what is done to one copy is not seen in another."""
        raise RuntimeFault(f"runtime {self.name!r} cannot start from a kept state", retryable=False)

    @classmethod
    def forget(cls, store: Path) -> None:
        """Remove what `freeze` made outside of `store`. Idempotent."""
        return

    @abstractmethod
    def start(self, limits: Limits) -> None:
        """Make it ready to run commands. Raises RuntimeFault; a failed start is destroyed by the caller."""

    @abstractmethod
    def exec(
        self,
        command: str,
        *,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> ExecResult:
        """Run a shell command to its end; may be called by several threads at once.

        Output also goes to `log` (path without suffix; `.stdout` and `.stderr` are added) as it comes.
        On time-out or cancellation the whole process tree is killed inside the runtime."""

    @abstractmethod
    def upload(self, source: Path, target: str) -> None:
        """Copy a file or folder of the node to a path inside. Raises RuntimeFault."""

    @abstractmethod
    def download(self, source: str, target: Path) -> None:
        """Copy a file or folder from inside to the node. Raises RuntimeFault; FileNotFoundError if not there."""

    @abstractmethod
    def kill_all(self) -> None:
        """End every process that was started inside, daemons included; the runtime itself stays."""

    @abstractmethod
    def destroy(self) -> None:
        """Remove it with everything it started. Idempotent."""

    def reach(self, url: str) -> str:
        """The address at which a program inside finds `url` of the node."""
        return url

    def expose(self, path: Path) -> str:
        """Make a folder of the node readable to later commands; its path inside. Raises RuntimeFault."""
        raise RuntimeFault(f"runtime {self.name!r} cannot show {path} of the node inside", retryable=False)

    def handle(self) -> dict[str, Any]:
        """What `attach` needs, as JSON."""
        return {
            "runtime": self.spec.name,
            "spec": self.spec.model_dump(mode="json"),
            "session_id": self.session_id,
            "workspace": str(self.workspace),
            "labels": self.labels,
        }

    @classmethod
    def attach(cls, handle: dict[str, Any]) -> Self:
        """The runtime that `handle` names."""
        made = cls(RuntimeSpec.model_validate(handle["spec"]), handle["session_id"], Path(handle["workspace"]))
        made.labels = dict(handle.get("labels", {}))
        return made
