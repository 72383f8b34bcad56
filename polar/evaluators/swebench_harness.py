"""SWE-bench judges: an instance's script runs its tests on the patched repository, SWE-bench's own code grades them.

Needs the extra `polar-rollout[swebench]`. Any instance in the package's format will do, a dataset's or one's own: the
runtime has its repository, its `eval_script` runs the tests, its `log_parser` reads them. No image is built or pulled
here, that is the runtime's affair.

The grader finds the tests' output between markers that everyone knows. So the script runs with markers of our own that
are made for this one evaluation, and whatever looks like the known ones in the output is not one.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import uuid
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import field_validator, model_validator

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.commands import output_of, run
from polar.evaluators.config import Text, read_config
from polar.evaluators.ends import contradictions
from polar.evaluators.evidence import clipped
from polar.evaluators.patches import PatchConfig, PatchEvaluator
from polar.runtimes.base import Runtime

NEEDED = ("instance_id", "repo", "version", "FAIL_TO_PASS", "PASS_TO_PASS", "log_parser", "eval_type", "eval_script")
"""Fields of an instance that grading reads."""
START, END, EXIT_CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"
MARKERS = (START, END, EXIT_CODE)
OUTPUT_KEPT = 32_000
"""Characters of the tests' output kept as evidence."""


class SwebenchConfig(PatchConfig):
    """Which instance."""

    instance: dict[str, Any] | None = None
    """The instance itself, an object or its JSON text."""
    dataset: Text | None = None
    """Instead: a .json, .jsonl or .parquet file on the node, or the name of a dataset that is fetched."""
    split: Text = "test"
    """Of a dataset that is fetched."""
    instance_id: Text | None = None
    """Which one of the dataset."""

    @field_validator("instance", mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        if isinstance(value, str):
            try:
                return json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"is not JSON: {error}") from error
        return value

    @model_validator(mode="after")
    def _one_instance(self) -> Self:
        if (self.instance is None) == (self.dataset is None):
            raise ValueError("instance: give it, or dataset and instance_id")
        if (self.dataset is None) != (self.instance_id is None):
            raise ValueError("instance_id: goes with dataset, and only there")
        if self.instance is not None and (why := problem(self.instance)):
            raise ValueError(f"instance: {why}")
        return self


class SwebenchHarness(PatchEvaluator):
    """1.0 if every test that should be mended is, and every test that should stay whole did."""

    name: ClassVar[str] = "swebench_harness"

    def __init__(self, **config: Any) -> None:
        self.config: SwebenchConfig = read_config(SwebenchConfig, config)
        if importlib.util.find_spec("swebench") is None:
            fix = "needs the package swebench: pip install 'polar-rollout[swebench]'"
            raise SpecError.at("evaluator.strategy", f"{self.name} {fix}")

    def report(self, case: Case, runtime: Runtime, patch: bytes) -> dict[str, Any]:
        # Loading the package takes seconds and 130 MB, so only a process that grades pays for it.
        from swebench.harness.grading import get_eval_report
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.harness.utils import make_test_spec

        instance = self._instance(case)
        if instance["log_parser"] not in PARSER_REGISTRY:
            known = f"swebench has no log parser {instance['log_parser']!r}"
            raise EvaluatorError(f"{known}; there are {', '.join(sorted(PARSER_REGISTRY))}", code="bad_instance")
        try:
            test_spec = make_test_spec({"image": "", **instance})
        except (KeyError, TypeError, ValueError) as error:
            raise EvaluatorError(f"swebench cannot read the instance: {error!r}", code="bad_instance") from error
        output, exit_code = self._run(case, runtime, test_spec.eval_script)
        log = case.logs / "test_output.txt"
        log.write_text(output)
        name = test_spec.instance_id
        prediction = {
            "instance_id": name,
            "model_name_or_path": "policy",
            "model_patch": patch.decode(errors="replace"),
        }
        graded = get_eval_report(test_spec, prediction, str(log), include_tests_status=True)[name]
        contradicted = contradictions(output.partition(START)[2].partition(END)[0])
        return {
            **graded,
            "instance_id": name,
            "resolved": bool(graded["resolved"]) and not contradicted,
            "contradicted_tests": contradicted,
            "exit_code": exit_code,
            "output": clipped(output, OUTPUT_KEPT),
        }

    def _instance(self, case: Case) -> dict[str, Any]:
        if self.config.instance is not None:
            return self.config.instance
        from swebench.harness.utils import load_swebench_dataset

        dataset, wanted = str(self.config.dataset), str(self.config.instance_id)
        if Path(dataset).is_absolute():
            case.check_source(Path(dataset))
        try:
            (found,) = load_swebench_dataset(dataset, self.config.split, [wanted])
        except Exception as error:  # noqa: BLE001 - it raises whatever its loaders of files, hubs and formats raise
            raise EvaluatorError(f"no instance {wanted} from {dataset}: {error}", code="no_instance") from error
        if why := problem(dict(found)):
            raise EvaluatorError(f"instance {wanted} of {dataset}: {why}", code="bad_instance")
        return dict(found)

    def _run(self, case: Case, runtime: Runtime, script: str) -> tuple[str, int | None]:
        """The tests' output with SWE-bench's markers only where the script itself set them."""
        token = f"polar-{uuid.uuid4().hex}"
        ours = {marker: marker.replace(">>>>>", token) for marker in MARKERS}
        source = case.logs / "eval.sh"
        # The shell reads the script from a file that has no name any more, and does not pass it on: tests do not
        # come across it.
        source.write_text("exec 3<&-\n" + _replaced(script, ours))
        inside = f"{runtime.home.rstrip('/')}/.{token}.sh"
        runtime.upload(source, inside)
        what, quoted = "test command", shlex.quote(inside)
        command = f"exec 3< {quoted} && rm -f {quoted} && exec bash /dev/fd/3 2>&1"
        seconds = self.config.test_timeout
        found = run(case, runtime, command, what=what, seconds=seconds, cwd=self.config.repo_dir)
        raw = output_of(case, what, found)[0].decode(errors="replace")
        raw = _replaced(raw, {marker: f"[printed: {marker.strip('> ')}]" for marker in MARKERS})
        return _replaced(raw, {mine: marker for marker, mine in ours.items()}), found.exit_code


def _replaced(text: str, words: dict[str, str]) -> str:
    for old, new in words.items():
        text = text.replace(old, new)
    return text


def problem(instance: dict[str, Any]) -> str | None:
    """Why an instance cannot be graded, if so."""
    missing = [name for name in NEEDED if not instance.get(name) and name not in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    missing += [name for name in ("FAIL_TO_PASS", "PASS_TO_PASS") if name not in instance]
    if missing:
        return f"has no {', '.join(missing)}; the format is that of swebench 5"
    script = str(instance["eval_script"])
    if START not in script or END not in script:
        return f"eval_script does not print {START!r} and {END!r}"
    return None
