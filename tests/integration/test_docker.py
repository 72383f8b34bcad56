"""What Docker alone has: images from a registry, users, labels and leftovers, volumes; against a real daemon."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import docker
from polar import runtimes
from polar.db import transaction
from polar.errors import PrepareError, RuntimeFault
from polar.models import RolloutSession
from polar.runtimes import Limits, Runtime, docker_daemon, docker_exec
from polar.runtimes.docker import DockerRuntime
from polar.settings import Settings
from polar.spec import RuntimeSpec
from polar.stages import orphans, prepared
from polar.stages.prewarm import fresh_runtime
from tests.fakes.docker_daemon import IMAGE, missing
from tests.fakes.jobs import claimed
from tests.integration.rig import answers, free_port, until

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.usefixtures("docker_host"),
]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[list[Runtime]]:
    """Runtimes to be removed at the end."""
    runtimes_of_test: list[Runtime] = []
    yield runtimes_of_test
    for runtime in runtimes_of_test:
        runtime.destroy()


def start(made: list[Runtime], tmp_path: Path, **asked: Any) -> Runtime:
    """A started runtime."""
    spec = RuntimeSpec(**{"backend": "docker", "image": IMAGE, **asked})
    runtimes.check(spec)
    runtime = runtimes.create(spec, "session-1", tmp_path / f"workspace-{len(made)}")
    made.append(runtime)
    runtime.start(Limits(60))
    return runtime


def containers() -> list[str]:
    """Names of all there are."""
    return [container.name for container in docker_daemon.client().containers.list(all=True)]


def test_an_ordinary_user_owns_what_it_needs(made: list[Runtime], tmp_path: Path) -> None:
    """With a user the working folder, the home and uploads are that user's, and a time-out still ends all."""
    runtime = start(made, tmp_path, kwargs={"user": "worker"}, workdir="repo")
    (tmp_path / "file").write_text("x")
    runtime.upload(tmp_path / "file", "sub/file")
    script = "id -un; echo y >>sub/file && echo z >$HOME/z && stat -c %U sub/file; cat sub/file"
    assert runtime.exec(script, limits=Limits(20)).stdout == "worker\nworker\nxy\n"
    assert runtime.exec("sleep 60 & sleep 60", limits=Limits(0.5)).timed_out
    assert docker_exec.as_root(made[0]._container, "ps -e | grep -c sleep")[1] == "1"


def test_the_specs_variables_and_the_images_are_there(made: list[Runtime], tmp_path: Path) -> None:
    """Also for the container's own processes, which the original forgot."""
    runtime = start(made, tmp_path, env={"FROM_SPEC": "1"})
    assert runtime.exec("echo $FROM_SPEC $PATH", limits=Limits(20)).stdout.startswith("1 /usr/local/sbin:")


def test_labels_say_whose_a_container_is(database: Engine, tmp_path: Path) -> None:
    """Session, attempt, node, use, and the home it belongs to."""
    (job,) = claimed(database, tmp_path / "home", runtime={"backend": "docker", "image": IMAGE})
    runtime = fresh_runtime(job, "agent")
    (labels,) = [
        container.labels
        for container in docker_daemon.client().containers.list()
        if container.labels.get("polar.session") == job.session.id
    ]
    runtime.destroy()
    assert labels["polar.attempt"] == "1"
    assert labels["polar.node"] == "node-1"
    assert labels["polar.use"] == "agent"
    assert labels["polar.workspace"] == str(runtime.workspace)


def test_a_container_that_no_row_names_is_removed(database: Engine, tmp_path: Path) -> None:
    """Its worker is dead and its row gone or changed; one that a row names, and another home's, stay."""
    home = tmp_path / "home"
    jobs = claimed(database, home, number=3, runtime={"backend": "docker", "image": IMAGE})
    kept, lost, others = (fresh_runtime(job, "agent") for job in jobs)
    with transaction(database) as db:
        row = db.get(RolloutSession, jobs[1].session.id)
        assert row is not None
        row.runtimes = {}
    try:
        assert orphans.sweep(database, Settings(home=str(tmp_path / "elsewhere")), "node-1") == 0
        assert [each.session_id for each in orphans.found(database, jobs[0].settings)] == [jobs[1].session.id]
        assert orphans.sweep(database, jobs[0].settings, "node-1") == 1
        assert orphans.sweep(database, jobs[0].settings, "node-1") == 0
        assert kept.exec("echo here", limits=Limits(20)).ok
        assert others.exec("echo here", limits=Limits(20)).ok
        with pytest.raises(RuntimeFault, match="gone"):
            runtimes.attach(lost.handle()).exec("true", limits=Limits(20))
    finally:
        for runtime in (kept, lost, others):
            runtime.destroy()


def test_a_state_is_an_image_that_goes_with_it(database: Engine, tmp_path: Path) -> None:
    """Committed once, started from, and removed from the daemon when the state is."""
    steps = [{"type": "exec", "command": "echo made >made"}]
    asked = {"backend": "docker", "image": IMAGE, "prepare": steps, "prepare_once": True}
    (job,) = claimed(database, tmp_path / "home", runtime=asked)
    before = set(containers())
    runtime = fresh_runtime(job, "agent")
    assert len(docker_daemon.client().images.list("polar-prepared")) == 1
    assert len(set(containers()) - before) == 1
    runtime.destroy()
    folder = job.settings.prepared_folder
    assert prepared.trim(folder, prepared.Bounds(9, 9999, 999), everything=True) == 1
    assert docker_daemon.client().images.list("polar-prepared") == []


def test_an_image_with_volumes_is_prepared_by_every_session(database: Engine, tmp_path: Path) -> None:
    """No commit keeps what is in a volume, so nothing is kept, and the sessions still run."""
    base = docker_daemon.client().containers.create(IMAGE, ["true"])
    base.commit(repository="with-volume", changes="VOLUME /data")
    base.remove()
    steps = [{"type": "exec", "command": "echo made >/data/made"}]
    asked = {"backend": "docker", "image": "with-volume", "prepare": steps, "prepare_once": True}
    for job in claimed(database, tmp_path / "home", number=2, runtime=asked):
        runtime = fresh_runtime(job, "agent")
        assert runtime.exec("cat /data/made", limits=Limits(20)).stdout == "made\n"
        runtime.destroy()


def test_a_volume_may_come_only_from_where_uploads_may(database: Engine, made: list[Runtime], tmp_path: Path) -> None:
    """It is seen inside, read-only if asked; the Polar home is refused."""
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "data").write_text("data\n")
    runtime = start(made, tmp_path, kwargs={"volumes": [f"{shown}:/data:ro"]})
    assert runtime.exec("cat /data/data", limits=Limits(20)).stdout == "data\n"
    assert not runtime.exec("touch /data/new", limits=Limits(20)).ok
    home = tmp_path / "home"
    asked = {"backend": "docker", "image": IMAGE, "kwargs": {"volumes": [f"{home}:/home"]}}
    (job,) = claimed(database, home, runtime=asked)
    with pytest.raises(PrepareError, match="Polar home"):
        fresh_runtime(job, "agent")


def test_what_cannot_be_had_says_what_to_do(made: list[Runtime], tmp_path: Path) -> None:
    """An image that is nowhere, a GPU that is not there, a network that is not there: one sentence, no traceback."""
    for asked, word in (
        ({"image": "127.0.0.1:9/no/such:1"}, "image"),
        ({"gpus": 1}, "device driver"),
        ({"network": "no-such-network"}, "no-such-network"),
    ):
        with pytest.raises(RuntimeFault, match=word):
            start(made, tmp_path, **asked)


def test_what_polar_takes_is_bounded_by_default(made: list[Runtime], tmp_path: Path) -> None:
    """A container has a limit on processes though none was asked for, and is not privileged."""
    start(made, tmp_path)
    config = docker_daemon.client().api.inspect_container(made[0]._container.id)["HostConfig"]
    assert config["PidsLimit"] == 4096
    assert not config["Privileged"]
    assert config["Init"]


def test_a_gpu_is_asked_for_as_docker_wants_it() -> None:
    """By number, or the very ones that are named."""
    for asked, expected in (
        ({"gpus": 2}, {"Count": 2, "DeviceIDs": []}),
        ({"gpus": 1, "kwargs": {"gpu_ids": [3]}}, {"Count": 0, "DeviceIDs": ["3"]}),
    ):
        runtime = DockerRuntime(RuntimeSpec(backend="docker", image=IMAGE, **asked), "s", Path("/nowhere"))
        (request,) = runtime._config(IMAGE)["HostConfig"]["DeviceRequests"]
        assert expected.items() <= request.items()
        assert request["Capabilities"] == [["gpu"]]


def test_a_daemon_that_is_away_is_said_and_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Doctor and sessions hear what to do; the fault is worth another try."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    docker_daemon.client.cache_clear()
    try:
        why = DockerRuntime.unavailable()
        assert why is not None
        assert "start dockerd" in why
        with pytest.raises(RuntimeFault) as fault:
            start([], tmp_path)
        assert fault.value.retryable
        assert list(DockerRuntime.orphans("any")) == []
    finally:
        docker_daemon.client.cache_clear()


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry of this test, on loopback, which daemons trust without a certificate."""
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("docker-registry is not installed: apt-get install docker-registry")
    port = free_port()
    config = tmp_path / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {tmp_path}/registry}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n"
    )
    with (tmp_path / "registry.log").open("wb") as log:
        server = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        until(lambda: answers(f"http://127.0.0.1:{port}/v2/"), 20)
        yield f"127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def test_an_image_is_pulled_once_with_its_progress_in_the_log(registry: str, tmp_path: Path) -> None:
    """Four that want it at the same time wait for one pull; later ones find it there."""
    name = f"{registry}/tools/base:v1"
    client = docker_daemon.client()
    client.images.get(IMAGE).tag(f"{registry}/tools/base", tag="v1")
    client.images.push(f"{registry}/tools/base", tag="v1")
    small = client.containers.create(IMAGE, ["true"])
    # A layer of its own, so that there is something to pull.
    small.commit(repository=f"{registry}/tools/base", tag="v1", changes="ENV PULLED=1")
    small.remove()
    client.images.push(f"{registry}/tools/base", tag="v1")
    client.images.remove(name, force=True)
    logs = [tmp_path / f"{number}.log" for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda log: docker_daemon.fetch(name, Limits(60), log).id, logs))
    assert len(set(found)) == 1
    assert [log.exists() for log in logs].count(True) == 1
    (log,) = [log for log in logs if log.exists()]
    assert "Downloaded newer image" in log.read_text()
    started = time.monotonic()
    docker_daemon.fetch(name, Limits(60), tmp_path / "again.log")
    assert time.monotonic() - started < 5
    assert not (tmp_path / "again.log").exists()
    with pytest.raises(docker.errors.ImageNotFound):
        client.images.get(f"{registry}/tools/other:v1")
