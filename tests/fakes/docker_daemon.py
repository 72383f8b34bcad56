"""A Docker daemon of the tests' own, and a base image made of this machine's packages: no registry, no service.

The daemon has its own data, socket and containers, makes no bridge and touches no firewall rule, so that several
can run side by side and beside the machine's own. It needs root, dockerd and a Debian whose packages are listed.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import docker
from polar.embedded.process import spawn

IMAGE = "polar-base"
PACKAGES = (
    *(
        "base-files",
        "bash",
        "coreutils",
        "dash",
        "debianutils",
        "diffutils",
        "findutils",
        "grep",
        "hostname",
        "libc-bin",
        "mawk",
    ),
    *("procps", "python3", "sed", "tar", "util-linux", "git", "patch"),
)
LEFT_OUT = re.compile(r"^/usr/share/(doc|man|locale|lintian|bash-completion|info)/|^/usr/lib/python3/dist-packages/")
LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = {"tmp": 0o1777, "root": 0o700, "home/worker": 0o755, "proc": 0o555, "dev": 0o755}
ACCOUNTS = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/bash\nworker:x:1234:1234::/home/worker:/bin/sh\n",
    "etc/group": "root:x:0:\nworker:x:1234:\n",
}


def missing() -> str | None:
    """Why this machine cannot run a daemon of its own."""
    if os.geteuid() != 0:
        return "a Docker daemon needs root"
    for program in ("dockerd", "containerd", "runc", "dpkg-query"):
        if shutil.which(program) is None:
            return f"{program} is not installed: make test-docker installs it on Debian"
    return None


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """A daemon with all it has in `folder`; the value for DOCKER_HOST."""
    folder.mkdir(parents=True, exist_ok=True)
    host = f"unix://{folder}/docker.sock"
    argv = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"{folder}/exec", "--host", host]
    argv += ["--pidfile", f"{folder}/pid", "--bridge", "none", "--iptables=false", "--ip6tables=false"]
    # Told to stop when this process dies, however it does: a daemon that stays disturbs the next one.
    daemon = spawn(argv, log_path=folder / "log", env=os.environ, name="dockerd")
    try:
        client = docker.DockerClient(host, timeout=60) if _answers(daemon, folder) else None
        if client is None:
            raise RuntimeError(f"dockerd does not start: {(folder / 'log').read_text()[-2000:]}")
        import_base(client)
        yield host
        for container in client.containers.list(all=True):
            container.remove(force=True, v=True)
        client.close()
    finally:
        daemon.terminate()
        daemon.wait(30)
        _unmount(folder)


def _unmount(folder: Path) -> None:
    """Network namespaces that the daemon leaves mounted would keep the folder from being removed."""
    mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for place in sorted((each for each in mounted if each.startswith(f"{folder}/")), reverse=True):
        subprocess.run(["umount", "--lazy", place], check=False, capture_output=True)


def _answers(daemon: subprocess.Popen[bytes], folder: Path) -> bool:
    for _ in range(300):
        if (folder / "docker.sock").exists():
            try:
                docker.DockerClient(f"unix://{folder}/docker.sock", version="auto").ping()
                return True
            except docker.errors.DockerException:
                pass
        if daemon.poll() is not None:
            return False
        time.sleep(0.1)
    return False


def import_base(client: docker.DockerClient) -> None:
    """Make the image polar-base, unless it is there: a shell, the usual tools, Python and git of this machine."""
    if client.images.list(IMAGE):
        return
    with tempfile.TemporaryFile() as file:
        pack(file)
        file.seek(0)
        client.api.import_image_from_data(file, repository=IMAGE, tag="latest")


def pack(file: IO[bytes]) -> None:
    """A tar of the packages' files, with accounts, the usual folders, and `python` and `awk` under these names."""
    with tarfile.open(fileobj=file, mode="w|") as archive:
        for name, target in LINKS.items():
            _link(archive, name, target)
        for folder, mode in FOLDERS.items():
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            archive.addfile(entry)
        for name, text in ACCOUNTS.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
        _link(archive, "usr/bin/python", "python3")
        _link(archive, "usr/bin/awk", "mawk")
        seen = {*LINKS, *FOLDERS, *ACCOUNTS, "usr/bin/python", "usr/bin/awk"}
        for path in _files():
            place = Path(path)
            # Debian's lists still say /bin/x for what merged systems have in /usr/bin.
            name = str(place.parent.resolve() / place.name).lstrip("/")
            if name and name not in seen and os.path.lexists(path):
                seen.add(name)
                archive.add(path, arcname=name, recursive=False)


def _link(archive: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    archive.addfile(entry)


def _files() -> list[str]:
    """Every file of the packages and of all that they depend on."""
    wanted, waiting = set[str](), list(PACKAGES)
    said = subprocess.check_output(["dpkg-query", "-W", "-f", "${Package}\t${Pre-Depends}, ${Depends}\n"], text=True)
    needs = {}
    for line in said.splitlines():
        name, _, listed = line.partition("\t")
        needs[name] = [re.split(r"[ :(|]", each.strip())[0] for each in listed.split(",") if each.strip()]
    while waiting:
        name = waiting.pop()
        if name in needs and name not in wanted and name not in ("perl", "dpkg", "perl-base"):
            wanted.add(name)
            waiting += needs[name]
    listed = subprocess.run(["dpkg-query", "-L", *sorted(wanted)], capture_output=True, text=True, check=False).stdout
    return [path for path in listed.splitlines() if path.startswith("/") and not LEFT_OUT.match(path)]
