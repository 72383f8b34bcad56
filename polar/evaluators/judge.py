"""A judge that is a language model: one question to an OpenAI-compatible endpoint, one structured answer, or an error.

What is asked and what an answer is worth is the evaluator's affair; here are the call, its retries and the reading of
what came back. Nothing is guessed: an answer that is not what was asked for is asked for again, and then an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError, field_validator

from polar.errors import EvaluatorError, SpecError
from polar.evaluators.base import Case
from polar.evaluators.config import Seconds, Text
from polar.evaluators.evidence import clipped
from polar.spec import Spec, validation_errors

A = TypeVar("A", bound=BaseModel)
AGAIN = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers of a server that may be other ones in a moment."""
PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 20.0
SAID_KEPT = 8000


class JudgeConfig(Spec):
    """Who judges."""

    judge_base_url: Text
    """Of an OpenAI-compatible endpoint, with its /v1."""
    judge_model: Text
    """As the endpoint calls it."""
    judge_api_key_env: Text = "JUDGE_API_KEY"
    """Which variable of evaluator.env holds the key; it is not passed on to commands."""
    judge_timeout: Seconds = 60.0
    """For one call."""
    judge_max_retries: Annotated[int, Field(ge=0, le=20)] = 2
    """More calls after one that failed, or whose answer is not what was asked for."""
    judge_temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0.0: the same again, as far as the endpoint keeps to it."""
    judge_max_tokens: Annotated[int, Field(gt=0)] = 2048
    """Of an answer, for endpoints that need to be told."""
    judge_format: Literal["json_schema", "json_object", "none"] = "json_schema"
    """How the endpoint is told to answer in JSON; `none` for those that cannot be told."""

    @field_validator("judge_base_url")
    @classmethod
    def _http(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("must be an http or https URL")
        return value.rstrip("/")


@dataclass(frozen=True, slots=True)
class Judge:
    """One judge for one case."""

    case: Case
    config: JudgeConfig

    def ask(self, messages: list[dict[str, str]], answer: type[A]) -> tuple[A, list[dict[str, Any]]]:
        """The judge's answer, and every attempt at it for the evidence. Raises EvaluatorError with these attempts."""
        try:
            self.case.check_url(self.config.judge_base_url)
        except SpecError as error:
            raise EvaluatorError(error.message, code="judge_refused") from error
        attempts: list[dict[str, Any]] = []
        with httpx.Client(timeout=None) as client:
            for number in range(self.config.judge_max_retries + 1):
                if number:
                    self._pause(number)
                attempt: dict[str, Any] = {}
                attempts.append(attempt)
                text = self._call(client, messages, answer, attempt)
                if text is None:
                    if attempt.get("final"):
                        break
                    continue
                try:
                    return answer.model_validate(_object(text)), attempts
                except (ValueError, RecursionError) as error:
                    attempt["error"] = _reason(error)
                    said = {"role": "assistant", "content": clipped(text, SAID_KEPT)}
                    again = f"That is not the JSON that was asked for: {attempt['error']}. Answer with that JSON alone."
                    messages = [*messages, said, {"role": "user", "content": again}]
        last = attempts[-1]["error"]
        message = f"the judge gave no usable answer in {len(attempts)} attempts; the last: {last}"
        raise EvaluatorError(message, code="judge_failed", detail={"judge": attempts})

    def _call(
        self, client: httpx.Client, messages: list[dict[str, str]], answer: type[BaseModel], attempt: dict[str, Any]
    ) -> str | None:
        """What the judge said; None, with the reason on `attempt`, if it said nothing."""
        config, left = self.config, self.case.limits.left()
        if left == 0 or self.case.limits.cancelled.is_set():
            raise EvaluatorError("no time is left for the judge", code="evaluator_timeout")
        key = self.case.env.get(config.judge_api_key_env)
        body: dict[str, Any] = {
            "model": config.judge_model,
            "messages": messages,
            "temperature": config.judge_temperature,
            "max_tokens": config.judge_max_tokens,
            **_format(config.judge_format, answer),
        }
        try:
            response = client.post(
                f"{config.judge_base_url}/chat/completions",
                json=body,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=config.judge_timeout if left is None else min(config.judge_timeout, left),
            )
        except httpx.HTTPError as error:
            attempt["error"] = f"{type(error).__name__}: {error}"
            return None
        if response.status_code != 200:
            attempt["error"] = f"HTTP {response.status_code}: {clipped(response.text, 500)}"
            attempt["final"] = response.status_code not in AGAIN
            return None
        try:
            text = response.json()["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            attempt["error"] = f"no message in {clipped(response.text, 500)}"
            return None
        attempt["said"] = clipped(text, SAID_KEPT)
        return text

    def _pause(self, number: int) -> None:
        pause = min(PAUSE_SECONDS * 2 ** (number - 1), LONGEST_PAUSE_SECONDS)
        left = self.case.limits.left()
        self.case.limits.cancelled.wait(pause if left is None else min(pause, left))


def _format(how: str, answer: type[BaseModel]) -> dict[str, Any]:
    if how == "none":
        return {}
    if how == "json_object":
        return {"response_format": {"type": how}}
    schema = {"name": "verdict", "schema": answer.model_json_schema()}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def _object(text: str) -> Any:
    """The JSON object in a text that may have words or a fence around it. Raises ValueError."""
    start = text.find("{")
    if start < 0:
        raise ValueError("there is no object in it")
    return json.JSONDecoder().raw_decode(text, start)[0]


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{field}: {reason}" for field, reason in validation_errors(error)[:5])
    return str(error) or type(error).__name__
