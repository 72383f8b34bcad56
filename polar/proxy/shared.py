"""Where the processes of one proxy count together: a folder named after their master, gone when the next one starts.

Imports nothing that counts: prometheus-client looks for the folder when it is imported, and never again.
"""

from __future__ import annotations

import os
import shutil
import socket

from polar.settings import Settings

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share(settings: Settings) -> None:
    """Make this process and its siblings count together, unless the environment names a folder already."""
    if VARIABLE in os.environ:
        return
    root = settings.home_path / "metrics"
    mine = f"{socket.gethostname()}-{settings.node_id}-{settings.proxy_port}-"
    folder = root / f"{mine}{os.getppid()}"
    folder.mkdir(parents=True, exist_ok=True)
    for other in root.glob(f"{mine}*"):
        if not lives(int(other.name.removeprefix(mine))):
            shutil.rmtree(other, ignore_errors=True)
    for left in folder.glob(f"gauge_live*_{os.getpid()}.db"):
        left.unlink()  # by a dead process that had this one's number: its calls are not in flight any more
    os.environ[VARIABLE] = str(folder)


def lives(pid: int) -> bool:
    """Whether a process of this machine is there."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # somebody else's, but there
    return True
