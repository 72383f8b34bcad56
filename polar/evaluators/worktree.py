"""A folder in a runtime as git sees it when nobody inside has a say: trees, diffs, and putting files back.

Every command works with a git folder of our own, made anew outside the repository. So neither the configuration,
hooks, filters, textconv programs, ignore lists and index flags that an agent can leave in `.git` or its home have any
effect, nor attributes files, nor what it did to the history: its commits, a deleted `.git`, rewritten objects. Of the
repository's own `.git` only the objects are read, and if they do not do, a pack of the base is brought instead.

What a patch is worth is patches.py's affair.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polar.errors import EvaluatorError
from polar.evaluators.base import Case
from polar.evaluators.commands import CANNOT_RUN, run
from polar.runtimes.base import ExecResult, Runtime

TREE_ID = re.compile(r"^tree ([0-9a-f]{40,64})$", re.MULTILINE)
NOT_READABLE = 44
"""Exit code of our own script: the base is not among the repository's objects."""
DIFF = (
    "git diff --no-ext-diff --no-textconv --no-color --no-renames --binary --full-index --submodule=diff "
    "--ignore-submodules=none --src-prefix=a/ --dst-prefix=b/"
)
# Paths of git are quoted for the shell by the caller; all else in here is fixed text.
PRELUDE = """set -eu
unset GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_EXTERNAL_DIFF \
GIT_DIFF_OPTS GIT_CONFIG_COUNT GIT_CONFIG_PARAMETERS GIT_NAMESPACE || true
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_ATTR_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 LC_ALL=C
store={store}
cd -- {folder}
repo=$(pwd -P)
"""
OWN = """rm -rf -- "$store/git"
mkdir -p -- "$store"
git init -q --template= "$store/git" >/dev/null 2>&1
own="$store/git/.git"
mkdir -p "$own/info" "$own/objects/info"
printf '* -text -ident -filter -working-tree-encoding !eol !diff !merge\\n' > "$own/info/attributes"
"""
BORROW = """objects=$(git -c safe.directory='*' rev-parse --git-path objects 2>/dev/null) || objects=
if [ -n "$objects" ] && [ -d "$objects" ]; then (cd -- "$objects" && pwd -P) > "$own/objects/info/alternates"; fi
"""
ENTER = """export GIT_DIR="$own" GIT_WORK_TREE="$repo"
for pair in core.bare=false core.fileMode=true core.symlinks=true core.autocrlf=false core.safecrlf=false \
core.fsmonitor=false core.untrackedCache=false core.excludesFile=/dev/null core.attributesFile=/dev/null \
core.hooksPath=/dev/null gc.auto=0; do git config "${pair%%=*}" "${pair#*=}"; done
"""
EMPTY = '[ -n "$base" ] || base=$(git mktree </dev/null)\n'
# A repository inside this one would be one line of a commit, with all its files unseen, unless the base says so, too.
UNNEST = """find . -mindepth 2 -name .git -prune -print | while IFS= read -r inner; do
parent=${inner#./}; parent=${parent%/.git}
if git ls-tree "$base" -- "$parent" | grep -q '^160000 '; then continue; fi
number=$(($(wc -l < "$store/nested") + 1))
printf '%s\\n' "$inner" >> "$store/nested"
mv -- "$inner" "$store/nested.$number"
done
"""
RENEST = """number=0
while IFS= read -r inner; do number=$((number + 1)); mv -- "$store/nested.$number" "$inner"; done < "$store/nested"
"""


@dataclass(frozen=True, slots=True)
class WorkTree:
    """One folder in one runtime."""

    case: Case
    runtime: Runtime
    folder: str
    store: str
    """A folder inside for our own files, outside the repository."""
    seconds: float
    """Bounds each command."""
    ignored: bool = False
    """Take what .gitignore names, too."""

    def tree(self) -> str:
        """The folder's files as a tree of git. Raises EvaluatorError."""
        naming = 'echo "tree $(git write-tree)"'
        found = self._run(OWN, BORROW, _own_base("HEAD"), ENTER, EMPTY, self._add, naming, what="base tree")
        named = TREE_ID.search(found.stdout)
        if not found.ok or named is None:
            raise EvaluatorError(f"git cannot read {self.folder}: it {found.summary()}", code="no_base_tree")
        return named[1]

    def pack(self, tree: str, target: Path) -> None:
        """Everything of a tree that `tree()` gave, in one file on the node. Raises EvaluatorError."""
        packing = f"printf '%s\\n' {tree} | git pack-objects -q --revs --stdout > \"$store/base.pack\""
        found = self._run('own="$store/git/.git"\n', ENTER, packing, what="base pack")
        if not found.ok:
            raise EvaluatorError(f"git cannot pack {self.folder}: it {found.summary()}", code="no_base_tree")
        self.runtime.download(f"{self.store}/base.pack", target)

    def diff(self, base: str | None, target: Path, *, pack: Path | None = None, commit: str = "HEAD") -> ExecResult:
        """Write what differs from the tree `base` to a file on the node.

        Without `base`, from `commit` of the repository itself. With `pack`, none of its objects is looked at.
        Exits with NOT_READABLE, and writes nothing, if the base is not there."""
        target.unlink(missing_ok=True)
        if pack is not None:
            self.runtime.upload(pack, f"{self.store}/base.pack")
            objects = 'git --git-dir="$own" index-pack --stdin < "$store/base.pack" >/dev/null\n'
        else:
            objects = BORROW
        found = self._run(
            OWN,
            objects,
            f"base={base}\n" if base else _own_base(commit),
            ENTER,
            # A repository without a commit began empty; one without the commit that the task names did not.
            EMPTY if base is None and commit == "HEAD" else "",
            f'git ls-tree -r -t "$base" >/dev/null 2>&1 || exit {NOT_READABLE}\n',
            self._add,
            f'{DIFF} "$base" -- . > "$store/patch" || exit {NOT_READABLE}',
            what="patch command",
        )
        if found.ok:
            self.runtime.download(f"{self.store}/patch", target)
        return found

    def apply(self, patch: Path) -> ExecResult:
        """Apply a patch to the folder: with git, and if that refuses, with `patch`, which is more forgiving."""
        self.runtime.upload(patch, f"{self.store}/apply.diff")
        return self._run(
            'own="$store/git/.git"\n',
            ENTER,
            'git apply -v --whitespace=nowarn "$store/apply.diff" && exit 0\n',
            "echo 'git apply failed, trying patch'\n",
            'patch --batch --fuzz=5 -p1 -i "$store/apply.diff"',
            what="patch",
        )

    def changed(self, base: str, target: Path) -> dict[str, bool]:
        """Paths that differ from the tree `base`, and whether it has them. Raises EvaluatorError."""
        listing = 'git diff --name-status --no-renames -z "$base" -- . > "$store/changed"'
        found = self._run('own="$store/git/.git"\n', f"base={base}\n", ENTER, self._add, listing, what="changed files")
        if not found.ok:
            raise EvaluatorError(f"git cannot compare {self.folder}: it {found.summary()}", code="no_base_tree")
        self.runtime.download(f"{self.store}/changed", target)
        parts = target.read_bytes().decode(errors="surrogateescape").split("\0")
        return {path: letter != "A" for letter, path in zip(parts[::2], parts[1::2], strict=False)}

    def restore(self, base: str, paths: Mapping[str, bool], scratch: Path) -> None:
        """Make `paths` what they are in the tree `base`: gone, where it does not have them. Raises EvaluatorError."""
        for name, wanted in (("restore", list(paths)), ("kept", [path for path, there in paths.items() if there])):
            scratch.write_bytes(b"".join(path.encode(errors="surrogateescape") + b"\0" for path in wanted))
            self.runtime.upload(scratch, f"{self.store}/{name}")
        found = self._run(
            'own="$store/git/.git"\n',
            f"base={base}\n",
            ENTER,
            'xargs -0 rm -rf -- < "$store/restore"\n',
            'if [ -s "$store/kept" ]; then GIT_LITERAL_PATHSPECS=1 git checkout -q "$base" '
            '--pathspec-from-file="$store/kept" --pathspec-file-nul; fi',
            what="restore",
        )
        if not found.ok:
            raise EvaluatorError(f"protected files cannot be restored: git {found.summary()}", code="not_restored")

    def remove(self) -> None:
        """Take our own files away again, before anything of the agent's runs there."""
        self._run('rm -rf -- "$store"', what="clean up")

    @property
    def _add(self) -> str:
        """Take the files as they are now into our own index; `base` says which inner repositories are the base's."""
        force = " -f" if self.ignored else ""
        # With --ignore-errors, 1 means that single files could not be read; the index is written nevertheless.
        add = f"git add -A{force} --ignore-errors -- . || test $? -eq 1\n"
        return f': > "$store/nested"\n{UNNEST}{add}{RENEST}'

    def _run(self, *parts: str, what: str) -> ExecResult:
        prelude = PRELUDE.format(store=shlex.quote(self.store), folder=shlex.quote(self.folder))
        found = run(self.case, self.runtime, prelude + "".join(parts), what=what, seconds=self.seconds)
        if found.exit_code in CANNOT_RUN:
            raise EvaluatorError(f"{self.folder} cannot be looked at: it {found.summary()}", code="command_not_run")
        return found


def _own_base(commit: str) -> str:
    """The tree that the repository itself has for `commit`."""
    named = shlex.quote(commit + "^{tree}")
    return f"base=$(git -c safe.directory='*' rev-parse -q --verify {named}) || base=\n"
