"""The parts of the node's own runtimes: paths, output, the relay, and what bubblewrap hides."""

from __future__ import annotations

import http.client
import http.server
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar import runtimes
from polar.errors import RuntimeFault
from polar.runtimes import Limits, bubblewrap, environment, files, forward, process
from polar.spec import RuntimeSpec
from tests.fakes import hello

needs_bubblewrap = pytest.mark.skipif(
    bubblewrap.BubblewrapRuntime.unavailable() is not None, reason="bubblewrap does not run here"
)


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A server of the node, as the proxy is one."""
    with hello.serve() as found:
        yield found


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("a/b", "a/b"),
        ("/a/../../../b", "b"),
        ("absolute/x", "a/x"),
        ("up/x", "x"),
        ("chain/x", "a/x"),
        ("./a//b/.", "a/b"),
    ],
)
def test_links_are_followed_as_if_the_folder_were_the_root(tmp_path: Path, path: str, found: str) -> None:
    """An absolute link begins at the folder, and no number of dots gets above it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "absolute").symlink_to("/a")
    (tmp_path / "up").symlink_to("../../..")
    (tmp_path / "chain").symlink_to("absolute")
    assert files.resolve_inside(tmp_path, path) == tmp_path / found


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    """A path that never arrives is a fault, not an endless loop."""
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(RuntimeFault, match="circles"):
        files.resolve_inside(tmp_path, "one/x")


def test_kept_output_says_how_much_is_cut(tmp_path: Path) -> None:
    """Head and tail have half of the limit each."""
    output = tmp_path / "output"
    output.write_bytes(b"a" * 10 + b"b" * 100 + b"c" * 10)
    assert process.read_kept(output, 20) == "a" * 10 + "\n[100 bytes cut out here]\n" + "c" * 10
    assert process.read_kept(output, 120) == output.read_text()


def test_a_runaway_log_is_cut_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that never stops writing cannot fill the node's disk."""
    monkeypatch.setattr(process, "LOG_LIMIT", 3_000_000)
    command = process.Command(["sh", "-c", "yes | head -c 400000000; sleep 2.5; echo end"], dict(os.environ), tmp_path)
    result = process.run(command, limits=Limits(30), scratch=tmp_path, log=tmp_path / "log")
    assert result.stdout.endswith("end\n")
    assert (tmp_path / "log.stdout").stat().st_size < 3_000_000


def test_an_installer_gets_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment for installing on the node has the owner's home and nothing of Polar."""
    monkeypatch.setenv("POLAR_WEBHOOK_SECRET", "secret")
    found = environment.for_installers()
    assert found["HOME"] == os.environ["HOME"]
    assert "secret" not in found.values()


def test_the_relay_carries_bytes_both_ways(tmp_path: Path, address: tuple[str, int]) -> None:
    """The outer half, in a folder whose path is too long for a socket, joins a socket to the one address."""
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    with forward.relaying(str(folder), "s", address):
        assert (folder / "s").is_socket()
        near = socket.socket(socket.AF_UNIX)
        descriptor = os.open(folder, os.O_RDONLY)
        near.connect(f"/proc/self/fd/{descriptor}/s")
        os.close(descriptor)
        connection = http.client.HTTPConnection("ignored")
        connection.sock = near
        connection.request("GET", "/over/there")
        assert connection.getresponse().read() == b"/over/there"
        connection.close()
    assert not (folder / "s").exists()


def test_the_inner_half_gives_the_exit_code_of_its_command() -> None:
    """It stands between the sandbox and the command, and must not mask how that ended."""
    assert forward.main(["--", "sh", "-c", "exit 9"]) == 9
    assert forward.main(["--", "sh", "-c", "kill -TERM $$"]) == 143


@needs_bubblewrap
@pytest.mark.parametrize("asked", [{"network": "none"}, {"allow_internet": False}])
def test_without_network_the_proxy_and_only_the_proxy_is_reached(
    tmp_path: Path, address: tuple[str, int], asked: dict[str, object]
) -> None:
    """The address that reach gives works, at the same time from two commands; all others do not."""
    runtime = runtimes.create(RuntimeSpec(backend="bubblewrap", **asked), "s", tmp_path / "workspace")
    runtime.start(Limits(30))
    with socket.create_server(("127.0.0.1", 0)) as other:
        fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=5).read().decode())"
        forbidden = f"http://127.0.0.1:{other.getsockname()[1]}/"
        before = runtime.exec(f"python -c '{fetch}' http://{address[0]}:{address[1]}/", limits=Limits(30))
        inside = runtime.reach(f"http://{address[0]}:{address[1]}/s/key")
        results: list[str] = []
        threads = [
            threading.Thread(
                target=lambda: results.append(
                    runtime.exec(f"python -c '{fetch}' {inside}/v1", limits=Limits(30)).stdout.strip()
                )
            )
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        refused = runtime.exec(f"python -c '{fetch}' {forbidden}", limits=Limits(30))
    runtime.destroy()
    assert not before.ok
    assert results == ["/s/key/v1"] * 2
    assert "refused" in refused.stderr


@needs_bubblewrap
def test_the_sandbox_shows_nothing_of_the_node_but_its_system(tmp_path: Path) -> None:
    """Homes, Polar's own folder and shadow passwords are not there, and the system cannot be changed."""
    runtime = runtimes.create(RuntimeSpec(backend="bubblewrap"), "s", tmp_path / "workspace")
    runtime.start(Limits(30))
    (tmp_path / "other-session").write_text("secret")
    script = f"""
        test ! -e {tmp_path}/other-session || echo sees the Polar home
        test ! -e {Path.cwd()}/setup.cfg || echo sees the checkout
        test ! -e /run/docker.sock || echo sees sockets
        ! head -c 1 /etc/shadow 2>/dev/null || echo reads shadow
        touch /usr/x /etc/x {sys.prefix}/x 2>/dev/null && echo writes the system
        mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt && touch /tests
        test "$(ps -e | wc -l)" -lt 8 || echo sees processes
        python -c 'import pydantic' || echo cannot use the environment
    """
    assert runtime.exec(script, limits=Limits(30)).stdout == ""
    runtime.download("/logs/verifier/reward.txt", tmp_path / "reward.txt")
    with pytest.raises(RuntimeFault, match="read-only"):
        runtime.upload(tmp_path / "other-session", "/etc/passwd")
    runtime.destroy()
    assert (tmp_path / "reward.txt").read_text() == "1\n"


@needs_bubblewrap
def test_a_link_in_the_place_of_a_mount_is_refused(tmp_path: Path) -> None:
    """An agent cannot have the next sandbox mount over, or make folders in, a place of its choice."""
    runtime = runtimes.create(RuntimeSpec(backend="bubblewrap"), "s", tmp_path / "workspace")
    runtime.start(Limits(30))
    first = Path(sys.prefix).parts[1]
    assert runtime.exec(f"mv /{first} /moved && ln -s /tmp /{first}", limits=Limits(30)).ok
    with pytest.raises(RuntimeFault, match="link"):
        runtime.exec("true", limits=Limits(30))
    runtime.destroy()
