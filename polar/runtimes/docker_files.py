"""Files into a container and out of it, as tar streams through the daemon: bounded memory, modes kept.

The daemon resolves paths with the container's root as "/", so a link that an agent left leads nowhere on the
node. Links are copied as links, and what is neither file, folder nor link is left out, as with files.py.
"""

from __future__ import annotations

import os
import posixpath
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from docker.errors import NotFound
from docker.models.containers import Container

from polar.errors import RuntimeFault
from polar.runtimes.docker_daemon import faults

IN_MEMORY = 8 << 20
"""Bytes of an upload that are kept in memory; more goes to a temporary file."""
_LINK, _FOLDER = 1 << 27, 1 << 31
"""How Go, and so the daemon, says in a mode that a path is a link or a folder."""
_MOST_LINKS = 10


def upload(container: Container, source: Path, target: str, owner: tuple[int, int]) -> None:
    """Copy a file to `target`, or a folder's contents into it; into a folder a file goes by its name."""
    if not source.exists():
        raise RuntimeFault(f"{source} is not on this node", retryable=False)
    source = source.resolve()
    with faults(f"cannot copy {source} to {target}"):
        if source.is_file() and (target.endswith("/") or _is_folder(container, target)):
            target = posixpath.join(target, source.name)
        name = posixpath.normpath(target).lstrip("/")
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as packed:
            with tarfile.open(fileobj=cast(IO[bytes], packed), mode="w|") as archive:
                _pack(archive, source, name, owner)
            packed.seek(0)
            container.put_archive("/", packed)


def download(container: Container, source: str, target: Path) -> None:
    """Copy a file, or a folder's contents, out. FileNotFoundError if it is not there."""
    with faults(f"cannot copy {source} out"):
        path = source
        for _ in range(_MOST_LINKS):
            try:
                chunks, found = container.get_archive(path)
            except NotFound:
                raise FileNotFoundError(source) from None
            if not found["mode"] & _LINK:
                break
            path = found["linkTarget"]
        else:
            raise RuntimeFault(f"{source} goes in circles: too many links", retryable=False)
        if not found["mode"] & _FOLDER and target.is_dir():
            target = target / posixpath.basename(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with tarfile.open(fileobj=cast(IO[bytes], _Reader(chunks)), mode="r|") as archive:
                _unpack(archive, target)
        except (OSError, tarfile.TarError) as error:
            raise RuntimeFault(f"cannot copy {source} out: {error}", retryable=False) from error


def _is_folder(container: Container, path: str) -> bool:
    try:
        chunks, found = container.get_archive(path)
    except NotFound:
        return False
    cast(Iterator[bytes], chunks).close()  # type: ignore[attr-defined]
    return bool(found["mode"] & _FOLDER) or _links_to_folder(container, found)


def _links_to_folder(container: Container, found: dict[str, int | str]) -> bool:
    if not int(found["mode"]) & _LINK or not found.get("linkTarget"):
        return False
    return _is_folder(container, str(found["linkTarget"])) if found["linkTarget"] != found["name"] else False


def _pack(archive: tarfile.TarFile, source: Path, name: str, owner: tuple[int, int]) -> None:
    mode = source.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        return
    entry = archive.gettarinfo(source, arcname=name)
    if entry.islnk():
        # The second name of a file: its first may lie outside of what is copied, so it is sent again.
        entry.type, entry.linkname, entry.size = tarfile.REGTYPE, "", source.stat().st_size
    entry.uid, entry.gid, entry.uname, entry.gname = *owner, "", ""
    if entry.isreg():
        with source.open("rb") as file:
            archive.addfile(entry, file)
        return
    archive.addfile(entry)
    if entry.isdir():
        for child in sorted(source.iterdir()):
            _pack(archive, child, f"{name}/{child.name}", owner)


def _unpack(archive: tarfile.TarFile, target: Path) -> None:
    """The first entry is what was asked for, under its own name; all others lie below it."""
    modes: list[tuple[Path, int]] = []
    top = None
    for entry in archive:
        top = entry.name if top is None else top
        if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
            continue
        below = _below(entry.name, top)
        place = target / below if below else target
        # The daemon's own archive never puts an entry below a link; one that does is not followed.
        if not place.parent.resolve().is_relative_to(target.parent.resolve()):
            raise RuntimeFault(f"{entry.name} would leave {target}", retryable=False)
        if place.is_symlink() or (place.is_file() and not entry.isdir()):
            place.unlink()
        if entry.isdir():
            place.mkdir(exist_ok=True)
            modes.append((place, entry.mode))
        elif entry.issym():
            place.symlink_to(entry.linkname)
        elif entry.islnk():
            os.link(target / _below(entry.linkname, top), place, follow_symlinks=False)
        else:
            with place.open("wb") as file:
                _copy(archive, entry, file)
            place.chmod(entry.mode & 0o777)
            os.utime(place, (entry.mtime, entry.mtime))
    for folder, mode in reversed(modes):
        folder.chmod(mode & 0o777)


def _below(name: str, top: str) -> str:
    """The rest of a name after the first entry's, without a way up."""
    rest = posixpath.normpath(name[len(top) :].lstrip("/")) if name.startswith(top) else name
    if rest.startswith("..") or posixpath.isabs(rest):
        raise RuntimeFault(f"{name} is no path below {top}", retryable=False)
    return "" if rest == "." else rest


def _copy(archive: tarfile.TarFile, entry: tarfile.TarInfo, file: IO[bytes]) -> None:
    content = archive.extractfile(entry)
    while content is not None and (chunk := content.read(1 << 20)):
        file.write(chunk)


class _Reader:
    """The daemon's chunks as a file that tarfile can read."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = b""

    def read(self, size: int) -> bytes:
        while len(self._rest) < size:
            more = next(self._chunks, b"")
            if not more:
                break
            self._rest += more
        found, self._rest = self._rest[:size], self._rest[size:]
        return found
