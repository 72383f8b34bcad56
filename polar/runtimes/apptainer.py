"""Apptainer instances, by the command `apptainer`: images without a daemon, as compute clusters have them.

An instance is a daemon in a process namespace of its own over the read-only image and a writable overlay in the
workspace; each command is an `apptainer exec instance://…`. These processes are the node's own, so commands are
run and ended by process.py and tree.py, and a daemon that hid is found by the instance's process namespace.
Files pass through a folder that is mounted at /polar/transfer.

Without network, commands reach the proxy through forward.py, which the image needs a python3 for; so nothing here
needs root. Written against the command line of Apptainer 1.1 to 1.4.
"""

from __future__ import annotations

import functools
import hashlib
import json
import posixpath
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

from polar.errors import RuntimeFault
from polar.runtimes import environment, files, forward, process, tree
from polar.runtimes.base import ExecResult, Limits, Runtime
from polar.runtimes.on_node import SESSION_FOLDER
from polar.runtimes.reach import Reached
from polar.spec import RuntimeSpec

PREFIX = "APPTAINERENV_"
"""A variable so named is the program's inside, without the prefix."""
TRANSFER = "/polar/transfer"
RELAY = "/polar/relay"
FORWARDER = "/polar/forward.py"
PROGRAMS = ("apptainer", "singularity")
CLI_SECONDS = 120.0
WRAPPER = 'cd -- "$1" || exit 126; if command -v bash >/dev/null 2>&1; then exec bash -c "$2"; fi; exec sh -c "$2"'
COPY_IN = """\
source=$1 target=$2
if [ -d "$source" ]; then mkdir -p -- "$target" && exec cp -a -- "$source/." "$target/"; fi
case "$target" in */) mkdir -p -- "$target";; *) mkdir -p -- "${target%/*}/";; esac
[ ! -d "$target" ] || target=${target%/}/${source##*/}
exec cp -a --remove-destination -- "$source" "$target"
"""
COPY_OUT = '[ -e "$1" ] || exit 44; if [ -d "$1" ]; then exec cp -a -- "$1/." "$2/"; fi; exec cp -aL -- "$1" "$2/"'
NOT_THERE = 44


class ApptainerRuntime(Runtime):
    """`network`: "host" is the node's; "none" the proxy alone. Limits are cgroups, where the node allows them."""

    name = "apptainer"
    NEEDS_IMAGE = True
    ISOLATES_NETWORK = True
    LIMITS_RESOURCES = True
    LIMITS_PIDS = True
    LIMITS_STORAGE = True
    HAS_GPUS = True
    NETWORKS: ClassVar[frozenset[str] | None] = frozenset({"host"})
    KWARGS: ClassVar[frozenset[str] | None] = frozenset({"volumes", "gpu_ids", "fakeroot"})

    def __init__(self, spec: RuntimeSpec, session_id: str, workspace: Path) -> None:
        super().__init__(spec, session_id, workspace.resolve())
        # From the path alone, so that whoever attaches to the handle looks for the same ones.
        self._mark = hashlib.sha256(str(self.workspace).encode()).hexdigest()[:32]
        self._instance = f"polar-{self._mark[:16]}"
        self._reached = Reached()
        self._exposed: set[str] = set()

    @classmethod
    def unavailable(cls) -> str | None:
        if _program() is None:
            return "apptainer is not installed on this node: install it from its project's packages (docs/runtimes.md)"
        return None

    @classmethod
    def sources(cls, spec: RuntimeSpec) -> list[Path]:
        return [Path(str(volume).partition(":")[0]) for volume in spec.kwargs.get("volumes", [])]

    @property
    def workdir(self) -> str:
        return posixpath.normpath(posixpath.join(SESSION_FOLDER, self.spec.workdir or ""))

    @property
    def _program(self) -> str:
        return _program() or PROGRAMS[0]

    def start(self, limits: Limits) -> None:
        why = self.unavailable()
        if why is not None:
            raise RuntimeFault(why, retryable=False)
        try:
            for folder in ("transfer", "relay", "output"):
                (self.workspace / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeFault(f"cannot make the workspace {self.workspace}: {error}") from error
        for argv in self.start_commands():
            done = self._call(argv, limits)
            if not done.ok:
                raise RuntimeFault(
                    f"apptainer {argv[1]} {done.summary()}; image {self.spec.image}, and limits need cgroups that this "
                    "user may write",
                    retryable=done.timed_out,
                )
        laid = self._plain(f"mkdir -p {self.home} {SESSION_FOLDER} {shlex.quote(self.workdir)}", limits=limits)
        if not laid.ok:
            raise RuntimeFault(f"image {self.spec.image} cannot be used: {laid.summary()}", retryable=False)

    def start_commands(self) -> list[list[str]]:
        """The command lines that make the overlay and start the instance."""
        spec, program, overlay = self.spec, self._program, self.workspace / "overlay"
        if spec.storage_mb is not None:
            overlay = overlay.with_suffix(".img")
            first = [program, "overlay", "create", "--size", str(spec.storage_mb), str(overlay)]
        else:
            first = ["mkdir", "-p", str(overlay)]
        argv = [program, "instance", "start", "--containall", "--cleanenv", "--overlay", str(overlay)]
        argv += ["--bind", f"{self.workspace}/transfer:{TRANSFER}", "--bind", f"{self.workspace}/relay:{RELAY}:ro"]
        argv += ["--bind", f"{forward.__file__}:{FORWARDER}:ro"]
        for path in self.exposable:
            argv += ["--bind", f"{path}:{path}:ro"]
        for volume in spec.kwargs.get("volumes", []):
            argv += ["--bind", str(volume)]
        argv += ["--nv"] if spec.gpus else []
        argv += ["--fakeroot"] if spec.kwargs.get("fakeroot") else []
        argv += ["--net", "--network", "none"] if self.spec.isolated else []
        argv += ["--cpus", str(spec.cpus)] if spec.cpus is not None else []
        argv += ["--memory", f"{spec.memory_mb}M"] if spec.memory_mb is not None else []
        argv += ["--pids-limit", str(spec.pids)] if spec.pids is not None else []
        return [first, [*argv, str(spec.image), self._instance]]

    def exec(
        self,
        command: str,
        *,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> ExecResult:
        if not self.workspace.is_dir():
            raise RuntimeFault(f"the instance's workspace {self.workspace} is gone", retryable=False)
        with ExitStack() as relays:
            pairs = []
            for port, address in self._reached.ports().items():
                name = uuid.uuid4().hex
                relays.enter_context(forward.relaying(str(self.workspace / "relay"), name, address))
                pairs.append(f"{port}={RELAY}/{name}")
            inner = ["/bin/sh", "-c", WRAPPER, "polar", posixpath.join(self.workdir, cwd or ""), command]
            if pairs:
                inner = ["python3", "-I", "-S", FORWARDER, *pairs, "--", *inner]
            return self._run(inner, env or {}, limits, log)

    def _plain(self, script: str, *arguments: str, limits: Limits) -> ExecResult:
        """A shell script of ours inside, in "/"."""
        return self._run(["/bin/sh", "-c", script, "polar", *arguments], {}, limits, None)

    def _run(self, inner: Sequence[str], env: Mapping[str, str], limits: Limits, log: Path | None) -> ExecResult:
        given = {"HOME": self.home, "TMPDIR": "/tmp", **environment.anywhere(), **self.spec.env, **env}
        if self.spec.gpus and (ids := self.spec.kwargs.get("gpu_ids")):
            given["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ids))
        given[tree.RUNTIME_MARK] = self._mark
        command = process.Command(
            argv=[
                self._program,
                "exec",
                "--cleanenv",
                "--pwd",
                "/",
                f"instance://{self._instance}",
                *inner,
            ],
            env=environment.for_installers() | {PREFIX + name: value for name, value in given.items()},
            cwd=self.workspace,
            prefix=PREFIX,
        )
        return process.run(command, limits=limits, scratch=self.workspace / "output", log=log)

    def _call(self, argv: Sequence[str], limits: Limits) -> ExecResult:
        """The node's own command, outside of the instance."""
        command = process.Command(argv=argv, env=environment.for_installers(), cwd=self.workspace)
        return process.run(command, limits=limits, scratch=self.workspace / "output")

    def reach(self, url: str) -> str:
        return self._reached.reach(url) if self.spec.isolated else url

    def expose(self, path: Path) -> str:
        shown = str(path.absolute())
        if not any(path.is_relative_to(folder) for folder in self.exposable) and shown not in self._exposed:
            self.upload(path, shown)
            self._exposed.add(shown)
        return shown

    def upload(self, source: Path, target: str) -> None:
        with self._passing() as (outside, inside):
            files.upload(source, outside / source.name)
            path = posixpath.join(self.workdir, target)
            copied = self._plain(COPY_IN, f"{inside}/{source.name}", path, limits=Limits(CLI_SECONDS))
            if not copied.ok:
                raise RuntimeFault(f"cannot copy {source} to {target}: {copied.summary()}", retryable=False)

    def download(self, source: str, target: Path) -> None:
        with self._passing() as (outside, inside):
            path = posixpath.join(self.workdir, source)
            copied = self._plain(COPY_OUT, path, inside, limits=Limits(CLI_SECONDS))
            if copied.exit_code == NOT_THERE:
                raise FileNotFoundError(source)
            if not copied.ok:
                raise RuntimeFault(f"cannot copy {source} out: {copied.summary()}", retryable=False)
            single = outside / posixpath.basename(source)
            files.download(single if single.is_file() else outside, target, source)

    @contextmanager
    def _passing(self) -> Iterator[tuple[Path, str]]:
        """A folder of one copy alone: its path on the node, and inside."""
        name = uuid.uuid4().hex
        place = self.workspace / "transfer" / name
        place.mkdir(parents=True)
        try:
            yield place, f"{TRANSFER}/{name}"
        finally:
            files.remove(place)

    def kill_all(self) -> None:
        # The instance's namespace has all that hid; what has not entered it yet carries the mark.
        tree.end(lambda: self._inside() | tree.of_runtime(self._mark, self.workspace))

    def _inside(self) -> set[int]:
        leader = self._leader()
        return tree.of_namespace(leader) if leader is not None else set()

    def _leader(self) -> int | None:
        """The instance's first process, as the node numbers it; None if it does not run."""
        listed = self._listed()
        return int(listed[0]["pid"]) if listed else None

    def _listed(self) -> list[dict[str, Any]]:
        if not self.workspace.is_dir():
            return []
        done = self._call([self._program, "instance", "list", "--json", self._instance], Limits(CLI_SECONDS))
        try:
            found: list[dict[str, Any]] = json.loads(done.stdout)["instances"]
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeFault(f"apptainer instance list {done.summary()}") from error
        return [each for each in found if each["instance"] == self._instance]

    def destroy(self) -> None:
        if _program() is not None and self._listed():
            argv = [self._program, "instance", "stop", "--signal", "SIGKILL", self._instance]
            stopped = self._call(argv, Limits(CLI_SECONDS))
            if not stopped.ok and self._listed():
                raise RuntimeFault(f"apptainer instance stop {stopped.summary()}")
        tree.end(lambda: tree.of_runtime(self._mark, self.workspace))
        files.remove(self.workspace)


@functools.cache
def _program() -> str | None:
    for name in PROGRAMS:
        found = shutil.which(name)
        if found and subprocess.run([found, "--version"], capture_output=True, timeout=20, check=False).returncode == 0:
            return found
    return None
