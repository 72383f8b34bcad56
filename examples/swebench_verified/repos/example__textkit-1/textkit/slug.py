"""Words for addresses."""

import re


def slugify(text: str) -> str:
    """Small letters and digits, with one hyphen between words."""
    return re.sub(r"[^a-z0-9]", "-", text.lower())
