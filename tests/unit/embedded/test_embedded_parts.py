"""The small parts of polar.embedded: ports, the folder lock, secrets, single processes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polar.embedded import EmbeddedError, folder_lock, free_port, require_free_port, spawn, stop
from polar.embedded.files import read_or_make_secret
from polar.embedded.process import describe_exit, has_exited, processes_in
from polar.embedded.service import Service, launch, log_tail, wait_ready

ENV = {"PATH": os.defpath}


def test_free_ports_differ_and_can_be_used() -> None:
    """Ports that were handed out are distinct and pass the check."""
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == 50
    for port in ports:
        require_free_port(port, "a test")


def test_taken_port_is_named() -> None:
    """The error for a taken port names the port, its purpose and the way out."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EmbeddedError, match=rf"port {port} .*wanted for the proxy.*choose another port"):
            require_free_port(port, "the proxy")


def test_folder_lock_refuses_a_second_holder(tmp_path: Path) -> None:
    """A second holder is told which process has the folder, and gets it once that one has let go."""
    with (
        folder_lock(tmp_path / "data"),
        pytest.raises(EmbeddedError, match=rf"process {os.getpid()}\).*choose another"),
        folder_lock(tmp_path / "data"),
    ):
        pass
    with folder_lock(tmp_path / "data"):
        pass


def test_folder_lock_ends_with_its_holder(tmp_path: Path) -> None:
    """A killed holder does not block the next one, even while a child that it started still lives."""
    code = (
        "import subprocess, sys, time\nfrom pathlib import Path\nfrom polar.embedded import folder_lock\n"
        "with folder_lock(Path(sys.argv[1])):\n"
        "    print(subprocess.Popen(['sleep', '30'], stdout=subprocess.DEVNULL).pid, flush=True)\n    time.sleep(30)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    orphan = int(holder.stdout.readline())
    try:
        with pytest.raises(EmbeddedError, match=f"process {holder.pid}"), folder_lock(tmp_path):
            pass
        holder.kill()
        holder.wait()
        with folder_lock(tmp_path):
            pass
    finally:
        os.kill(orphan, signal.SIGKILL)
        holder.stdout.close()


def test_secret_is_private_and_kept(tmp_path: Path) -> None:
    """A secret is made once, readable by its owner only."""
    path = tmp_path / "sub" / "password"
    first, made = read_or_make_secret(path)
    assert made
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_or_make_secret(path) == (first, False)


def test_stop_takes_the_group_and_insists(tmp_path: Path) -> None:
    """A child that ignores SIGTERM is killed after its grace, together with its own child."""
    log = tmp_path / "log"
    proc = spawn(["sh", "-c", "trap '' TERM; sleep 30 & echo $!; wait; wait"], log_path=log, env=ENV, name="stubborn")
    while not log.read_text():
        time.sleep(0.01)
    grandchild = int(log.read_text())
    started = time.monotonic()
    assert stop(proc, 0.3) == -signal.SIGKILL
    assert 0.3 <= time.monotonic() - started < 2
    _wait_gone(grandchild)


def test_missing_program_is_named(tmp_path: Path) -> None:
    """The error for a program that is not there names the service and the program."""
    with pytest.raises(EmbeddedError, match="cannot start thing: No such file or directory: no-such-program"):
        spawn(["no-such-program"], log_path=tmp_path / "log", env=ENV, name="thing")


def test_environment_is_the_given_one(tmp_path: Path) -> None:
    """A child sees the given variables only, and its log is private."""
    log = tmp_path / "log"
    proc = spawn(["/usr/bin/env"], log_path=log, env={"A": "1"}, name="env")
    assert proc.wait(5) == 0
    assert log.read_text() == "A=1\n"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_failed_start_shows_the_last_lines(tmp_path: Path) -> None:
    """The error of a service that dies while starting shows its status and the last 15 lines of its log."""
    argv = ["sh", "-c", "seq 1 40; exit 7"]
    service = Service("counter", argv, ENV, tmp_path / "log", ready=lambda: False)
    with pytest.raises(EmbeddedError, match="counter ended while starting .exit status 7") as caught:
        wait_ready(service, launch(service))
    assert [line.strip() for line in str(caught.value).splitlines()[1:]] == [str(n) for n in range(26, 41)]
    assert log_tail(tmp_path / "absent") == []


def test_slow_start_is_given_up(tmp_path: Path) -> None:
    """A service that never becomes ready is reported after its time."""
    service = Service("slow", ["sleep", "30"], ENV, tmp_path / "log", ready=lambda: False, ready_seconds=0.2)
    proc = launch(service)
    with pytest.raises(EmbeddedError, match="slow was not ready after 0.2 s"):
        wait_ready(service, proc)
    assert not has_exited(proc)
    stop(proc, 1)


def test_processes_in_a_folder(tmp_path: Path) -> None:
    """A process is found by its program and folder, and no longer once it has ended."""
    assert processes_in(tmp_path, "sleep") == []
    proc = subprocess.Popen(["sleep", "30"], cwd=tmp_path)
    try:
        assert processes_in(tmp_path, "sleep") == [proc.pid]
        assert processes_in(tmp_path, "postgres") == []
    finally:
        proc.kill()
        proc.wait()
    assert processes_in(tmp_path, "sleep") == []


def test_exit_in_words() -> None:
    """Statuses and signals are put in words."""
    assert describe_exit(3) == "exit status 3"
    assert describe_exit(-9) == "killed by SIGKILL"
    assert describe_exit(-250) == "killed by signal 250"


def _wait_gone(pid: int) -> None:
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}/exe").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(OSError):
        os.readlink(f"/proc/{pid}/exe")
