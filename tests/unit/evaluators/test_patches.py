"""Reading an agent's work as a patch: everything that changed is seen, whatever the agent did to git."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polar.errors import EvaluatorError, SpecError
from polar.evaluators import create
from polar.evaluators.base import Case, Verdict
from polar.evaluators.test_on_output import TestOnOutput
from polar.runtimes.base import Limits
from polar.runtimes.local import LocalRuntime
from polar.spec import EvaluatorSpec

MakeCase = Callable[..., Case]
MakeRuntime = Callable[[str], LocalRuntime]
GIT = "git -c user.name=n -c user.email=e@e"
REPOSITORY = f"""set -e
export GIT_CONFIG_GLOBAL=/dev/null
git init -q .
mkdir src tests
printf 'one\\ntwo\\nthree\\n' > src/text.txt
printf 'a\\0b' > src/data.bin
printf 'old\\n' > src/gone.txt
printf 'same content, long enough to be known again\\n' > src/before.txt
printf '#!/bin/sh\\n' > src/run.sh
printf 'assert True\\n' > tests/test_it.py
printf '*.log\\nbuild/\\n' > .gitignore
git add -A
{GIT} commit -qm "base $(date +%s%N)"
"""
CHANGES = """set -e
export GIT_CONFIG_GLOBAL=/dev/null
printf 'one\\nchanged\\nthree\\n' > src/text.txt
printf 'a\\0c\\377' > src/data.bin
rm src/gone.txt
mv src/before.txt src/after.txt
chmod +x src/run.sh
printf 'new\\n' > 'src/new file \u00fc.txt'
printf '\\0\\1\\2' > src/new.bin
ln -s text.txt src/link
mkdir src/deep && printf 'x' > src/deep/no-newline
mkdir build && echo ignored > build/out
"""
TESTS = "echo PASSED t.py::test_it"


@pytest.fixture
def judged(case: MakeCase, runtimes: MakeRuntime) -> Callable[..., tuple[Verdict, Path]]:
    """Run a command as the agent and judge in a fresh runtime: the verdict, and the folder that was judged."""

    def judge(agent: str, *, repository: str = REPOSITORY, **config: Any) -> tuple[Verdict, Path]:
        works, fresh = runtimes("agent"), runtimes("fresh")
        for runtime, command in ((works, repository), (fresh, repository), (works, agent)):
            done = runtime.exec(command, limits=Limits(60))
            assert done.ok, done.summary()
        values = {"repo_dir": ".", "test_command": TESTS, "expected_output_json": {"test_it": "PASSED"}, **config}
        verdict = TestOnOutput(**values).evaluate(case(runtime=fresh, agent_runtime=works))
        return verdict, Path(fresh.workdir)

    return judge


def check_everything_arrived(folder: Path) -> None:
    """Each of CHANGES is there, and what git ignores is not."""
    source = folder / "src"
    assert (source / "text.txt").read_text() == "one\nchanged\nthree\n"
    assert (source / "data.bin").read_bytes() == b"a\0c\xff"
    assert not (source / "gone.txt").exists() and not (source / "before.txt").exists()
    assert (source / "after.txt").read_text().startswith("same content")
    assert os.access(source / "run.sh", os.X_OK)
    assert (source / "new file \u00fc.txt").read_text() == "new\n"
    assert (source / "new.bin").read_bytes() == b"\0\1\2"
    assert (source / "link").readlink() == Path("text.txt")
    assert (source / "deep/no-newline").read_text() == "x"
    assert not (folder / "build").exists()


COMMIT = f"git add -A; {GIT} commit -qm work"
TRICKS = {
    "nothing": "true",
    "one commit": COMMIT,
    "commits on another branch": f"git checkout -qb other; {COMMIT}; {GIT} commit -q --allow-empty -m more",
    "amended into the base": f"git add -A; {GIT} commit -q --amend -m base",
    "history made anew": f"rm -rf .git; git init -q .; {COMMIT}",
    "no repository left": "rm -rf .git",
    "objects deleted": "rm -rf .git/objects; mkdir -p .git/objects",
    "index flags": "git update-index --assume-unchanged src/text.txt; git update-index --skip-worktree src/data.bin",
    "a diff program of its own": "for each in diff.external diff.noprefix color.ui; do git config $each true; done",
    "filters and attributes": (
        "git config filter.hide.clean 'echo hidden'; git config diff.hide.textconv 'echo hidden'; "
        "git config core.attributesFile $PWD/.git/mine; echo '* filter=hide diff=hide -diff' > .git/mine; "
        "echo '* filter=hide diff=hide text eol=crlf ident' > .git/info/attributes"
    ),
    "attributes in the tree": "echo '* filter=x -diff eol=crlf' > .gitattributes; git config filter.x.clean 'echo x'",
    "ignore lists": "echo '*' > .git/info/exclude; echo '*' > $HOME/all; git config core.excludesFile $HOME/all",
    "hooks and a file monitor": (
        "printf '#!/bin/sh\\nexit 1\\n' > .git/hooks/pre-commit; chmod +x .git/hooks/*; "
        "printf '#!/bin/sh\\nprintf /\\n' > .git/monitor; chmod +x .git/monitor; git config core.fsmonitor .git/monitor"
    ),
    "another work tree": "git config core.worktree /tmp; git config core.fileMode no; git config core.symlinks no",
    "replaced objects": f"{COMMIT}; git replace HEAD~1 HEAD",
    "a configuration at home": "printf '[diff]\\n external = true\\n[core]\\n autocrlf = true\\n' > $HOME/.gitconfig",
    "a broken configuration": "echo '[[[' > .git/config",
    "a lock left behind": "touch .git/index.lock",
    "a pipe": "mkfifo src/pipe",
}


@pytest.mark.parametrize("trick", TRICKS)
def test_everything_is_seen(judged: Callable[..., tuple[Verdict, Path]], trick: str) -> None:
    """New, binary, deleted, renamed and mode-changed files arrive, whatever was done to git before."""
    verdict, folder = judged(f"{CHANGES}\n{TRICKS[trick]}")
    check_everything_arrived(folder)
    assert verdict.outcome_reward == 1.0
    assert "changed" in verdict.evidence["patch"] and verdict.evidence["patch_bytes"] > 500
    left = [path.name for path in (folder.parent / "home").iterdir() if path.name.startswith(".polar")]
    assert left == []


def test_a_repository_inside_is_seen_with_its_files(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """A folder that the agent made a repository of is no blank in the patch, with commits or without."""
    inner = (
        f"for name in empty full; do mkdir $name; (cd $name; git init -q .; echo hi > hi.txt); done; cd full; {COMMIT}"
    )
    verdict, folder = judged(f"export GIT_CONFIG_GLOBAL=/dev/null\n{inner}")
    assert verdict.outcome_reward == 1.0
    assert (folder / "empty/hi.txt").read_text() == (folder / "full/hi.txt").read_text() == "hi\n"


def test_line_ends_stay_as_they_are(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """No attribute of the tree turns what the agent wrote into something else."""
    _, folder = judged("printf '* text eol=crlf\\n' > .gitattributes; printf 'a\\r\\nb\\n' > mixed.txt")
    assert (folder / "mixed.txt").read_bytes() == b"a\r\nb\n"


def test_what_prepare_left_uncommitted_is_no_work_of_the_agents(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """The base is the fresh runtime's files as they are, not its last commit; without a change, nothing is done."""
    verdict, _ = judged(
        "true", repository=REPOSITORY + "printf 'prepared\\n' > src/text.txt; echo new > src/prepared.txt"
    )
    assert verdict.evidence["report"]["empty_generation"]


def test_a_folder_without_a_repository_will_do(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """Nobody has to make a commit for a patch to be read."""
    verdict, folder = judged("echo two > a.txt; echo b > b.txt", repository="echo one > a.txt")
    assert verdict.outcome_reward == 1.0
    assert (folder / "a.txt").read_text() == "two\n" and (folder / "b.txt").exists()


def test_ignored_files_can_be_taken_along(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """Where the task says that they are part of the work."""
    _, folder = judged("mkdir build; echo out > build/out", include_ignored=True)
    assert (folder / "build/out").read_text() == "out\n"


def test_a_patch_over_the_limit_is_zero(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """It is a rule of the task, and the evidence says so; nothing is applied."""
    verdict, folder = judged("head -c 200000 /dev/urandom > big.bin", max_patch_bytes=100_000)
    assert verdict.outcome_reward == 0.0 and verdict.evidence["report"]["patch_too_large"]
    assert not (folder / "big.bin").exists()


def test_a_large_patch_travels_whole_and_is_shown_in_part(judged: Callable[..., tuple[Verdict, Path]]) -> None:
    """What is cut is the evidence, never the work."""
    verdict, folder = judged("head -c 3000000 /dev/urandom > big.bin")
    assert verdict.outcome_reward == 1.0 and (folder / "big.bin").stat().st_size == 3_000_000
    assert len(verdict.evidence["patch"]) < 70_000 < verdict.evidence["patch_bytes"]


def test_without_a_fresh_runtime_commits_count_from_the_named_one(case: MakeCase, runtimes: MakeRuntime) -> None:
    """HEAD moves with the agent's commits, a commit that the task names does not; one that is gone is an error."""
    runtime = runtimes("agent")
    made = runtime.exec(f"{REPOSITORY}\ngit rev-parse HEAD", limits=Limits(60))
    base = made.stdout.split()[-1]
    assert runtime.exec(f"{CHANGES}\n{COMMIT}", limits=Limits(60)).ok
    values: dict[str, Any] = {"repo_dir": ".", "test_command": TESTS, "expected_output_json": {"test_it": "PASSED"}}
    assert TestOnOutput(**values).evaluate(case(runtime=runtime)).evidence["report"]["empty_generation"]
    named = TestOnOutput(**values, base_commit=base).evaluate(case(runtime=runtime))
    assert named.outcome_reward == 1.0 and "changed" in named.evidence["patch"]
    with pytest.raises(EvaluatorError) as caught:
        TestOnOutput(**values, base_commit="0" * 40).evaluate(case(runtime=runtime))
    assert caught.value.code == "no_base_tree"


def test_protecting_needs_a_fresh_runtime() -> None:
    """Where the agent was, nothing can be put back: refused when the task is submitted."""
    config = {"test_command": "true", "expected_output_json": {"a": "PASSED"}, "protect": ["tests/**"]}
    with pytest.raises(SpecError) as caught:
        create(EvaluatorSpec(strategy="test_on_output", config=config))
    assert caught.value.errors[0][0] == "evaluator.refresh_runtime"
    assert create(EvaluatorSpec(strategy="test_on_output", config=config, refresh_runtime=True))
