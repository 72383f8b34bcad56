"""The variables that a command starts with when it runs on the node itself, and the limits on what it may use.

A worker's environment holds the database's URL and the control token, so nothing is inherited: the
environment is made from nothing, and what passes from the worker is on one short list. What a task or a
harness adds is the caller's affair.
"""

from __future__ import annotations

import os
import resource
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from polar.spec import RuntimeSpec

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
PASSED = (
    *CERTIFICATES,
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CERT", "PIP_TRUSTED_HOST"),
    *("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_FIND_LINKS", "UV_SYSTEM_CERTS"),
    *("UV_NATIVE_TLS", "UV_OFFLINE"),
)
"""Where packages come from and which certificates to trust; passed on if set. An index URL may hold a
password: it is the node's owner who decides that packages can be installed from it."""


def passed() -> dict[str, str]:
    """What a command may know of the worker's environment."""
    return {name: os.environ[name] for name in PASSED if os.environ.get(name)}


def anywhere() -> dict[str, str]:
    """What of it makes sense in an image: no paths of the node."""
    return {name: value for name, value in passed().items() if not value.startswith("/")}


def clean(home: str, temporary: str) -> dict[str, str]:
    """The environment of a command inside a runtime, before anyone adds to it."""
    python = str(Path(sys.executable).parent)
    return {
        "PATH": f"{python}:{os.environ.get('PATH') or os.defpath}",
        "HOME": home,
        "TMPDIR": temporary,
        "LANG": os.environ.get("LANG") or "C.UTF-8",
        **passed(),
    }


def for_installers() -> dict[str, str]:
    """The environment of a package installer on the node: the owner's home, for its caches, and no secrets."""
    home = os.environ.get("HOME") or str(Path.cwd())
    return clean(home, os.environ.get("TMPDIR") or "/tmp")


def limiter(spec: RuntimeSpec, session_id: str) -> Callable[[], None] | None:
    """What a command does to itself before it begins, so that `memory_mb` and `cpus` hold; None without limits.

    Memory is RLIMIT_DATA, of each process by itself: RLIMIT_AS would also count address space that is only
    reserved, and node reserves gigabytes. It runs between fork and exec, where a lock held by another thread
    stays locked: so everything is worked out here, and only two system calls are left.
    """
    cpus = _share(spec.cpus, session_id)
    size = spec.memory_mb * 1024 * 1024 if spec.memory_mb is not None else None
    if cpus is None and size is None:
        return None
    set_limit, set_affinity, which = resource.setrlimit, os.sched_setaffinity, resource.RLIMIT_DATA

    def limit() -> None:
        if cpus is not None:
            set_affinity(0, cpus)
        if size is not None:
            set_limit(which, (size, size))

    return limit


def _share(count: int | None, session_id: str) -> set[int] | None:
    """`count` of the processors this worker may use, begun at a place that differs between sessions."""
    if count is None:
        return None
    usable = sorted(os.sched_getaffinity(0))
    first = zlib.crc32(session_id.encode()) % len(usable)
    return set((usable[first:] + usable[:first])[:count])
