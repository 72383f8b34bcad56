"""The builders by name, and the one way to make one. What a builder does is in base.py."""

from __future__ import annotations

from polar import registry
from polar.builders.base import Builder
from polar.errors import SpecError
from polar.spec import StrategySpec

BUILDERS = {
    "messages": "polar.builders.messages:Messages",
    "per_request": "polar.builders.per_request:PerRequest",
    "prefix_merging": "polar.builders.prefix_merging:PrefixMerging",
    "token_tree": "polar.builders.token_tree:TokenTree",
}


def create(spec: StrategySpec) -> Builder:
    """The builder that `spec` names, made with its config. Raises SpecError at builder.strategy or builder.config."""
    member = registry.load("builder.strategy", BUILDERS, spec.strategy, Builder)  # type: ignore[type-abstract]
    try:
        return member(**spec.config)
    except (TypeError, ValueError) as error:
        # A user's own class may simply name its keywords, or refuse a value in the usual way.
        raise SpecError.at("builder.config", str(error)) from error


__all__ = ["BUILDERS", "Builder", "create"]
