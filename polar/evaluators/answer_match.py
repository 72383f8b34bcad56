"""The agent's last answer judges: 1.0 if it is one of the expected ones, else 0.0.

Looks at the text alone, at the model's last message or at a file that the agent wrote; how it came about counts
nothing. Answers that only a reader can compare are for a judge (harbor_rubric).
"""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from polar.errors import EvaluatorError
from polar.evaluators.base import Case, Evaluator, Verdict
from polar.evaluators.commands import runtime_of
from polar.evaluators.config import Text, read_config
from polar.evaluators.evidence import clipped
from polar.spec import Spec

ANSWER_BYTES = 1_000_000
NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class AnswerMatchConfig(Spec):
    """What is expected, where the answer is, and how the two are compared."""

    answers: tuple[Text, ...]
    """Any of them will do; one text is taken for a list of one."""
    answer_file: Text | None = None
    """Where the agent left the answer, relative to the runtime's workdir; None: its last message."""
    extract: Literal["all", "last_line", "boxed", "tag"] = "all"
    """Which part is the answer: `boxed` is the last \\boxed{…}, `tag` the last <answer>…</answer>."""
    compare: Literal["text", "exact", "number", "contains"] = "text"
    """`text` looks past case, white space and a final full stop; `number` takes the part's last number."""
    tolerance: float = 1e-6
    """For numbers: largest difference, relative to the expected one where that is above 1."""

    @field_validator("answers", mode="before")
    @classmethod
    def _list(cls, value: object) -> object:
        found = [value] if isinstance(value, (str, int, float)) else value
        if not isinstance(found, (list, tuple)) or not found:
            raise ValueError("must name at least one answer")
        return [str(each) for each in found]


class AnswerMatch(Evaluator):
    """One answer against the expected ones."""

    name: ClassVar[str] = "answer_match"

    def __init__(self, **config: Any) -> None:
        self.config = read_config(AnswerMatchConfig, config)

    def evaluate(self, case: Case) -> Verdict:
        said = case.final_text() if self.config.answer_file is None else self._file(case)
        answer = extracted(said, self.config.extract)
        expected = list(self.config.answers)
        evidence = {"answer": None if answer is None else clipped(answer, 4000), "expected": expected}
        matched = answer is not None and any(self._same(answer, each) for each in expected)
        return Verdict(1.0 if matched else 0.0, evidence=evidence)

    def _same(self, answer: str, expected: str) -> bool:
        if self.config.compare == "exact":
            return answer == expected
        if self.config.compare == "contains":
            return plain(expected) in plain(answer)
        if self.config.compare == "text":
            return plain(answer) == plain(expected)
        found, wanted = last_number(answer), last_number(expected)
        if found is None or wanted is None:
            return False
        return abs(found - wanted) <= self.config.tolerance * max(1.0, abs(wanted))

    def _file(self, case: Case) -> str:
        local = case.logs / "answer"
        case.logs.mkdir(parents=True, exist_ok=True)
        local.unlink(missing_ok=True)
        try:
            (case.agent_runtime or runtime_of(case, self.name)).download(str(self.config.answer_file), local)
        except FileNotFoundError:
            return ""
        if not local.is_file() or local.is_symlink():
            raise EvaluatorError(f"{self.config.answer_file} is no plain file", code="bad_answer")
        with local.open("rb") as file:
            return file.read(ANSWER_BYTES).decode(errors="replace")


def extracted(text: str, part: str) -> str | None:
    """The part of a text that is the answer; None if there is none."""
    if part == "last_line":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None
    if part == "tag":
        before, opened, rest = text.rpartition("<answer>")
        return rest.partition("</answer>")[0].strip() if opened and "</answer>" in rest else None
    if part == "boxed":
        return _boxed(text)
    return text.strip() or None


def plain(text: str) -> str:
    """A text without what says nothing: case, white space, one form of the same letter, a final full stop."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".")


def last_number(text: str) -> float | None:
    """The last number of a text, thousands' commas aside."""
    found = NUMBER.findall(text)
    number = float(found[-1].replace(",", "")) if found else math.nan
    return number if math.isfinite(number) else None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed")
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place].strip()
    return None
