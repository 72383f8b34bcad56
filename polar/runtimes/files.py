"""Copying between the node and a workspace that an agent has been in.

Whatever lies in a workspace may have been put there to lead the worker astray: links that point out of it,
pipes that never end. So paths are resolved here, never by the kernel on trust, links are copied as links,
and what is neither file nor folder is left out. Which folder stands for which path is the runtime's affair.
"""

from __future__ import annotations

import posixpath
import shutil
import stat
import subprocess
from pathlib import Path

from polar.errors import RuntimeFault

_MOST_LINKS = 40


def resolve_inside(root: Path, path: str) -> Path:
    """Where `path` is if `root` were "/": links are followed the same way, and ".." stops at the root.

    The result may not exist. The last part, too, is no link."""
    waiting = [part for part in reversed(path.split("/")) if part]
    done: list[str] = []
    links = 0
    while waiting:
        part = waiting.pop()
        if part == ".":
            continue
        if part == "..":
            del done[-1:]
            continue
        here = root.joinpath(*done, part)
        if not here.is_symlink():
            done.append(part)
            continue
        links += 1
        if links > _MOST_LINKS:
            raise RuntimeFault(f"{path} goes in circles: too many links", retryable=False)
        target = str(here.readlink())
        if target.startswith("/"):
            done = []
        waiting.extend(part for part in reversed(target.split("/")) if part)
    return root.joinpath(*done)


def resolve_within(folder: Path, path: Path) -> Path:
    """`path` with its links followed as they are on the node. Raises RuntimeFault if it leaves `folder`."""
    resolved = path.resolve()
    if not resolved.is_relative_to(folder.resolve()):
        raise RuntimeFault(f"{path} is outside the workspace", retryable=False)
    return resolved


def upload(source: Path, target: Path, *, into: bool = False) -> None:
    """Copy a file to `target`, or a folder's contents into it; `into` or an existing folder keeps a file's name."""
    if not source.exists():
        raise RuntimeFault(f"{source} is not on this node", retryable=False)
    source = source.resolve()
    if source.is_file() and (into or target.is_dir()):
        target = target / source.name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)
    except OSError as error:
        raise RuntimeFault(f"cannot copy {source} to {target}: {error}", retryable=False) from error


def download(source: Path, target: Path, shown: str) -> None:
    """Copy a file or a folder's contents out. FileNotFoundError, naming `shown`, if it is not there."""
    if not source.exists():
        raise FileNotFoundError(shown)
    if source.is_file() and target.is_dir():
        target = target / posixpath.basename(shown)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy(source, target)
    except OSError as error:
        raise RuntimeFault(f"cannot copy {shown} out: {error}", retryable=False) from error


def clone(source: Path, target: Path) -> None:
    """A copy of a folder that shares the source's blocks where the file system can, and never its files: a hard link
    would let one copy change the others. Raises RuntimeFault."""
    target.parent.mkdir(parents=True, exist_ok=True)
    argv = ["cp", "--archive", "--reflink=auto", "--no-target-directory", str(source), str(target)]
    done = subprocess.run(argv, capture_output=True, check=False)
    if done.returncode != 0:
        raise RuntimeFault(f"cannot copy {source} to {target}: {done.stderr.decode(errors='replace').strip()}")


def remove(folder: Path) -> None:
    """Remove a folder, also one whose modes forbid it. Idempotent. Raises RuntimeFault."""

    def allow(function: object, path: str, _: object) -> None:
        parent = Path(path).parent
        parent.chmod(stat.S_IRWXU)
        entry = Path(path)
        if entry.is_dir() and not entry.is_symlink():
            entry.chmod(stat.S_IRWXU)
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)

    try:
        shutil.rmtree(folder, onerror=allow)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RuntimeFault(f"cannot remove {folder}: {error}") from error


def _copy(source: Path, target: Path) -> None:
    mode = source.lstat().st_mode
    is_folder = stat.S_ISDIR(mode)
    # A link in the target's place would send our bytes to wherever it points.
    if target.is_symlink() or (target.is_file() and not stat.S_ISREG(mode)):
        target.unlink()
    elif target.exists() and target.is_dir() and not is_folder:
        raise IsADirectoryError(str(target))
    if stat.S_ISLNK(mode):
        target.symlink_to(source.readlink())
    elif is_folder:
        target.mkdir(exist_ok=True)
        for child in source.iterdir():
            _copy(child, target / child.name)
        target.chmod(stat.S_IMODE(mode))
    elif stat.S_ISREG(mode):
        shutil.copyfile(source, target, follow_symlinks=False)
        shutil.copystat(source, target, follow_symlinks=False)
