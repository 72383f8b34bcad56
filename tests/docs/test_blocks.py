"""Every command of the documentation runs against a real `polar up`, or says what it needs."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from polar import cli
from polar.embedded import free_port
from polar.topology import load_topology
from tests.docs.blocks import CHECKED, NEEDS, QUIET, ROOT, RUN, SHOWN, Block, blocks, pages
from tests.docs.running import Reader
from tests.e2e.up import EXAMPLES, Up, start

PAGES = pages()
ALL = [block for page in PAGES for block in blocks(page)]
FOLLOWED = [page for page in PAGES if any(block.runs for block in ALL if block.page == page)]
SCRIPTED = ("calculator", "harbor_task", "swebench_verified")


def name(page: Path) -> str:
    """A page's id in this run, and its folder's name."""
    return "-".join(page.relative_to(ROOT).with_suffix("").parts)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each page; the workers can import from all of them."""
    folder = tmp_path_factory.mktemp("pages")
    for page in FOLLOWED:
        (folder / name(page)).mkdir()
    return folder


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, folders: Path) -> Iterator[Up]:
    """One `polar up` for all pages, with the scripts and the classes of the examples."""
    folder = tmp_path_factory.mktemp("docs")
    scripts = [each for one in SCRIPTED for each in json.loads((EXAMPLES / one / "script.json").read_text())["scripts"]]
    (folder / "script.json").write_text(json.dumps({"scripts": scripts}))
    path = [str(EXAMPLES / each) for each in ("own_harness", "own_evaluator")] + [
        str(each) for each in folders.iterdir()
    ]
    running = start(folder / "home", free_port(), free_port(), folder / "script.json", PYTHONPATH=os.pathsep.join(path))
    yield running
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait(40) == 0


@pytest.mark.e2e
@pytest.mark.parametrize("page", FOLLOWED, ids=name)
def test_a_page_can_be_followed(page: Path, up: Up, folders: Path) -> None:
    """Its blocks run in order, as a reader runs them."""
    proxy = load_topology(up.home / "topology.yaml").gateway.nodes[0].port
    reader = Reader(page, folders / name(page), api=f"127.0.0.1:{up.port}", proxy=f"127.0.0.1:{proxy}", home=up.home)
    for block in ALL:
        if block.page == page and block.runs:
            reader.follow(block)


@pytest.mark.parametrize("block", ALL, ids=lambda block: block.place)
def test_a_block_says_what_it_is(block: Block) -> None:
    """It is fenced and names its language; a mark is one of few, and says something true."""
    assert block.language in (*RUN, *CHECKED, *QUIET), f"{block.place}: no block of {block.language or 'no language'}"
    if block.kind == "needs":
        assert block.value in NEEDS
    elif block.kind == "shown only":
        assert block.value in SHOWN
    elif block.kind == "run by" and block.value != "ci":
        path, _, test = block.value.partition("::")
        found = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
        assert test in found, f"{block.place}: there is no {block.value}"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each of a block's lines that calls `polar` or `make`."""
    for line in block.text.replace("\\\n", " ").splitlines():
        found = re.match(r"^\s*(?:[A-Z_]+=\S*\s+)*((?:polar|make)\s.*)$", line)
        if found:
            yield shlex.split(re.split(r"[|&;>]", found[1])[0], comments=True)


@pytest.mark.parametrize("block", [each for each in ALL if each.language == "sh"], ids=lambda block: block.place)
def test_every_command_exists(block: Block) -> None:
    """Also where a block does not run, its commands have the flags that it gives them, and make has its targets."""
    makefile = (ROOT / "Makefile").read_text()
    for program, *words in commands(block):
        if program == "make":
            assert all(f"\n{word}:" in makefile for word in words), (block.place, words)
            continue
        if words[0].startswith("-"):
            continue
        command = cli.main.get_command(click.Context(cli.main), words[0])
        assert command is not None, f"{block.place}: there is no polar {words[0]}"
        flags = {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)} | {
            "--help",
            "-h",
        }
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert given <= flags, f"{block.place}: polar {words[0]} has no {sorted(given - flags)}"
