"""Containers of a Docker daemon, through its API: no docker command is needed.

One container per runtime: its first process sleeps, each command is an exec of its own (docker_exec.py), files
go in and out as archives (docker_files.py). All that a session writes is in the container's own layer, so that
removing the container removes it, and a commit of it is a prepared state. Labels say whose it is, for the sweep.

A container without network has a loopback of its own and nothing else; the worker lends it the proxy's address
there (namespace.py). Nothing of that is in the image: any image with a shell will do.
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import threading
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from docker.errors import APIError, ImageNotFound, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Mount

from polar.errors import RuntimeFault
from polar.runtimes import docker_daemon, docker_exec, docker_files, environment, files, namespace
from polar.runtimes.base import CANNOT_KEEP, ExecResult, Limits, Orphan, Runtime
from polar.runtimes.docker_daemon import client, faults
from polar.spec import RuntimeSpec

SESSION_FOLDER = "/polar/session"
LABEL = "polar."
DEFAULT_PIDS = 4096
"""Processes and threads of a container that was given no `pids`: a fork bomb must not take the node."""
FOREVER = ["/bin/sh", "-c", "exec sleep 2147483647"]
IDLE_PROCESSES = 2
"""Docker's init and the sleeper."""
LAYOUT = """\
set -e
[ -d /tmp ] || { mkdir /tmp; chmod 1777 /tmp; }
mkdir -p /polar/run /polar/home /polar/session "$1"
chmod 1777 /polar/run
[ -z "$2" ] || chown "$2" /polar/home /polar/session
"""
PREPARED = "polar-prepared"
"""The name of the images that prepared states are."""
PRIVATE = ("/run", "/var/run")
"""Where the node's services have their sockets."""


class DockerRuntime(Runtime):
    """`network`: "host" is the node's; "none" the proxy alone; any other name a network of the daemon's."""

    name = "docker"
    NEEDS_IMAGE = True
    ISOLATES_NETWORK = True
    LIMITS_RESOURCES = True
    LIMITS_PIDS = True
    LIMITS_STORAGE = True
    HAS_GPUS = True
    COPIES_PREPARED = True
    KWARGS: ClassVar[frozenset[str] | None] = frozenset({"volumes", "user", "gpu_ids", "shm_mb"})

    def __init__(self, spec: RuntimeSpec, session_id: str, workspace: Path) -> None:
        super().__init__(spec, session_id, workspace.resolve())
        self._relays = namespace.Relays()
        self._exposed: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def unavailable(cls) -> str | None:
        return docker_daemon.unavailable()

    @classmethod
    def problems(cls, spec: RuntimeSpec) -> list[tuple[str, str]]:
        found = super().problems(spec)
        if spec.network and ":" in spec.network:
            found.append(("network", f"runtime {cls.name!r}: {spec.network!r} would join another container"))
        ids = spec.kwargs.get("gpu_ids", [])
        if ids and len(ids) != spec.gpus:
            found.append(("kwargs.gpu_ids", f"runtime {cls.name!r}: names {len(ids)} GPUs where gpus is {spec.gpus}"))
        for volume in spec.kwargs.get("volumes", []):
            try:
                source, target, _ = _volume(str(volume))
            except ValueError as error:
                found.append(("kwargs.volumes", f"runtime {cls.name!r}: {error}"))
                continue
            if any(source == place or source.startswith(f"{place}/") for place in PRIVATE):
                found.append(("kwargs.volumes", f"runtime {cls.name!r}: {source} holds the node's sockets"))
        return found

    @classmethod
    def sources(cls, spec: RuntimeSpec) -> list[Path]:
        return [Path(_volume(str(volume))[0]) for volume in spec.kwargs.get("volumes", [])]

    @classmethod
    def orphans(cls, home: str) -> Iterator[Orphan]:
        """Containers that carry the home's label, running or not."""
        if cls.unavailable() is not None:
            return
        with faults("cannot list containers"):
            found = client().api.containers(all=True, filters={"label": f"{LABEL}home={home}"})
        for each in found:
            labels = each["Labels"]
            session_id, workspace = labels.get(f"{LABEL}session", ""), Path(labels.get(f"{LABEL}workspace", "/"))
            yield Orphan(session_id, workspace, partial(_remove, each["Id"]))

    @property
    def workdir(self) -> str:
        return posixpath.normpath(posixpath.join(SESSION_FOLDER, self.spec.workdir or ""))

    @property
    def _container_name(self) -> str:
        # From the path alone, so that whoever attaches to the handle finds the same one.
        return f"polar-{self.session_id[:40]}-{hashlib.sha256(str(self.workspace).encode()).hexdigest()[:12]}"

    @cached_property
    def _container(self) -> Container:
        with faults("the container is gone"):
            return client().containers.get(self._container_name)

    @cached_property
    def _user(self) -> str:
        return str(self._container.attrs["Config"]["User"])

    @cached_property
    def _owner(self) -> tuple[int, int]:
        """Who uploaded files belong to: whoever commands run as."""
        if self._user.partition(":")[0] in ("", "0", "root"):
            return 0, 0
        with faults("cannot ask for the user's number"):
            found = self._container.exec_run(["/bin/sh", "-c", "id -u; id -g"], user=self._user)
        if found.exit_code != 0:
            raise RuntimeFault(f"user {self._user!r} is not known in image {self.spec.image}", retryable=False)
        user, group = found.output.split()
        return int(user), int(group)

    def fetch(self, limits: Limits, log: Path) -> str:
        return str(docker_daemon.fetch(str(self.spec.image), limits, log).id)

    def start(self, limits: Limits) -> None:
        self.fetch(limits, self.workspace / "pull.log")
        self._start(str(self.spec.image))

    def _start(self, image: str) -> None:
        try:
            (self.workspace / "output").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RuntimeFault(f"cannot make the workspace {self.workspace}: {error}") from error
        with faults(f"cannot start a container of {image}"):
            _remove(self._container_name)
            made = client().api.create_container_from_config(self._config(image), self._container_name)
            client().api.start(made["Id"])
        self.__dict__.pop("_container", None)
        owner = self._user if self._owner != (0, 0) else ""
        with faults("cannot lay out the container"):
            code, said = docker_exec.as_root(self._container, LAYOUT, self.workdir, owner)
        if code != 0:
            raise RuntimeFault(f"image {image} lacks /bin/sh, mkdir or chmod: {said}", retryable=False)

    def _config(self, image: str) -> dict[str, Any]:
        """What the daemon is asked for."""
        spec, api = self.spec, client().api
        mounts = [Mount(str(path), str(path), type="bind", read_only=True) for path in self.exposable if path.is_dir()]
        volumes = [_volume(str(volume)) for volume in spec.kwargs.get("volumes", [])]
        mounts += [Mount(target, source, type="bind", read_only=read_only) for source, target, read_only in volumes]
        memory = f"{spec.memory_mb}m" if spec.memory_mb is not None else None
        limits: dict[str, Any] = {
            "init": True,
            "network_mode": "none" if self.spec.isolated else spec.network or "bridge",
            "mem_limit": memory,
            "memswap_limit": memory,
            "nano_cpus": spec.cpus * 10**9 if spec.cpus is not None else None,
            "pids_limit": spec.pids or DEFAULT_PIDS,
            "mounts": mounts,
            "shm_size": f"{spec.kwargs['shm_mb']}m" if "shm_mb" in spec.kwargs else None,
            "storage_opt": {"size": f"{spec.storage_mb}M"} if spec.storage_mb is not None else None,
            "device_requests": _gpus(spec),
        }
        config: dict[str, Any] = api.create_container_config(
            image,
            [],
            entrypoint=FOREVER,
            environment=dict(spec.env),
            user=spec.kwargs.get("user"),
            working_dir="/",
            labels=self._labels(),
            healthcheck={"test": ["NONE"]},
            host_config=api.create_host_config(**{name: value for name, value in limits.items() if value is not None}),
        )
        return config

    def _labels(self) -> dict[str, str]:
        found = {"session": self.session_id, "workspace": str(self.workspace), **self.labels}
        return {LABEL + name: value for name, value in found.items()}

    def exec(
        self,
        command: str,
        *,
        limits: Limits,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        log: Path | None = None,
    ) -> ExecResult:
        inside = docker_exec.Inside(
            container=self._container,
            command=command,
            cwd=posixpath.join(self.workdir, cwd or ""),
            env={"HOME": self.home, "TMPDIR": "/tmp", **environment.anywhere(), **(env or {})},
            user=self._user,
            restart=self._restart,
        )
        with self._relays.open(self._network_process):
            return docker_exec.run(inside, limits=limits, scratch=self.workspace / "output", log=log)

    def reach(self, url: str) -> str:
        host = urlsplit(url).hostname or ""
        elsewhere = not (host == "localhost" or host.startswith("127."))
        if not self.spec.isolated and (self.spec.network == "host" or elsewhere):
            return url
        return self._relays.reached.reach(url)

    def expose(self, path: Path) -> str:
        shown = str(path.absolute())
        mounted = [mount["Destination"] for mount in self._container.attrs["Mounts"]]
        if any(shown == place or shown.startswith(f"{place}/") for place in mounted):
            return shown
        with self._lock:
            if shown not in self._exposed:
                # Mounts are made with a container, not later: what nobody foresaw is copied.
                docker_files.upload(self._container, path, shown, (0, 0))
                self._exposed.add(shown)
        return shown

    def upload(self, source: Path, target: str) -> None:
        docker_files.upload(self._container, source, self._path(target), self._owner)

    def download(self, source: str, target: Path) -> None:
        docker_files.download(self._container, self._path(source), target)

    def kill_all(self) -> None:
        with faults("cannot end what runs in the container"):
            try:
                running = self._container.top()["Processes"]
            except APIError:  # a daemon whose machine has no ps
                running = []
            if len(running) != IDLE_PROCESSES:
                self._restart()

    def destroy(self) -> None:
        with faults("cannot remove the container"):
            _remove(self._container_name)
        files.remove(self.workspace)

    def freeze(self, store: Path) -> None:
        with faults("cannot keep the container's state"):
            volumes = client().images.get(str(self.spec.image)).attrs["Config"].get("Volumes")
            if volumes:
                raise RuntimeFault(f"image {self.spec.image} has volumes, which no commit keeps", code=CANNOT_KEEP)
            image = self._container.commit(repository=PREPARED, tag=store.name[:32])
        size = image.attrs["Size"] - client().images.get(str(self.spec.image)).attrs["Size"]
        (store / "docker.json").write_text(json.dumps({"image": image.id, "bytes": max(0, size)}))

    def start_from(self, store: Path, limits: Limits) -> None:
        try:
            image = json.loads((store / "docker.json").read_text())["image"]
        except (OSError, ValueError) as error:
            raise RuntimeFault(f"the prepared state {store} cannot be read: {error}") from error
        self._start(image)

    @classmethod
    def forget(cls, store: Path) -> None:
        with faults("cannot remove a prepared state"):
            try:
                client().images.remove(f"{PREPARED}:{store.name[:32]}", force=True)
            except ImageNotFound:
                return

    def _restart(self) -> None:
        """Its process namespace ends, and with it every process; the files stay."""
        with faults("cannot restart the container"):
            self._container.restart(timeout=0)

    def _network_process(self) -> int:
        """A process on this machine that is in the container's network."""
        with faults("cannot look at the container"):
            self._container.reload()
        pid = int(self._container.attrs["State"]["Pid"])
        namespace.require_own(pid, str(self._container.id))
        return pid

    def _path(self, path: str) -> str:
        joined = posixpath.join(self.workdir, path)
        return posixpath.normpath(joined) + ("/" if path.endswith("/") else "")


def _remove(name: str) -> None:
    """Remove a container with its volumes, if it is there."""
    try:
        client().api.remove_container(name, v=True, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != 409:
            raise
        # Another thread, or the sweeper, is removing it: it is gone when that is done.
        client().api.wait(name, condition="removed", timeout=docker_daemon.API_SECONDS)


def _volume(text: str) -> tuple[str, str, bool]:
    """`/on/node:/inside[:ro|rw]`, as Docker has it."""
    parts = text.split(":")
    if len(parts) not in (2, 3) or not all(posixpath.isabs(part) for part in parts[:2]):
        raise ValueError(f"{text!r} must be /folder/of/the/node:/path/inside, and :ro if it may not be written to")
    if parts[2:] not in ([], ["ro"], ["rw"]):
        raise ValueError(f"{text!r}: {parts[2]!r} is neither 'ro' nor 'rw'")
    return posixpath.normpath(parts[0]), parts[1], parts[2:] == ["ro"]


def _gpus(spec: RuntimeSpec) -> list[DeviceRequest] | None:
    if spec.gpus == 0:
        return None
    ids = [str(each) for each in spec.kwargs.get("gpu_ids", [])]
    which = {"device_ids": ids} if ids else {"count": spec.gpus}
    return [DeviceRequest(driver="nvidia", capabilities=[["gpu"]], **which)]
