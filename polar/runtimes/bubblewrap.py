"""A rootless sandbox without images, by the program `bwrap`: the node's system read-only, all else the session's own.

Inside, "/" is a private writable folder of the workspace; over it lie, read-only, the node's programs and
libraries, the Python environment that Polar runs in, and what `expose` adds. Nothing else of the node is there:
no homes, no Polar home, no sockets of services. How commands are run and ended is process.py's and tree.py's.

Each command has a process namespace of its own, so its background processes end with it: a service that a
prepare step starts does not live on, as it would in a container. Files do.
"""

from __future__ import annotations

import functools
import os
import posixpath
import shutil
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from polar.errors import RuntimeFault
from polar.runtimes import environment, files, forward, process
from polar.runtimes.base import Limits
from polar.runtimes.on_node import SESSION_FOLDER, NodeRuntime
from polar.runtimes.reach import Reached
from polar.spec import RuntimeSpec

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix")
RELAY = "/polar/relay"
FORWARDER = "/polar/forward.py"
NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL")
MADE = ("/proc", "/dev", RELAY, FORWARDER)
"""What bwrap puts into every sandbox, besides what is shown of the node."""


class BubblewrapRuntime(NodeRuntime):
    """Commands run in namespaces of their own. Without network, only what `reach` was asked for can be reached."""

    name = "bubblewrap"
    ISOLATES_NETWORK = True

    def __init__(self, spec: RuntimeSpec, session_id: str, workspace: Path) -> None:
        super().__init__(spec, session_id, workspace)
        self._exposed: list[str] = []
        self._reached = Reached()

    @classmethod
    def unavailable(cls) -> str | None:
        return _unavailable()

    @classmethod
    def problems(cls, spec: RuntimeSpec) -> list[tuple[str, str]]:
        found = super().problems(spec)
        workdir = _workdir(spec)
        if workdir == "/" or any(_is_below(workdir, place) for place in (*SYSTEM, *MADE)):
            found.append(("workdir", f"runtime {cls.name!r}: {workdir} is the system's, or read-only"))
        return found

    @property
    def workdir(self) -> str:
        return _workdir(self.spec)

    @property
    def _temporary(self) -> str:
        return "/tmp"

    @property
    def _state(self) -> tuple[str, ...]:
        return ("root",)

    @property
    def _root(self) -> Path:
        return self.workspace / "root"

    def start(self, limits: Limits) -> None:
        why = self.unavailable()
        if why is not None:
            raise RuntimeFault(why, retryable=False)
        super().start(limits)
        try:
            (self.workspace / "relay").mkdir(exist_ok=True)
            for link in (Path(place) for place in SYSTEM if Path(place).is_symlink()):
                inside = self._root / link.relative_to("/")
                if not inside.is_symlink():
                    inside.symlink_to(link.readlink())
        except OSError as error:
            raise RuntimeFault(f"cannot make the workspace {self.workspace}: {error}") from error
        tried = self.exec("true", limits=limits)
        if not (tried.ok or tried.timed_out or tried.cancelled):
            raise RuntimeFault(f"the sandbox does not start: bwrap {tried.summary()}")

    def reach(self, url: str) -> str:
        if not self.spec.isolated:
            return url
        return self._reached.reach(url)

    def expose(self, path: Path) -> str:
        # Under its own name, because installed programs hold their own paths.
        shown = str(path.absolute())
        if shown not in self._exposed:
            self._exposed.append(shown)
        return shown

    def _on_node(self, path: str) -> Path:
        place = files.resolve_inside(self._root, posixpath.join(self.workdir, path))
        inside = "/" + str(place.relative_to(self._root))
        if any(_is_below(inside, shown) for shown in (*_visible(), *self._exposed, *MADE)):
            raise RuntimeFault(f"{path} is the node's own or read-only, not the workspace's", retryable=False)
        return place

    @contextmanager
    def _started(self, command: str, cwd: str) -> Iterator[Sequence[str]]:
        inner = process.shell_argv(command, posixpath.join(self.workdir, cwd))
        with ExitStack() as relays:
            argv = [*NAMESPACES, "--hostname", "polar", *self._mounts()]
            if self.spec.isolated:
                argv.append("--unshare-net")
            if self.spec.isolated and (reached := self._reached.ports()):
                pairs = []
                for port, address in reached.items():
                    name = uuid.uuid4().hex
                    relays.enter_context(forward.relaying(str(self.workspace / "relay"), name, address))
                    pairs.append(f"{port}={RELAY}/{name}")
                inner = [sys.executable, "-I", "-S", FORWARDER, *pairs, "--", *inner]
            yield [shutil.which("bwrap") or "bwrap", *argv, "--", *inner]

    def _mounts(self) -> list[str]:
        """What is seen inside, each mount over the ones before it."""
        argv = ["--bind", str(self._root), "/"]
        for shown in (*_visible(), *self._exposed):
            self._refuse_links(shown)
            argv += ["--ro-bind", os.path.realpath(shown), shown]
            if _is_below(str(self.workspace), shown):
                # Other sessions and the Polar home are in there: an empty folder instead.
                argv += ["--tmpfs", str(Path(shown, Path(self.workspace).relative_to(shown).parts[0]))]
            if shown == "/etc":
                argv += _hidden_of_etc()
        for made in MADE:
            self._refuse_links(made)
        argv += ["--ro-bind", str(self.workspace / "relay"), RELAY, "--ro-bind", forward.__file__, FORWARDER]
        return [*argv, "--proc", "/proc", "--dev", "/dev"]

    def _refuse_links(self, path: str) -> None:
        """A link that the agent left in the place of a mount would have bwrap follow it while it has the node's
        own root at hand."""
        place = self._root
        for part in Path(path).parts[1:]:
            place = place / part
            if place.is_symlink():
                raise RuntimeFault(f"the agent put a link at {path}, where the sandbox needs a folder", retryable=False)


def _workdir(spec: RuntimeSpec) -> str:
    return posixpath.normpath(posixpath.join(SESSION_FOLDER, spec.workdir or ""))


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


@functools.cache
def _visible() -> tuple[str, ...]:
    """The node's paths that every sandbox sees, outer ones first."""
    wanted = [place for place in SYSTEM if not Path(place).is_symlink()]
    wanted += [sys.base_prefix, sys.prefix]
    wanted += [value for name, value in environment.passed().items() if name in environment.CERTIFICATES]
    resolver = Path("/etc/resolv.conf")
    wanted += [os.path.realpath(resolver)] if resolver.is_symlink() else []
    shown: list[str] = []
    for place in sorted(
        {str(Path(path).absolute()) for path in wanted if Path(path).exists()}, key=lambda p: p.count("/")
    ):
        # /usr and what is in it are one mount; a folder below /opt stands apart, for /opt may be hidden in part.
        if not any(_is_below(place, outer) for outer in shown if outer != "/opt"):
            shown.append(place)
    return tuple(shown)


@functools.cache
def _hidden_of_etc() -> tuple[str, ...]:
    """Mounts over what an ordinary user could not read: run by root, a sandbox's processes are root to the files."""
    hidden: list[str] = []
    for folder, folders, names in os.walk("/etc"):
        for name in list(folders):
            path = Path(folder, name)
            if not path.is_symlink() and not path.stat().st_mode & stat.S_IXOTH:
                hidden += ["--tmpfs", str(path)]
                folders.remove(name)
        for name in names:
            path = Path(folder, name)
            if not path.is_symlink() and not path.stat().st_mode & stat.S_IROTH:
                hidden += ["--ro-bind", "/dev/null", str(path)]
    return tuple(hidden)


@functools.cache
def _unavailable() -> str | None:
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed on this node: install it (Debian: apt-get install bubblewrap)"
    argv = [program, *NAMESPACES, "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "true"]
    try:
        tried = subprocess.run(argv, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run on this node: {error}"
    if tried.returncode == 0:
        return None
    said = tried.stderr.decode(errors="replace").strip()
    return f"bubblewrap may not make namespaces on this node ({said}): allow unprivileged user namespaces to its user"
