"""Copying into every runtime and out of it, also when the agent left traps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from polar import runtimes
from polar.errors import RuntimeFault
from polar.runtimes import Limits, Runtime
from tests.fakes.runtimes import HERE, spec_of


@pytest.fixture(params=HERE)
def runtime(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runtime]:
    """A started runtime, of each kind that runs here."""
    made = runtimes.create(spec_of(request.param, request), "session-1", tmp_path / "workspace")
    made.start(Limits(30))
    yield made
    made.destroy()


def test_a_file_goes_in_and_out_unchanged(runtime: Runtime, tmp_path: Path) -> None:
    """Any bytes, with the mode, and folders on the way are made."""
    source = tmp_path / "tool"
    source.write_bytes(bytes(range(256)) * 10)
    source.chmod(0o755)
    runtime.upload(source, "deep/er/tool")
    assert runtime.exec("test -x deep/er/tool && wc -c < deep/er/tool", limits=Limits(20)).stdout.strip() == "2560"
    runtime.download("deep/er/tool", tmp_path / "out" / "back")
    assert (tmp_path / "out" / "back").read_bytes() == source.read_bytes()
    assert (tmp_path / "out" / "back").stat().st_mode & 0o777 == 0o755
    runtime.upload(source, "deep/")
    assert runtime.exec("cmp deep/tool deep/er/tool", limits=Limits(20)).ok


def test_a_folder_goes_in_and_out(runtime: Runtime, tmp_path: Path) -> None:
    """Its contents become the target's contents; links stay links, what was there stays."""
    source = tmp_path / "tree"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "a").write_text("A")
    (source / "link").symlink_to("sub/a")
    runtime.exec("mkdir -p there; echo old > there/old", limits=Limits(20))
    runtime.upload(source, "there")
    listed = runtime.exec("cd there && cat sub/a link old && readlink link", limits=Limits(20))
    assert listed.stdout == "AAold\nsub/a\n"
    runtime.exec("mkfifo there/pipe", limits=Limits(20))
    runtime.download("/polar/session/there", tmp_path / "back")
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["link", "old", "sub"]


def test_what_is_not_there_cannot_be_fetched(runtime: Runtime, tmp_path: Path) -> None:
    """FileNotFoundError with the path as it was asked."""
    with pytest.raises(FileNotFoundError, match="no/such"):
        runtime.download("no/such", tmp_path / "x")


def test_copying_in_cannot_leave_the_workspace(runtime: Runtime, tmp_path: Path) -> None:
    """Neither dots nor a link that the agent left lead a copy to a file of the node."""
    source = tmp_path / "evil"
    source.mkdir()
    (source / "victim").write_text("overwritten")
    victim = tmp_path / "victim"
    victim.write_text("safe")
    runtime.exec(f"ln -s {tmp_path} way-out; mkdir t; ln -s {victim} t/victim", limits=Limits(20))
    for target in (f"{'../' * 30}{tmp_path}/victim", "way-out/victim", str(victim)):
        try:
            runtime.upload(source / "victim", target)
        except RuntimeFault as refused:
            assert not refused.retryable
        assert victim.read_text() == "safe"
    runtime.upload(source, "t")
    assert victim.read_text() == "safe"
    assert runtime.exec("cat t/victim", limits=Limits(20)).stdout == "overwritten"


def test_copying_out_cannot_leave_the_workspace(runtime: Runtime, tmp_path: Path) -> None:
    """A link that the agent left does not make the worker read a file of the node for it."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    runtime.exec(f"ln -s {secret} result", limits=Limits(20))
    with pytest.raises((RuntimeFault, FileNotFoundError)):
        runtime.download("result", tmp_path / "taken")
    with pytest.raises((RuntimeFault, FileNotFoundError)):
        runtime.download(str(secret), tmp_path / "taken")
    assert not (tmp_path / "taken").exists()
