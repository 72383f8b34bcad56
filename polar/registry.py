"""Names to members: the one way a family's table, or a user's `module:Class`, becomes a class.

Each family keeps its own table in its `__init__`; this file only looks up and explains. Imports are lazy,
so that a member's dependencies load only where the member is used.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TypeVar

from polar.errors import SpecError

T = TypeVar("T")


def load(family: str, table: Mapping[str, str], name: str, base: type[T]) -> type[T]:
    """The class called `name`: a key of `table`, or `module:Class`.

    Raises SpecError, naming what exists, if there is none or it is not a `base`."""
    path = table.get(name, name)
    if ":" not in path:
        raise SpecError.at(family, f"{name!r} is not known; there are {', '.join(sorted(table))}, or module:Class")
    module_name, _, class_name = path.partition(":")
    try:
        member = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise SpecError.at(family, f"{name!r} cannot be loaded: {error}") from error
    if not (isinstance(member, type) and issubclass(member, base)):
        raise SpecError.at(family, f"{name!r} is not a {base.__name__}")
    return member
