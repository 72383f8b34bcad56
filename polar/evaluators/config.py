"""What a task may set on an evaluator, checked when it is submitted. What a setting does is the evaluator's affair."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import Field, StringConstraints, ValidationError

from polar.errors import SpecError
from polar.spec import Spec, validation_errors

C = TypeVar("C", bound=Spec)
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
Seconds = Annotated[float, Field(gt=0)]


class NoConfig(Spec):
    """For evaluators without settings."""


def read_config(model: type[C], config: dict[str, Any]) -> C:
    """`config` as a checked value. Raises SpecError at evaluator.config.<key>."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        errors = [(f"evaluator.config.{field}", reason) for field, reason in validation_errors(error)]
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors), errors=errors) from None
