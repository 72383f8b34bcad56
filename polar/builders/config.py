"""What a task may set on a builder, checked when it is submitted. What a setting does is the builder's affair."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import StrictBool, ValidationError

from polar.errors import SpecError
from polar.spec import Spec, validation_errors

C = TypeVar("C", bound="BuilderConfig")


class BuilderConfig(Spec):
    """The settings that every builder has."""

    include_auxiliary: StrictBool = False
    """Side calls (titles, summaries) get traces too; otherwise they are only counted."""


def read_config(model: type[C], config: dict[str, Any]) -> C:
    """`config` as a checked value. Raises SpecError at builder.config.<key>."""
    try:
        return model.model_validate(config)
    except ValidationError as error:
        errors = [(f"builder.config.{field}", reason) for field, reason in validation_errors(error)]
        raise SpecError("; ".join(f"{field}: {reason}" for field, reason in errors), errors=errors) from None
