"""What a task may bring in from the node, and what is left of a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.errors import HarnessError, PrepareError
from polar.harnesses.base import AgentExit
from polar.settings import Settings
from polar.stages.guard import check_source, error_without, exit_without, logs_without

KEY = "sk-polar-abc"


@pytest.mark.parametrize(
    "source", ["home/api_key", "home", ".", "/", "/proc/self/environ", "/dev/sda", "/sys/x", "link", "a/../home/x"]
)
def test_an_upload_cannot_take_what_is_polars_or_the_nodes(tmp_path: Path, source: str) -> None:
    """Its keys, its database, a worker's environment: not by name, by link, by .. or as part of a folder."""
    (tmp_path / "home").mkdir()
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    with pytest.raises(PrepareError) as refused:
        check_source(tmp_path / source, Settings(home=str(tmp_path / "home")))
    assert refused.value.code == "source_refused"


def test_uploads_come_from_the_folders_that_are_named(tmp_path: Path) -> None:
    """With POLAR_UPLOAD_FROM set, from nowhere else, and a link does not lead out."""
    for name in ("data", "data2", "more"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/out").symlink_to(tmp_path / "data2")
    settings = Settings(home=str(tmp_path / "home"), upload_from=f"{tmp_path}/data:{tmp_path}/more")
    check_source(tmp_path / "data/x", settings)
    check_source(tmp_path / "more", settings)
    for source in ("data2", "data/out", "data/../data2", "."):
        with pytest.raises(PrepareError):
            check_source(tmp_path / source, settings)


def test_last_words_do_not_have_the_key(tmp_path: Path) -> None:
    """It is taken out of how the agent ended, of errors and of logs, and links in the logs are not followed."""
    assert KEY not in str(exit_without(KEY, AgentExit("failed", 1, f"said {KEY} twice {KEY}")).error)
    error = HarnessError(f"said {KEY}")
    error_without(KEY, error)
    assert KEY not in str(error)
    outside = tmp_path / "outside"
    outside.write_text(KEY)
    logs = tmp_path / "logs"
    (logs / "deep").mkdir(parents=True)
    (logs / "deep/agent.stdout").write_bytes(b"\xff" + KEY.encode() + b"\n")
    (logs / "link").symlink_to(outside)
    logs_without(KEY, logs)
    assert (logs / "deep/agent.stdout").read_bytes() == b"\xff[redacted]\n"
    assert outside.read_text() == KEY
