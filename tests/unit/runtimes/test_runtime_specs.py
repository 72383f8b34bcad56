"""What is refused at submit, before any node is asked."""

from __future__ import annotations

from typing import Any

import pytest

from polar import runtimes
from polar.errors import SpecError
from polar.runtimes.local import LocalRuntime
from polar.spec import RuntimeSpec


class Imaged(LocalRuntime):
    """A runtime of a user's own, which starts from images."""

    name = "imaged"
    NEEDS_IMAGE = True
    TAKES_IMAGE = True
    LIMITS_RESOURCES = False


IMAGED = f"{__name__}:Imaged"


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"backend": "docker"}, "runtime.image"),
        ({"backend": "docker", "image": "x", "network": "container:other"}, "runtime.network"),
        ({"backend": "docker", "image": "x", "kwargs": {"privileged": True}}, "runtime.kwargs"),
        ({"backend": "docker", "image": "x", "kwargs": {"volumes": ["data:/data"]}}, "runtime.kwargs.volumes"),
        ({"backend": "docker", "image": "x", "kwargs": {"volumes": ["/run/docker.sock:/s"]}}, "runtime.kwargs.volumes"),
        ({"backend": "docker", "image": "x", "gpus": 1, "kwargs": {"gpu_ids": [0, 1]}}, "runtime.kwargs.gpu_ids"),
        ({"backend": "apptainer"}, "runtime.image"),
        ({"backend": "apptainer", "image": "x.sif", "network": "bridge"}, "runtime.network"),
        ({"backend": "apptainer", "image": "x.sif", "prepare_once": True}, "runtime.prepare_once"),
        ({"backend": "local", "pids": 100}, "runtime.pids"),
        ({"backend": "nonsense"}, "runtime.backend"),
        ({"import_path": "no.such.module:Class"}, "runtime.import_path"),
        ({"import_path": "polar.spec:RuntimeSpec"}, "runtime.import_path"),
        ({"backend": "local", "gpus": 1}, "runtime.gpus"),
        ({"backend": "local", "network": "none"}, "runtime.network"),
        ({"backend": "local", "network": "bridge"}, "runtime.network"),
        ({"backend": "local", "allow_internet": False}, "runtime.allow_internet"),
        ({"backend": "local", "storage_mb": 100}, "runtime.storage_mb"),
        ({"backend": "local", "image": "python:3.11"}, "runtime.image"),
        ({"backend": "local", "workdir": "/testbed"}, "runtime.workdir"),
        ({"backend": "local", "kwargs": {"volumes": ["/a:/b"]}}, "runtime.kwargs"),
        ({"backend": "bubblewrap", "gpus": 1}, "runtime.gpus"),
        ({"backend": "bubblewrap", "network": "bridge"}, "runtime.network"),
        ({"backend": "bubblewrap", "workdir": "/usr/src"}, "runtime.workdir"),
        ({"import_path": IMAGED}, "runtime.image"),
        ({"import_path": IMAGED, "image": "x", "memory_mb": 100}, "runtime.memory_mb"),
        ({"import_path": IMAGED, "image": "x", "cpus": 1}, "runtime.cpus"),
    ],
)
def test_what_a_runtime_cannot_give_is_refused_by_field(asked: dict[str, Any], field: str) -> None:
    """Each thing that a runtime lacks is named by the field that asked for it."""
    with pytest.raises(SpecError) as refused:
        runtimes.check(RuntimeSpec(**asked))
    assert [name for name, _ in refused.value.errors] == [field]


@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "local"},
        {"backend": "local", "memory_mb": 512, "cpus": 1, "workdir": "/polar/session/repo", "network": None},
        {"backend": "bubblewrap", "network": "none", "allow_internet": False, "workdir": "/testbed"},
        {"import_path": IMAGED, "image": "x"},
        {"backend": "docker", "import_path": IMAGED, "image": "x"},
    ],
)
def test_what_a_runtime_can_give_is_taken(asked: dict[str, Any]) -> None:
    """A spec within a runtime's abilities passes; import_path wins over backend."""
    runtimes.check(RuntimeSpec(**asked))
