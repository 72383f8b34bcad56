"""How deeply JSON may be nested: less than what its readers and writers can take once it stands inside more JSON.

orjson reads 1,024 levels and writes 254: what lies between would be taken in, and could never be shown again.
"""

from __future__ import annotations

from typing import Any

DEEPEST = 100


def too_deep(value: Any) -> bool:
    """Whether parsed JSON has more than DEEPEST levels; looked at level by level, so that nothing here recurses."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
